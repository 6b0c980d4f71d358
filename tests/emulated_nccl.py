"""An emulation of NCCL's communicators for CPU tensors, over Gloo: how a pipeline over NCCL behaves, tested without a GPU.

`install()` replaces NCCL by it in a rank; `make nccl` does so in all ranks that tests launch (`--over-nccl MODE`). In the modes
`lazy` and `eager` the CPU computes at once: the thread that computes is the compute stream. In the mode `ahead` a device lags
behind its host and has its own stream (lagging_device.py). As NCCL does under torch:

* A communicator is created at its first use, and each direction of a pair connects at its own first use. That blocks the host
  until the peer comes, and cannot be interrupted. (`eager`: all are created and connected together with their group.)
* An operation starts when the compute stream reaches it. The operations of a communicator run one after the other. A send
  completes when it has met its receive.
* Dtypes that NCCL does not know and tensors that are not contiguous are refused.
* A sent tensor is read when the send meets its receive. If the tensor was freed or changed by then, POISON arrives.
* A receive buffer is POISON until the compute stream has waited for it.
* `wait()` makes the compute stream wait and reports nothing: no lost rank, no timeout. If the group is aborted it returns, and
  the buffer has what it had before.
* `abort()` wakes its own rank only; `shutdown()` waits for running operations.
* A watchdog ends the process when an operation takes longer than the timeout, or the peer's process has died, unless
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0.

Not modelled: what concurrent operations take from each other and from the computation (processors, memory, links), and that
NCCL's own kernels wait for each other, which could hang where several of them share a device without room for all.
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
from lagging_device import POISON, compute_stream, move_to_device
from lagging_device import install as install_lagging_device
from torch import Tensor

from penstock import torch_private
from penstock.comms import process_groups, topology
from penstock.comms.abort import abort_backend
from penstock.comms.backends import set_nccl_defaults

MODES = ("lazy", "eager", "ahead")  # connects at first use; from the start; at first use, with the host ahead of its device
NCCL_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
REQUEST_TAG, DATA_TAG = 7, 8  # of the two Gloo messages of one operation
GLOO_TIMEOUT = timedelta(minutes=30)
MAX_START_DELAY_SECONDS = 0.002  # of an operation, in the mode `ahead`

shut_down_groups: list[int] = []  # numbers of groups, in order
_numbers = itertools.count()
_open_groups: "weakref.WeakSet[EmulatedNccl]" = weakref.WeakSet()
_emulated_of_torch_group: dict[Any, "EmulatedNccl"] = {}
_mode = "lazy"


def install(mode: str = "lazy") -> None:
    """Replace NCCL by the emulation in this process, as if each rank had its own GPU."""
    global _mode
    _mode = mode
    if mode == "ahead":
        install_lagging_device()
    find_topology = topology._connect_to_ranks
    topology._connect_to_ranks = lambda backend, timeout, device: _with_nccl_backend(find_topology("gloo", timeout, "cpu"))
    process_groups.new_nccl_group = EmulatedNccl
    torch_private.group_backend = lambda group, device: _emulate_torch_group(group, topology.current_topology())
    set_nccl_defaults()
    threading.Thread(target=_watchdog, daemon=True).start()


def over_nccl(mode: str, function: Any, *args: Any) -> Any:
    """Install the emulation, then run `function(*args)`: ranks are launched with this instead of `function`."""
    install(mode)
    return function(*args)


def _with_nccl_backend(gloo_topology: topology.Topology) -> topology.Topology:
    """Return the topology with the backend nccl. `eager`: connect the group of all ranks at once, as torch does."""
    nccl_topology = replace(gloo_topology, backend="nccl")
    if _mode == "eager" and nccl_topology.world_size > 1:
        _emulate_torch_group(dist.group.WORLD, nccl_topology)
    return nccl_topology


def _emulate_torch_group(group: Any, rank_topology: topology.Topology) -> "EmulatedNccl":
    """Return the emulation that carries the messages of torch's `group`, created at the first call."""
    if group not in _emulated_of_torch_group:
        store = dist.PrefixStore(f"of-{group.group_name}", rank_topology.store)
        _emulated_of_torch_group[group] = EmulatedNccl(store, group.rank(), group.size(), rank_topology.timeout)
    return _emulated_of_torch_group[group]


class Work:
    """A send or a receive: posted, started or completed."""

    def __init__(self, group: "EmulatedNccl", tensor: Tensor, receives: bool) -> None:
        self.group, self.receives = group, receives
        self.tensor = (lambda: tensor) if receives else weakref.ref(tensor)  # the sender must keep what it sends
        self.num_bytes, self.post_seconds = tensor.numel() * tensor.itemsize, time.monotonic()
        self.started, self.completed = threading.Event(), threading.Event()
        self.data = self.previous_data = torch.empty(0, dtype=torch.uint8, device="cpu")  # to transfer; of the receive buffer
        self.digest = 0

    def start(self) -> None:
        """Start it: the compute stream has reached it."""
        tensor = self.tensor()
        if tensor is not None and self.receives:
            self.previous_data = _bytes(tensor).clone()
            self.data = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
            _bytes(tensor).fill_(POISON)
        elif tensor is not None:
            self.digest = _digest(tensor)
        self.started.set()

    def is_completed(self) -> bool:
        return self.completed.is_set() or self.group.aborted.is_set()

    def wait(self) -> bool:
        compute_stream().run(self.wait_on_stream, self.tensor())  # keeps the tensor's memory until then
        return True

    def wait_on_stream(self, tensor: Tensor | None) -> None:
        """Have the compute stream wait for it; fill the receive buffer."""
        self.wait_on_host()
        if self.receives and tensor is not None:
            _bytes(tensor).copy_(self.data if self.completed.is_set() else self.previous_data)

    def wait_on_host(self) -> None:
        """Wait until it has completed, or the group is aborted."""
        while not self.completed.wait(0.005) and not self.group.aborted.is_set():
            pass


