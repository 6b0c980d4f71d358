"""A device that lags behind its host, made of the CPU: a step runs on while a thread, the stream, does what it has told so far.

Inside `ahead` an operation on the device's tensors returns at once, and what it makes is POISON until the stream comes to it: a
moment after it was told, in order. Tensors of the device are a pipeline's parameters, what was received, and whatever is made
of them. The host waits for the stream where it asks for a value, and nowhere else; `waits` has these places. Where an operation
fails in the stream, the device is broken, as after an assertion in a kernel.

Not so on a GPU: what draws random numbers, what torch has no shapes for, and what torch itself does for replicas wait for the
stream here; so does an optimizer. Memory that was let go is kept until the stream has done with it: that it is used again too
early is seen for sends only (nccl_like.py).
"""

import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock
from penstock.engine import step
from penstock.engine.clock import GpuActionClock
from penstock.mesh import fsdp
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import local_shard

POISON = 0xFF  # every byte: NaN as a float, -1 as a whole number
LAG = 0.01  # seconds that an operation is done after it was told, at most
BROKEN = "CUDA error: device-side assert triggered"
HOUSE = Path(penstock.__file__).parent
META = torch.device("meta")
COUNTED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # that a tensor was changed: when the host tells so
aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_strided)
NOT_TOLD = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}  # done at once, when the stream is
VALUES = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
VIEWS = (aten._unsafe_view.default, aten.lift_fresh.default)  # which do not say that they are
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)  # of one dtype, which the host sees to

waits: list[str] = []  # where the host asked for a value


