"""An emulation of a GPU's asynchronous execution on the CPU: the host runs ahead while a thread, the stream, runs operations.

Inside `ahead` an operation on the device's tensors returns at once. Its result is POISON until the stream has run it, in order
and a moment later. Tensors of the device are a pipeline's parameters, received tensors, and all results computed from these.
The host waits for the stream only where it reads a value; `waits` has these places. An operation that fails in the stream
breaks the device, as an assertion in a kernel does.

Other than on a GPU, these wait for the stream here: operations that draw random numbers, those without shapes on torch's meta
device, torch's own work for replicas, and optimizers. Freed memory is kept until the stream has run what uses it: a use too
early is detected for sends only (emulated_nccl.py).
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
from penstock.guards import tensor_snapshot
from penstock.mesh import fsdp
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import local_shard

POISON = 0xFF  # every byte: NaN as a float, -1 as a whole number
MAX_LAG_SECONDS = 0.01  # from the host's call of an operation until the stream runs it
BROKEN = "CUDA error: device-side assert triggered"
PACKAGE_FOLDER = Path(penstock.__file__).parent
META = torch.device("meta")
VERSION_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # excluded: the host counts versions, at the call
aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_strided)
SYNCHRONOUS_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}  # run by the host, after the stream
HOST_READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
VIEWS = (aten._unsafe_view.default, aten.lift_fresh.default)  # not marked as views by torch
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)  # the host checks that all dtypes are the same

waits: list[str] = []  # the places where the host read a value


class HostStream:
    """The stream of a host that computes itself: it runs everything at once."""

    def run(self, function: Any, *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    def synchronize(self) -> None:
        pass


HOST_STREAM = HostStream()


class LaggingStream(HostStream):
    """A stream that runs the host's operations in a thread: one after the other, each a moment later."""

    def __init__(self) -> None:
        self._operations, self.broken = queue.SimpleQueue[Any](), False
        threading.Thread(target=self._run_operations, daemon=True).start()

    def run(self, function: Any, *args: Any, **kwargs: Any) -> None:
        if self.broken:
            raise torch.AcceleratorError(BROKEN)
        self._operations.put((time.monotonic() + MAX_LAG_SECONDS * random.random(), function, args, kwargs))

    def synchronize(self) -> None:
        reached = threading.Event()
        self._operations.put((0.0, None, reached, {}))
        reached.wait()
        if self.broken:
            raise torch.AcceleratorError(BROKEN)

    def _run_operations(self) -> None:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(VERSION_KEYS):
            while True:
                start_seconds, function, args, kwargs = self._operations.get()
                if function is None:
                    args.set()
                elif not self.broken:
                    time.sleep(max(0.0, start_seconds - time.monotonic()))
                    try:
                        function(*args, **kwargs)
                    except Exception as error:
                        self.broken = True
                        sys.stderr.write(f"[lagging] the device is broken: {error!r}\n")
                function = args = kwargs = None


_thread = threading.local()  # `stream`: where a thread's operations run
_device_storages: dict[int, StorageWeakRef] = {}


def compute_stream() -> HostStream:
    """Return the stream that runs this thread's operations."""
    return getattr(_thread, "stream", HOST_STREAM)


@contextmanager
def ahead(stream: LaggingStream, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the host runs ahead of a device that has the parameters of `modules`; at the end it waits for the stream."""
    for key in [key for key, storage in _device_storages.items() if storage.expired()]:
        del _device_storages[key]
    for module in modules:
        for parameter in (*module.parameters(), *module.buffers()):
            move_to_device(local_shard(parameter))
            move_to_device(local_shard(parameter.grad))
    outer_stream, _thread.stream = compute_stream(), stream  # a call within a call has the stream already
    try:
        with _EnqueueOperations():
            yield
    finally:
        with suppress(torch.AcceleratorError):
            stream.synchronize()
        _thread.stream = outer_stream


def move_to_device(tensor: Any) -> None:
    """Count the tensor's memory as the device's from now on."""
    if isinstance(tensor, Tensor) and not tensor.is_meta:
        for storage in _storages(tensor):
            _device_storages[storage._cdata] = StorageWeakRef(storage)


def is_on_device(tensor: Tensor) -> bool:
    return any(storage._cdata in _device_storages for storage in _storages(tensor))


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    parts = [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]
    return [part.untyped_storage() for part in parts]


def poison(tensor: Tensor) -> None:
    """Fill the tensor's memory with POISON."""
    if tensor.numel() and not tensor.is_meta:
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).fill_(POISON)


