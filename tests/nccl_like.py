"""A communicator with NCCL's manners for CPU tensors, over Gloo: what a pipeline over NCCL does, seen without a GPU.

It is put in the place of NCCL by `install()`, in a rank; `make nccl` has it in all ranks that tests launch (`--over-nccl`). On
the CPU, which computes as it is told, the thread that computes is the compute stream; `ahead`, a device that lags behind its
host has one of its own (lagging_device.py). Of NCCL, as torch has it, it keeps:

* A communicator is made at its first use, each direction of a pair connected at its own: that blocks the host until the other
  side comes, and cannot be interrupted. (`eager`: all are made, and connected, with their group.)
* An operation begins when the compute stream has come to where it was told. The operations of a communicator run one after the
  other; a send ends when it has met its receive.
* It refuses dtypes that NCCL does not know, and tensors that are not contiguous.
* What is sent is read when it meets its receive. A tensor that is gone or was changed by then arrives as POISON.
* What is received is POISON until the compute stream has waited for it.
* `wait()` makes the compute stream wait and tells nothing: not of a lost rank, not of time, not that the group was aborted -
  then it ends, and what was to be received is what was there before.
* `abort()` wakes its own rank only; `shutdown()` waits for what is still running.
* A watchdog ends the process when an operation takes longer than the timeout, or the peer's process has died, unless
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0.

Not modelled: what operations that run at once take from each other and from the compute (processors, memory, links), and that
NCCL's own kernels wait for each other, which could hang where several of them share a device that has no room for all.
"""

import atexit
import itertools
import os
import queue
import random
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lagging_device import POISON, compute, put
from lagging_device import install as lag
from torch import Tensor

from penstock import torch_private
from penstock.comms import process_groups, topology
from penstock.comms.abort import abort_backend
from penstock.comms.backends import set_nccl_defaults

MANNERS = ("lazy", "eager", "ahead")  # connected at first use, or from the start; the first, and the host ahead of its device
KNOWN = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
ASKING, SENDING = 7, 8  # tags of the messages below
LONG = timedelta(minutes=30)
LATE = 0.002  # seconds, at most, that an operation takes to begin where devices lag

closed: list[int] = []  # the numbers of groups that were shut down, in that order
_numbers = itertools.count()
_open: "weakref.WeakSet[NcclLike]" = weakref.WeakSet()
_of_torchs: dict[Any, "NcclLike"] = {}
_manners = "lazy"


def install(manners: str = "lazy") -> None:
    """From now on whatever this rank would do by NCCL, had each rank a GPU of its own, it does by groups of this kind."""
    global _manners
    _manners = manners
    if manners == "ahead":
        lag()
    join = topology._find_topology
    topology._find_topology = lambda backend, timeout, device: _joined(join("gloo", timeout, "cpu"))
    process_groups.new_nccl_group = NcclLike
    torch_private.group_backend = lambda group, device: _of(group, topology.current_topology())
    set_nccl_defaults()
    threading.Thread(target=_watchdog, daemon=True).start()


def over_nccl(manners: str, function: Any, *args: Any) -> Any:
    """What ranks are launched with, in the place of `function`."""
    install(manners)
    return function(*args)


def _joined(joined: topology.Topology) -> topology.Topology:
    """A topology of NCCL's; `eager`, torch connects the group of all ranks when it is made."""
    joined = replace(joined, backend="nccl")
    if _manners == "eager" and joined.world_size > 1:
        _of(dist.group.WORLD, joined)
    return joined


def _of(group: Any, joined: topology.Topology) -> "NcclLike":
    """What carries the messages of torch's `group`."""
    if group not in _of_torchs:
        store = dist.PrefixStore(f"of-{group.group_name}", joined.store)
        _of_torchs[group] = NcclLike(store, group.rank(), group.size(), joined.timeout)
    return _of_torchs[group]


class Work:
    """An operation: not begun, running or done."""

    def __init__(self, group: "NcclLike", tensor: Tensor, receives: bool) -> None:
        self.group, self.receives = group, receives
        self.kept = (lambda: tensor) if receives else weakref.ref(tensor)  # what is sent must be kept by the sender
        self.size, self.posted = tensor.numel() * tensor.itemsize, time.monotonic()
        self.begun, self.done = threading.Event(), threading.Event()
        self.data = self.before = torch.empty(0, dtype=torch.uint8, device="cpu")  # what travels; what was in a buffer before
        self.digest = 0

    def begin(self) -> None:
        """The compute stream has come to it."""
        tensor = self.kept()
        if tensor is not None and self.receives:
            self.before, self.data = _bytes(tensor).clone(), torch.empty(self.size, dtype=torch.uint8, device="cpu")
            _bytes(tensor).fill_(POISON)
        elif tensor is not None:
            self.digest = _digest(tensor)
        self.begun.set()

    def is_completed(self) -> bool:
        return self.done.is_set() or self.group.aborted.is_set()

    def wait(self) -> bool:
        compute().do(self.arrive, self.kept())  # whose memory is used again behind that only
        return True

    def arrive(self, tensor: Tensor | None) -> None:
        """The compute stream waits for it."""
        self.end()
        if self.receives and tensor is not None:
            _bytes(tensor).copy_(self.data if self.done.is_set() else self.before)

    def end(self) -> None:
        """Until it is done, or nothing comes of it."""
        while not self.done.wait(0.005) and not self.group.aborted.is_set():
            pass