class AtOnce:
    """The stream where the host computes: what it is told is done."""

    def do(self, function: Any, *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    def synchronize(self) -> None:
        pass


AT_ONCE = AtOnce()


class LaggingStream(AtOnce):
    """What the host has told the device to do: one after the other, each a moment later."""

    def __init__(self) -> None:
        self._told, self.broken = queue.SimpleQueue[Any](), False
        threading.Thread(target=self._run, daemon=True).start()

    def do(self, function: Any, *args: Any, **kwargs: Any) -> None:
        if self.broken:
            raise torch.AcceleratorError(BROKEN)
        self._told.put((time.monotonic() + LAG * random.random(), function, args, kwargs))

    def synchronize(self) -> None:
        reached = threading.Event()
        self._told.put((0.0, None, reached, {}))
        reached.wait()
        if self.broken:
            raise torch.AcceleratorError(BROKEN)

    def _run(self) -> None:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(COUNTED):
            while True:
                at, function, args, kwargs = self._told.get()
                if function is None:
                    args.set()
                elif not self.broken:
                    time.sleep(max(0.0, at - time.monotonic()))
                    try:
                        function(*args, **kwargs)
                    except Exception as error:
                        self.broken = True
                        sys.stderr.write(f"[lagging] the device is broken: {error!r}\n")
                function = args = kwargs = None


_here = threading.local()  # where a thread's operations go
_there: dict[int, StorageWeakRef] = {}  # memory of the device


def compute() -> AtOnce:
    """The stream that does what this thread tells."""
    return getattr(_here, "stream", AT_ONCE)


@contextmanager
def ahead(stream: LaggingStream, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the host runs ahead of a device that has the parameters of `modules`; at the end it waits for it."""
    for key in [key for key, memory in _there.items() if memory.expired()]:
        del _there[key]
    for module in modules:
        for parameter in (*module.parameters(), *module.buffers()):
            put(local_shard(parameter))
            put(local_shard(parameter.grad))
    outer, _here.stream = compute(), stream  # a call within a call has the stream already
    try:
        with _Ahead():
            yield
    finally:
        with suppress(torch.AcceleratorError):
            stream.synchronize()
        _here.stream = outer


def put(tensor: Any) -> None:
    """From now on this is one of the device's."""
    if isinstance(tensor, Tensor) and not tensor.is_meta:
        for storage in _storages(tensor):
            _there[storage._cdata] = StorageWeakRef(storage)


def is_there(tensor: Tensor) -> bool:
    return any(storage._cdata in _there for storage in _storages(tensor))


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    parts = [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]
    return [part.untyped_storage() for part in parts]


def poison(tensor: Tensor) -> None:
    """Fill its memory."""
    if tensor.numel() and not tensor.is_meta:
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).fill_(POISON)


class _Ahead(TorchDispatchMode):
    """Tells the stream what to do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # it is taken apart first
        if not any(map(is_there, tensors)):
            made = func(*args, **kwargs)
            if func.overloadpacket in EMPTY:
                poison(made)
            return made
        if func.is_view or func in VIEWS:
            return func(*args, **kwargs)
        if func in VALUES:
            waits.append(_place())
        elif func.namespace == "aten" and not NOT_TOLD & set(func.tags) and not _needs_host(func, tensors):
            with suppress(RuntimeError):  # its shapes are not known, or wrong: as a GPU's host does, it says so itself
                return _later(func, args, kwargs)
        compute().synchronize()
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            put(leaf)
        return made


def _needs_host(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it is done at once: sparse; with a workspace that has no shape; or a product that the host refuses."""
    if any(tensor.layout != torch.strided for tensor in tensors) or "mkldnn" in func.name():
        return True
    return func.overloadpacket in PRODUCTS and len({tensor.dtype for tensor in tensors}) > 1


def _later(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, before it is done. Raises NotImplementedError where that is not known."""
    names, returns = func._schema.arguments, func._schema.returns
    written = [
        args[place] if place < len(args) else kwargs[name.name]
        for place, name in enumerate(names)
        if name.alias_info is not None and name.alias_info.is_write
    ]
    if written:
        if any(value.alias_info is None for value in returns):
            raise NotImplementedError
        for leaf in tree_leaves(written):
            put(leaf)
        compute().do(func, *args, **kwargs)
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)
    if kwargs.get("device") == META:
        return func(*args, **kwargs)
    there = {**kwargs, "device": META} if isinstance(kwargs.get("device"), torch.device) else kwargs
    shapes = func(*tree_map_only(Tensor, _shape, args), **tree_map_only(Tensor, _shape, there))
    if not all(leaf is None or (isinstance(leaf, Tensor) and leaf.layout == torch.strided) for leaf in tree_leaves(shapes)):
        raise NotImplementedError
    made = tree_map_only(
        Tensor, lambda value: torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu"), shapes
    )
    for leaf in tree_leaves(made):
        if leaf is not None:
            put(leaf)
            poison(leaf)
    compute().do(_fill, made, func, *args, **kwargs)
    return made


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _fill(made: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    for to, leaf in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
        if to is not None and leaf is not None and to.shape == leaf.shape:  # else it is of no use: nobody has asked for it
            to.copy_(leaf)


def _place() -> str:
    """The innermost line of the package that is running, if one is."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(HOUSE)]
    return f"{Path(frames[-1].filename).relative_to(HOUSE)} {frames[-1].name}: {frames[-1].line}" if frames else "elsewhere"


def _reads(name: str) -> None:
    """Have a method of tensors that reads memory without an operation wait for the stream; what it gives is the host's."""
    method = getattr(Tensor, name)

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(compute(), LaggingStream) and is_there(self):
            waits.append(_place())
            compute().synchronize()
            with _disable_current_modes():
                self = self.detach().clone()
        return method(self, *args, **kwargs)

    setattr(Tensor, name, read)


for value in ("tolist", "numpy", "cpu"):
    _reads(value)


class LaggingEvent:
    """In the place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.reached = threading.Event()

    def record(self) -> None:
        compute().do(self._reach)

    def _reach(self) -> None:
        self.time = time.perf_counter()
        self.reached.set()

    def synchronize(self) -> None:
        if not self.reached.is_set():
            compute().synchronize()

    def elapsed_time(self, other: "LaggingEvent") -> float:
        return (other.time - self.time) * 1e3


# The module stands in for `torch.cuda`, which has them by these names.
Stream, Event = LaggingStream, LaggingEvent


class LaggingClock(GpuActionClock):
    """A step's clock on such a device."""

    def __init__(self, *args: Any) -> None:
        with patch.object(torch, "get_device_module", lambda _: sys.modules[__name__]):
            super().__init__(*args)


def _settled(function: Any) -> Any:
    """`function`, which is no operation, done when the stream is."""

    def settled(*args: Any) -> Any:
        compute().synchronize()
        return function(*args)

    return settled


def install() -> None:
    """From now on pipelines of this rank run on such a device."""
    torch.UntypedStorage.resize_ = _settled(torch.UntypedStorage.resize_)
    fsdp._averaging_pool.submit = _settled(fsdp._averaging_pool.submit)
    stream = LaggingStream()
    os.register_at_fork(after_in_child=stream.__init__)  # which has no thread yet

    def within(method: Any) -> Any:
        def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
            with ahead(stream, self.stages.values()):
                return method(self, *args, **kwargs)

        return inside

    for name in ("_run", "generate", "clip_grad_norm_"):
        setattr(Pipeline, name, within(getattr(Pipeline, name)))
    step.make_clock = LaggingClock