class EmulatedNccl:
    """A process group, with one communicator for every pair of ranks, as torch creates them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.aborted, self.unfinished, self.streams = threading.Event(), list[Work](), dict[str, queue.SimpleQueue[Any]]()
        self.connected, self.gloo_groups, self.number = set[str](), dict[str, Any](), next(_numbers)
        _open_groups.add(self)
        if _mode == "eager":
            for peer in (peer for peer in range(size) if peer != rank):
                self._connect_pair(peer)

    def name(self) -> str:
        return "nccl"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._check(tensors)
        pair = self._connect_pair(peer, f"{self.rank}-{peer}")
        return self._post(pair, Work(self, tensor, receives=False), self._send, self.gloo_groups[pair], int(peer > self.rank))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = self._check(tensors)
        pair = self._connect_pair(peer, f"{peer}-{self.rank}")
        move_to_device(tensor)
        return self._post(pair, Work(self, tensor, receives=True), self._receive, self.gloo_groups[pair], int(peer > self.rank))

    def _send(self, work: Work, gloo: Any, peer: int) -> None:
        gloo.recv([torch.zeros(1, device="cpu")], peer, REQUEST_TAG).wait()
        tensor = work.tensor()
        is_unchanged = tensor is not None and _digest(tensor) == work.digest
        data = (
            _bytes(tensor).clone() if is_unchanged else torch.full((work.num_bytes,), POISON, dtype=torch.uint8, device="cpu")
        )
        gloo.send([data], peer, DATA_TAG).wait()

    def _receive(self, work: Work, gloo: Any, peer: int) -> None:
        request = gloo.send([torch.ones(1, device="cpu")], peer, REQUEST_TAG)
        gloo.recv([work.data], peer, DATA_TAG).wait()
        request.wait()

    def _check(self, tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            if tensor.dtype not in NCCL_DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        return tensors

    def _connect_pair(self, peer: int, *directions: str) -> str:
        """Connect the pair, and the `directions` between its ranks, each at its first use. Return the pair's name."""
        ranks = sorted((self.rank, peer))
        pair = ":".join(map(str, ranks))
        if self._wait_at_first_use(pair, ranks):
            store = dist.PrefixStore(f"like-{pair}", self.store)
            options = torch_private.gloo_options([topology.current_context().gloo_network_device], GLOO_TIMEOUT)
            self.gloo_groups[pair] = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options)
        for direction in directions if _mode != "eager" else ():
            self._wait_at_first_use(direction, ranks)
        return pair

    def _wait_at_first_use(self, connection: str, ranks: Sequence[int]) -> bool:
        """At the first use of `connection` wait on the host until all of the `ranks` use it. Return whether it is the first."""
        if connection in self.connected:
            return False
        self.connected.add(connection)
        self.store.set(f"{connection}/{self.rank}", "here")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not self.store.check([f"{connection}/{rank}" for rank in ranks]):
            if time.monotonic() > deadline:
                _end_process(f"rank {self.rank} hangs on the host in the first use of {connection}")
            time.sleep(0.001)
        return True

    def _post(self, stream: str, work: Work, transfer: Any, *args: Any) -> Work:
        if stream not in self.streams:
            self.streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.streams[stream],), daemon=True).start()
        self.unfinished.append(work)
        self.streams[stream].put((work, transfer, args))
        compute_stream().run(work.start)
        return work

    def _run(self, stream: "queue.SimpleQueue[Any]") -> None:
        while (operation := stream.get()) is not None:
            work, transfer, args = operation
            work.started.wait()
            if _mode == "ahead":
                time.sleep(MAX_START_DELAY_SECONDS * random.random())
            try:
                transfer(work, *args)
            except RuntimeError:  # the peer has aborted or died
                if not self.aborted.is_set() and _watchdog_ends_process():
                    _end_process(f"rank {self.rank}'s watchdog found a remote error")
                return  # and the operation hangs
            work.completed.set()
            self.unfinished.remove(work)

    def abort(self) -> None:
        self.aborted.set()
        for gloo in list(self.gloo_groups.values()):
            abort_backend(gloo)

    def shutdown(self) -> None:
        for work in list(self.unfinished):
            work.wait_on_host()
        for stream in self.streams.values():
            stream.put(None)
        shut_down_groups.append(self.number)
        _open_groups.discard(self)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).numpy())


def _watchdog_ends_process() -> bool:
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"


def _watchdog() -> None:
    while True:
        time.sleep(0.1)
        for group in list(_open_groups):
            for work in list(group.unfinished):
                if time.monotonic() - work.post_seconds > group.timeout.total_seconds() and _watchdog_ends_process():
                    _end_process(f"rank {group.rank}'s watchdog: an operation timed out")


def _end_process(reason: str) -> None:
    os.write(2, f"[emulated-nccl] {reason}: taking the process down\n".encode())
    os._exit(134)


@atexit.register
def _report_open_groups() -> None:
    for group in _open_groups:
        os.write(2, f"[emulated-nccl] rank {group.rank} left a group open that was not destroyed\n".encode())