class NcclLike:
    """A group; between each two of its ranks a communicator of their own, as torch makes them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.aborted, self.outstanding, self.streams = threading.Event(), list[Work](), dict[str, queue.SimpleQueue[Any]]()
        self.met, self.gloo, self.number = set[str](), dict[str, Any](), next(_numbers)
        _open.add(self)
        if _manners == "eager":
            for one, other in itertools.combinations(range(size), 2):
                if rank in (one, other):
                    self._meet(one + other - rank)

    def name(self) -> str:
        return "nccl"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._checked(tensors)
        pair = self._meet(peer, f"{self.rank}-{peer}")
        return self._post(pair, Work(self, tensor, receives=False), self._send, self.gloo[pair], int(peer > self.rank))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._checked(tensors)
        pair = self._meet(peer, f"{peer}-{self.rank}")
        put(tensor)
        return self._post(pair, Work(self, tensor, receives=True), self._receive, self.gloo[pair], int(peer > self.rank))

    def _send(self, work: Work, gloo: Any, peer: int) -> None:
        gloo.recv([torch.zeros(1, device="cpu")], peer, ASKING).wait()
        tensor = work.kept()
        intact = tensor is not None and _digest(tensor) == work.digest
        data = _bytes(tensor).clone() if intact else torch.full((work.size,), POISON, dtype=torch.uint8)
        gloo.send([data], peer, SENDING).wait()

    def _receive(self, work: Work, gloo: Any, peer: int) -> None:
        asked = gloo.send([torch.ones(1, device="cpu")], peer, ASKING)
        gloo.recv([work.data], peer, SENDING).wait()
        asked.wait()

    def _checked(self, tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            if tensor.dtype not in KNOWN:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        return tensors

    def _meet(self, peer: int, *directions: str) -> str:
        """At the first use of a pair, and of each direction between its ranks: until the other comes; the pair's name."""
        pair = sorted((self.rank, peer))
        for what in (name := ":".join(map(str, pair)), *directions):
            self._come(what, pair)
        return name

    def _come(self, what: str, ranks: Sequence[int]) -> None:
        """At the first use of `what`: on the host, until all of the `ranks` come to it."""
        if what in self.met or (_manners == "eager" and "-" in what):
            return
        self.met.add(what)
        self.store.set(f"{what}/{self.rank}", "here")
        until = time.monotonic() + self.timeout.total_seconds()
        while not self.store.check([f"{what}/{rank}" for rank in ranks]):
            if time.monotonic() > until:
                _end(f"rank {self.rank} hangs on the host in the first use of {what}")
            time.sleep(0.001)
        if "-" not in what:  # no direction of a pair
            store, options = (
                dist.PrefixStore(f"like-{what}", self.store),
                torch_private.gloo_options([topology.current_context().gloo_network_device], LONG),
            )
            self.gloo[what] = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options)

    def _post(self, stream: str, work: Work, do: Any, *args: Any) -> Work:
        if stream not in self.streams:
            self.streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.streams[stream],), daemon=True).start()
        self.outstanding.append(work)
        self.streams[stream].put((work, do, args))
        compute().do(work.begin)
        return work

    def _run(self, stream: "queue.SimpleQueue[Any]") -> None:
        while (posted := stream.get()) is not None:
            work, do, args = posted
            work.begun.wait()
            if _manners == "ahead":
                time.sleep(LATE * random.random())
            try:
                do(work, *args)
            except RuntimeError:  # the peer has aborted or died
                if not self.aborted.is_set() and _handles_errors():
                    _end(f"rank {self.rank}'s watchdog found a remote error")
                return  # and the operation hangs
            work.done.set()
            self.outstanding.remove(work)

    def abort(self) -> None:
        self.aborted.set()
        for gloo in list(self.gloo.values()):
            abort_backend(gloo)

    def shutdown(self) -> None:
        for work in list(self.outstanding):
            work.end()
        for stream in self.streams.values():
            stream.put(None)
        closed.append(self.number)
        _open.discard(self)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).numpy())


def _handles_errors() -> bool:
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"


def _watchdog() -> None:
    while True:
        time.sleep(0.1)
        for group in list(_open):
            for work in list(group.outstanding):
                if time.monotonic() - work.posted > group.timeout.total_seconds() and _handles_errors():
                    _end(f"rank {group.rank}'s watchdog: an operation timed out")


def _end(why: str) -> None:
    os.write(2, f"[nccl-like] {why}: taking the process down\n".encode())
    os._exit(134)


@atexit.register
def _left_open() -> None:
    for group in _open:
        os.write(2, f"[nccl-like] rank {group.rank} left a group open that was not destroyed\n".encode())
