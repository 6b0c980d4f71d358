"""Which rank this process is, among how many, on which device."""

import atexit
import os
import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock import torch_private
from penstock.comms.abort import abort_group
from penstock.comms.backends import (
    LOOPBACK,
    agree_on_backend,
    check_interfaces,
    choose_backend,
    create_gloo_device,
    find_interface,
    gpu_uuid,
    set_nccl_defaults,
)
from penstock.comms.heartbeat import HeartbeatThread, PeerMonitor, detect_departures, select_lost
from penstock.comms.process import Activity
from penstock.comms.rendezvous import FINISHED, agree_on_run_id, departure_error, poll, publish_departure, wait_for_all
from penstock.comms.system import batch_thread_policy, explain_error, keep_freed_memory, read_torchrun_integer
from penstock.errors import LostRankError, PenstockError
from penstock.randomness import use_deterministic_algorithms

DEFAULT_TIMEOUT = timedelta(minutes=10)  # torch's own 30 minutes are long to look at a stopped job
DEPARTURE_LAG_SECONDS = 0.2  # seconds between the end of a rank's connections and what it tells of its own
CPU = torch.device("cpu")


class ProcessContext:
    """What this process has joined: its heartbeat, the groups that are open, and the control group that pipelines share."""

    def __init__(self) -> None:
        self.process = os.getpid()  # which is the rank: not one that it has forked
        self.activity = Activity()
        self.heartbeat: HeartbeatThread | None = None
        self.topology: Topology | None = None  # once joined
        self.open_groups: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # that are open, as they came
        self.control_group: Any = None  # of all ranks, for all pipelines: see `control_of`

    @cached_property
    def gloo_device(self) -> Any:
        """The Gloo device, one event loop thread for all groups."""
        return create_gloo_device()

    def join(self, backend: str | None, timeout: float | timedelta | None, device: str | torch.device | None) -> "Topology":
        """Meet the other ranks, and beat from then on. What fails can be tried again."""
        if self.heartbeat is None and ("RANK" in os.environ or dist.is_initialized()):
            self.heartbeat = HeartbeatThread()
        self.topology = joined = replace(_find_topology(backend, timeout, device), context=self)
        if self.heartbeat is not None and joined.world_size > 1:
            peers = PeerMonitor(joined.store.clone(), joined.rank, joined.world_size, self.activity, self.wake, self.look)
            self.heartbeat.watch(peers)  # a connection of its own, as others may block the store's
        return joined

    def wake(self) -> None:
        """A rank is lost that does not end its connections: this one waits for no other any more."""
        for groups in list(self.open_groups):
            groups.wake()
        if dist.group.WORLD is not None:
            abort_group(dist.group.WORLD)

    def look(self, store: Any) -> None:
        """The heartbeat calls it at each look: see `Groups.look`."""
        for groups in list(self.open_groups):
            groups.look(store)

    def depart(self, how: str) -> None:
        """Tell the other ranks what became of this one."""
        if self.topology is not None and self.topology.store is not None:
            publish_departure(self.topology.store, self.topology.rank, how)

    def close(self) -> None:
        """End the heartbeat and all process groups."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        for groups in list(self.open_groups):
            groups.close(failed=False)
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Topology:
    """Where this process stands: its rank among `world_size` ranks that form one pipeline, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    backend: str = "gloo"  # what carries tensors between ranks
    timeout: timedelta = DEFAULT_TIMEOUT
    store: Any = field(default=None, repr=False, compare=False)  # torch.distributed's key-value store, None when alone
    ranks: tuple[int, ...] = ()  # where the pipeline is one of several: its ranks, in order, as the job numbers them
    context: ProcessContext = field(default_factory=ProcessContext, repr=False, compare=False)  # what this process has joined

    @property
    def transport_device(self) -> torch.device:
        """Where tensors must be for the backend to take them."""
        return self.device if self.backend == "nccl" else CPU

    def get_next_rank(self) -> int | None:
        """The rank after this one, None on the last."""
        return self.rank + 1 if self.rank + 1 < self.world_size else None

    def get_prev_rank(self) -> int | None:
        """The rank before this one, None on the first."""
        return self.rank - 1 if self.rank > 0 else None

    def get_global_rank(self, rank: int) -> int:
        """The number that a rank of the pipeline has in the whole job, by which errors call it."""
        return self.ranks[rank] if self.ranks else rank


_context: ProcessContext | None = None  # this process' own


def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    deterministic: bool = False,
) -> Topology:
    """Join the ranks that torchrun or `penstock.launch` started; without their environment, be a world of one.

    `backend`: `"gloo"` or `"nccl"`; by default NCCL when every rank has a GPU of its own, which the ranks tell each other, else
    Gloo (through host memory for tensors that are not on the CPU, so several ranks may share one GPU).
    `timeout`: seconds, or a timedelta, that a rank waits for another before it gives up; by default ten minutes.
    `device`: where the stages live; by default this rank's GPU if there is one and the backend is not asked to be Gloo, else
    the CPU.
    `deterministic`: from now on torch gives the same bits each time, on a GPU too, where that costs time (docs/howto/gpu.md).

        topology = ps.comms.init_distributed(timeout=60)
        print(f"rank {topology.rank} of {topology.world_size}, on {topology.device}")

    A second call returns the first one's topology, whatever its other arguments. From here on the process keeps the memory it
    frees. Raises PenstockError for a backend that is not known and for a GPU that is not there, LostRankError
    if the other ranks do not start.
    """
    global _context
    if deterministic:
        use_deterministic_algorithms()
    if _context is not None and _context.topology is not None:
        return _context.topology
    keep_freed_memory()
    _context = _context or ProcessContext()
    topology = _context.join(backend, timeout, device)
    atexit.register(shutdown)  # a process that ends with its groups open may abort
    return topology


