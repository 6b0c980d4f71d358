"""A communicator with NCCL's manners for CPU tensors, over Gloo: what a pipeline over NCCL does, seen without a GPU.

It is put in the place of NCCL by `install()`, in a rank; `make nccl` has it in all ranks that tests launch (`--over-nccl`). On
the CPU, which computes as it is told, the thread that computes is the compute stream. Of NCCL, as torch has it, it keeps:

* A communicator is made at its first use, each direction of a pair connected at its own: that blocks the host until the other
  side comes, and cannot be interrupted. (`LIKE_LAZY=0`: nothing of this.)
* The operations of a communicator run one after the other; a send ends when it has met its receive.
* It refuses dtypes that NCCL does not know, and tensors that are not contiguous.
* What is sent is read when it meets its receive. A tensor that is gone or was changed by then arrives as POISON.
* What is received is POISON until the compute stream has waited for it.
* `wait()` makes the compute stream wait and tells nothing: not of a lost rank, not of time, not that the group was aborted -
  then it ends, and what was to be received is POISON.
* `abort()` wakes its own rank only; `shutdown()` waits for what is still running.
* A watchdog ends the process when an operation takes longer than the timeout, or the peer's process has died, unless
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0.
"""

import atexit
import functools
import itertools
import os
import queue
import threading
import time
import weakref
import zlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps
from penstock import torch_private
from penstock.comms import groups, topology
from penstock.comms.breaking import break_off_backend
from penstock.comms.starting.gpus import settle_nccl

POISON = 0xFF  # every byte: NaN as a float, -1 as a whole number
KNOWN = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
ASKING, SENDING = 7, 8  # tags of the messages below
LONG = timedelta(minutes=30)

closed: list[int] = []  # the numbers of groups that were shut down, in that order
_numbers = itertools.count()
_open: "weakref.WeakSet[NcclLike]" = weakref.WeakSet()


def install() -> None:
    """From now on whatever this rank would do by NCCL, had each rank a GPU of its own, it does by groups of this kind."""
    join = topology._join
    topology._join = lambda backend, timeout, device: replace(join("gloo", timeout, "cpu"), backend="nccl")
    groups.new_nccl = NcclLike
    torch_private.backend_for = functools.cache(_of_torchs)
    settle_nccl()
    threading.Thread(target=_watchdog, daemon=True).start()


def over_nccl(function: Any, *args: Any) -> Any:
    """What ranks are launched with, in the place of `function`."""
    install()
    return function(*args)


def _of_torchs(group: dist.ProcessGroup, device: torch.device) -> "NcclLike":
    joined = ps.comms.init_distributed()
    return NcclLike(dist.PrefixStore(f"of-{group.group_name}", joined.store), group.rank(), group.size(), joined.timeout)


class Work:
    """An operation: not begun, running or done."""

    def __init__(self, group: "NcclLike", into: Tensor | None = None, data: Tensor | None = None) -> None:
        self.group, self.into, self.data = group, into, data
        self.posted, self.done = time.monotonic(), threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set() or self.group.aborted.is_set()

    def wait(self) -> bool:
        while not self.done.wait(0.005):
            if self.group.aborted.is_set():
                return True
        if self.into is not None and self.data is not None:
            self.into.copy_(self.data)
        return True