class _EnqueueOperations(TorchDispatchMode):
    """Gives operations on the device's tensors to the stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # torch takes the subclass apart and calls again
        if not any(map(is_on_device, tensors)):
            made = func(*args, **kwargs)
            if func.overloadpacket in EMPTY:
                poison(made)
            return made
        if func.is_view or func in VIEWS:
            return func(*args, **kwargs)
        if func in HOST_READS:
            waits.append(_package_line())
        elif func.namespace == "aten" and not SYNCHRONOUS_TAGS & set(func.tags) and not _runs_on_host(func, tensors):
            with suppress(
                RuntimeError
            ):  # its shapes are unknown, or wrong: then the host runs it, and raises as a GPU's host does
                return _enqueue(func, args, kwargs)
        compute_stream().synchronize()
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            move_to_device(leaf)
        return made


def _runs_on_host(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether the host runs it: sparse tensors, workspaces without a shape, products that the host refuses."""
    if any(tensor.layout != torch.strided for tensor in tensors) or "mkldnn" in func.name():
        return True
    return func.overloadpacket in PRODUCTS and len({tensor.dtype for tensor in tensors}) > 1


def _enqueue(func: Any, args: Any, kwargs: Any) -> Any:
    """Give an operation to the stream. Return its result, not computed yet. Raises NotImplementedError if that is unknown."""
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
            move_to_device(leaf)
        compute_stream().run(func, *args, **kwargs)
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
            move_to_device(leaf)
            poison(leaf)
    compute_stream().run(_fill, made, func, *args, **kwargs)
    return made


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _fill(made: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    for to, leaf in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
        if to is not None and leaf is not None and to.shape == leaf.shape:  # else an output that the operation did not compute
            to.copy_(leaf)


def _package_line() -> str:
    """Return the innermost running line of the package; "elsewhere" if there is none."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE_FOLDER)]
    return (
        f"{Path(frames[-1].filename).relative_to(PACKAGE_FOLDER)} {frames[-1].name}: {frames[-1].line}"
        if frames
        else "elsewhere"
    )


def _make_synchronous(name: str) -> None:
    """Have a method of tensors that reads memory without an operation wait for the stream; its result is the host's."""
    method = getattr(Tensor, name)

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(compute_stream(), LaggingStream) and is_on_device(self):
            waits.append(_package_line())
            compute_stream().synchronize()
            with _disable_current_modes():
                self = self.detach().clone()
        return method(self, *args, **kwargs)

    setattr(Tensor, name, read)


for value in ("tolist", "numpy", "cpu"):
    _make_synchronous(value)


class LaggingEvent:
    """Replaces `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.reached = threading.Event()

    def record(self) -> None:
        compute_stream().run(self._reach)

    def _reach(self) -> None:
        self.time = time.perf_counter()
        self.reached.set()

    def synchronize(self) -> None:
        if not self.reached.is_set():
            compute_stream().synchronize()

    def elapsed_time(self, other: "LaggingEvent") -> float:
        return (other.time - self.time) * 1e3


# The names that they have in `torch.cuda`, which this module replaces.
Stream, Event = LaggingStream, LaggingEvent


class LaggingClock(GpuActionClock):
    """A step's clock on such a device."""

    def __init__(self, *args: Any) -> None:
        with patch.object(torch, "get_device_module", lambda _: sys.modules[__name__]):
            super().__init__(*args)


def _after_stream(function: Any) -> Any:
    """Return a function that waits for the stream, then calls `function`, which is no operation."""

    def wait_and_call(*args: Any) -> Any:
        compute_stream().synchronize()
        return function(*args)

    return wait_and_call


def install() -> None:
    """Have the pipelines of this process run on such a device from now on."""
    torch.UntypedStorage.resize_ = _after_stream(torch.UntypedStorage.resize_)
    fsdp._averaging_pool.submit = _after_stream(fsdp._averaging_pool.submit)
    stream = LaggingStream()
    os.register_at_fork(after_in_child=stream.__init__)  # which has no thread yet

    def on_device(method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with ahead(stream, self.stages.values()):
                return method(self, *args, **kwargs)

        return call

    for name in ("_run", "generate", "clip_grad_norm_"):
        setattr(Pipeline, name, on_device(getattr(Pipeline, name)))
    step.make_clock = LaggingClock
    tensor_snapshot.is_read_in_place = lambda tensor: False