def current_topology() -> Topology:
    """The topology `init_distributed` found, joining now if nobody has yet."""
    return init_distributed()


def shutdown() -> None:
    """Leave the ranks: end the process groups, forget the topology. Whoever waits for this rank, now or later, is told."""
    global _context
    if _context is None or _context.process != os.getpid():
        return
    error = getattr(sys, "last_value", None)  # what ended the program, if something has
    _context.depart(FINISHED if error is None else f"ended with {explain_error(error)}")
    _context.close()
    _context = None


def current_context() -> ProcessContext | None:
    """What this process has joined, if it has."""
    return _context


def get_next_rank() -> int | None:
    """The rank after this one, None on the last."""
    return current_topology().get_next_rank()


def get_prev_rank() -> int | None:
    """The rank before this one, None on the first."""
    return current_topology().get_prev_rank()


def _find_topology(backend: str | None, timeout: float | timedelta | None, device: str | torch.device | None) -> Topology:
    if backend not in (None, "gloo", "nccl"):
        raise PenstockError(
            f"backend {backend!r} is not known: use 'gloo' (CPU, any device through host memory) or 'nccl' (GPUs)"
        )
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    elif not isinstance(timeout, timedelta):
        if not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
            raise PenstockError(f"a rank cannot wait {timeout!r} for others: give seconds, more than 0, or a timedelta")
        timeout = timedelta(seconds=timeout)
    if backend == "nccl" and not dist.is_nccl_available():
        raise PenstockError("this torch comes without NCCL: use 'gloo', or install a build of torch for CUDA")
    device = _choose_device(backend, device)
    if backend == "nccl" and device.type != "cuda":
        raise PenstockError(f"NCCL carries tensors between GPUs, but this rank's device is {device}: use 'gloo'")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        set_nccl_defaults()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            return Topology(device=device, backend=backend or choose_backend([gpu_uuid(device)]), timeout=timeout)
        _choose_interface(os.environ.get("MASTER_ADDR", ""))
        backend = _connect(backend, device, timeout)
    elif backend is None:
        backend = agree_on_backend(device, torch_private.default_store(), dist.get_rank(), dist.get_world_size(), timeout)
    return Topology(dist.get_rank(), dist.get_world_size(), device, backend, timeout, torch_private.default_store())


def _connect(backend: str | None, device: torch.device, timeout: timedelta) -> str:
    """Make the group of all ranks; the backend. No rank leaves before all have made it: to the others it would look lost."""
    rank = os.environ["RANK"]
    try:
        try:
            store, number, world_size = next(rendezvous("env://", timeout=timeout))
        except ValueError as error:  # of an environment that nobody who starts ranks has made
            told = f"RANK={rank} is set here, but not all that torchrun sets with it ({error})"
            raise PenstockError(f"{told}: start the program with torchrun, or unset RANK") from error
        store = dist.PrefixStore(agree_on_run_id(store, number, world_size, timeout), store)
        backend = backend or agree_on_backend(device, store, number, world_size, timeout)
        carriers = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        with batch_thread_policy():
            dist.init_process_group(carriers, store=store, rank=number, world_size=world_size, timeout=timeout)
        wait_for_all(store, world_size, timeout)
        return backend
    except RuntimeError as error:  # in the transport's words, which name nobody, but may know that an address is wrong
        end = describe_wait_failure(error, timeout)
        raise LostRankError(f"rank {rank} waited to connect to the other ranks and gave up: {end}") from error


def _choose_device(backend: str | None, device: str | torch.device | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"))
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise PenstockError("device 'mps' was asked for, but torch finds no GPU of Apple's here: use device='cpu'")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise PenstockError("device 'cuda' was asked for, but torch finds no GPU here: use device='cpu'")
    count = torch.cuda.device_count()
    index = read_torchrun_integer("LOCAL_RANK", "0") % count if chosen.index is None else chosen.index
    if index >= count:
        raise PenstockError(f"device '{chosen}' was asked for, and torch finds cuda:0 to cuda:{count - 1} here: use one")
    return torch.device("cuda", index)


def _choose_interface(master: str) -> None:
    """Tell Gloo which network leads to the rank at `master`, unless the user has. Raises PenstockError for one not there."""
    if given := os.environ.get("GLOO_SOCKET_IFNAME"):
        return check_interfaces(given)
    elsewhere = os.environ.get("LOCAL_WORLD_SIZE") not in (None, os.environ.get("WORLD_SIZE"))
    interface = find_interface("127.0.0.1" if master in LOOPBACK else master, elsewhere)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


@contextmanager
def convert_to_lost_rank_error(topology: Topology, what: str, ranks: Collection[int]) -> Iterator[None]:
    """Tell of a lost, silent or absent peer in words instead of the transport's."""
    try:
        yield
    except RuntimeError as error:
        waited = f"rank {topology.rank} waited {what}"
        for _ in poll(DEPARTURE_LAG_SECONDS):
            everyone = detect_departures(topology.store, range(topology.world_size))
            if left_here := {rank: how for rank, how in everyone.items() if rank in ranks} | select_lost(everyone):
                raise departure_error(left_here, waited) from None
        raise LostRankError(f"{waited} and gave up: {describe_wait_failure(error, topology.timeout)}") from None


def describe_wait_failure(error: BaseException, timeout: timedelta) -> str:
    """The two ways a wait ends badly, told apart by the transport's text."""
    silent = "timed out" in str(error).lower()
    return f"no answer within {timeout.total_seconds():g} s" if silent else "the connection is closed"