class NcclLike:
    """A group; between each two of its ranks a communicator of their own, as torch makes them, and one of all."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        options = torch_private.gloo_options([groups._gloo_device()], LONG)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("like", store), rank, size, options)
        self.aborted, self.outstanding, self.streams = threading.Event(), list[Work](), dict[str, queue.SimpleQueue[Any]]()
        self.met, self.number = set[str](), next(_numbers)
        _open.add(self)

    def name(self) -> str:
        return "nccl"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._checked(tensors)
        self._meet(peer, f"{self.rank}-{peer}")
        digest, kept = _digest(tensor), weakref.ref(tensor)
        return self._post(self._pair(peer), Work(self), self._send, peer, kept, digest, tensor.numel() * tensor.itemsize)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._checked(tensors)
        self._meet(peer, f"{peer}-{self.rank}")
        into = _bytes(tensor)
        into.fill_(POISON)
        work = Work(self, tensor, torch.empty_like(tensor))
        return self._post(self._pair(peer), work, self._receive, peer, _bytes(work.data))

    def _send(self, peer: int, kept: Any, digest: int, size: int) -> None:
        self.gloo.recv([torch.zeros(1)], peer, ASKING).wait()
        tensor = kept()
        intact = tensor is not None and _digest(tensor) == digest
        data = _bytes(tensor).clone() if intact else torch.full((size,), POISON, dtype=torch.uint8)
        self.gloo.send([data], peer, SENDING).wait()

    def _receive(self, peer: int, data: Tensor) -> None:
        asked = self.gloo.send([torch.ones(1)], peer, ASKING)
        self.gloo.recv([data], peer, SENDING).wait()
        asked.wait()

    def _pair(self, peer: int) -> str:
        return f"{min(peer, self.rank)}:{max(peer, self.rank)}"

    def _checked(self, tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            if tensor.dtype not in KNOWN:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        return tensors

    def _meet(self, peer: int, direction: str) -> None:
        for what in (self._pair(peer), direction):
            self._come(what, [peer])

    def _come(self, what: str, peers: list[int]) -> None:
        """At the first use of `what`: on the host, until the `peers` come to it too."""
        if what in self.met or os.environ.get("LIKE_LAZY") == "0":
            return
        self.met.add(what)
        self.store.set(f"{what}/{self.rank}", "here")
        until = time.monotonic() + self.timeout.total_seconds()
        while not self.store.check([f"{what}/{peer}" for peer in peers]):
            if time.monotonic() > until:
                _end(f"rank {self.rank} hangs on the host in the first use of {what}")
            time.sleep(0.001)

    def _post(self, stream: str, work: Work, do: Any, *args: Any) -> Work:
        if stream not in self.streams:
            self.streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.streams[stream],), daemon=True).start()
        self.outstanding.append(work)
        self.streams[stream].put((work, do, args))
        return work

    def _run(self, stream: "queue.SimpleQueue[Any]") -> None:
        while (posted := stream.get()) is not None:
            work, do, args = posted
            try:
                do(*args)
            except RuntimeError:  # the peer has aborted or died
                if not self.aborted.is_set() and _handles_errors():
                    _end(f"rank {self.rank}'s watchdog found a remote error")
                return  # and the operation hangs
            work.done.set()
            self.outstanding.remove(work)

    def _together(self, name: str, *args: Any) -> Work:
        """A collective of all ranks, on copies: what it makes is there once it was waited for."""
        tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg]) if isinstance(each, Tensor)]
        self._checked(tensors)
        self._come("all", [rank for rank in range(self.size) if rank != self.rank])
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        copied = [
            [copies[id(each)] for each in arg] if isinstance(arg, list) else copies.get(id(arg), arg) for arg in args
        ]  # fmt: skip
        work = _Together(self, tensors, copies)
        return self._post("all", work, lambda: getattr(self.gloo, name)(*copied).wait())

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "broadcast", "reduce", "allreduce", "scatter", "gather", "_allgather_base", "_reduce_scatter_base", "alltoall_base",
        ):  # fmt: skip
            raise AttributeError(name)
        return lambda *args: self._together(name, *args)

    def abort(self) -> None:
        self.aborted.set()
        break_off_backend(self.gloo)

    def shutdown(self) -> None:
        for work in list(self.outstanding):
            work.wait()
        for stream in self.streams.values():
            stream.put(None)
        closed.append(self.number)
        _open.discard(self)


class _Together(Work):
    def __init__(self, group: NcclLike, tensors: list[Tensor], copies: dict[int, Tensor]) -> None:
        super().__init__(group)
        self.tensors, self.copies = tensors, copies

    def wait(self) -> bool:
        super().wait()
        for tensor in self.tensors:
            tensor.copy_(self.copies[id(tensor)]) if self.done.is_set() else _bytes(tensor).fill_(POISON)
        return True


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
