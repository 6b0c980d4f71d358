"""This process's rank, the number of ranks, and this rank's device."""

import atexit
import os
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock import torch_private
from penstock.comms.abort import abort_group
from penstock.comms.backends import (
    LOOPBACK_HOSTS,
    agree_on_backend,
    check_interfaces,
    choose_backend,
    create_gloo_device,
    find_interface,
    gpu_uuid,
    set_nccl_defaults,
)
from penstock.comms.heartbeat import HeartbeatThread, PeerMonitor
from penstock.comms.process import Activity
from penstock.comms.rendezvous import agree_on_run_id, wait_for_all
from penstock.comms.status import RankStatus, diagnose, end_of_wait, error_of, publish, read, status_of_end
from penstock.comms.system import batch_thread_policy, keep_freed_memory, read_torchrun_integer, report_error_to_torchrun
from penstock.comms.time_limits import DEFAULT_TIMEOUT
from penstock.comms.wait_errors import has_timed_out
from penstock.errors import LostRankError, PenstockError
from penstock.randomness import use_deterministic_algorithms

CPU = torch.device("cpu")


class OpenGroups(Protocol):
    """Process groups that are open (`process_groups.ProcessGroups`)."""

    def abort_waits(self) -> None:
        """End every wait in them."""

    def on_heartbeat(self, store: dist.Store) -> None:
        """Check this rank's waits."""

    def close(self, failed: bool = True) -> None:
        """Close them."""


class ProcessContext:
    """The state of this process while it is a rank: heartbeat, open groups, the control group that pipelines share."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # of the rank; its forked children are no ranks
        self.activity = Activity()
        self.heartbeat: HeartbeatThread | None = None
        self.topology: Topology | None = None  # once this process has joined the other ranks
        self.open_groups: weakref.WeakKeyDictionary[OpenGroups, None] = weakref.WeakKeyDictionary()  # in the order of opening
        self.control_group: object = None  # the ControlGroup of all ranks: see `shared_control_group`

    @cached_property
    def gloo_network_device(self) -> Any:
        """Gloo's device: a network interface and one event loop thread, for all groups."""
        return create_gloo_device()

    def join(self, backend: str | None, timeout: float | timedelta | None, device: str | torch.device | None) -> "Topology":
        """Connect to the other ranks, start the heartbeat, and return the topology. May be called again after it has raised."""
        if self.heartbeat is None and ("RANK" in os.environ or dist.is_initialized()):
            self.heartbeat = HeartbeatThread()

        self.topology = topology = replace(_connect_to_ranks(backend, timeout, device), context=self)
        if self.heartbeat is not None and topology.world_size > 1:
            store = topology.store.clone()  # a connection for the heartbeat only: other threads may block theirs
            monitor = PeerMonitor(store, topology.rank, topology.world_size, self.activity, self.abort_waits, self.on_heartbeat)
            self.heartbeat.start_beating(monitor)
        return topology

    def abort_waits(self) -> None:
        """End every wait of this rank for others, because a rank is lost: a suspended rank's connections stay open."""
        for groups in list(self.open_groups):
            groups.abort_waits()
        if dist.group.WORLD is not None:
            abort_group(dist.group.WORLD)

    def on_heartbeat(self, store: dist.Store) -> None:
        """Let the open groups check their waits: see `ProcessGroups.on_heartbeat`."""
        for groups in list(self.open_groups):
            groups.on_heartbeat(store)

    def exit_if_launcher_is_gone(self) -> None:
        """End this process if what started the ranks is gone, rather than blame a rank that ended for the same reason."""
        if self.heartbeat is not None:
            self.heartbeat.exit_if_launcher_is_gone()

    def publish_end(self, status: RankStatus) -> None:
        """Publish how this rank ends its program, if it has joined other ranks."""
        if self.topology is not None and self.topology.store is not None:
            publish(self.topology.store, status)

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
    """This process's rank among `world_size` ranks that form one pipeline, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    backend: str = "gloo"  # sends tensors between ranks
    timeout: timedelta = DEFAULT_TIMEOUT
    store: Any = field(default=None, repr=False, compare=False)  # torch.distributed's key-value store; None in a world of one
    global_ranks: tuple[int, ...] = ()  # ranks of this pipeline in the whole job, if the job has several pipelines
    context: ProcessContext = field(default_factory=ProcessContext, repr=False, compare=False)

    @property
    def transport_device(self) -> torch.device:
        """The device of tensors that the backend sends and receives: this rank's GPU for NCCL, the CPU for Gloo."""
        return self.device if self.backend == "nccl" else CPU

    def get_next_rank(self) -> int | None:
        """Return the rank after this one; None on the last."""
        return self.rank + 1 if self.rank + 1 < self.world_size else None

    def get_prev_rank(self) -> int | None:
        """Return the rank before this one; None on the first."""
        return self.rank - 1 if self.rank > 0 else None

    def get_global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of `rank` of the pipeline. Error texts use it."""
        return self.global_ranks[rank] if self.global_ranks else rank


_context: ProcessContext | None = None  # of this process


def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    deterministic: bool = False,
) -> Topology:
    """Join the ranks that torchrun or `penstock.launch` has started; without their environment variables, be the only rank.

    `backend`: `"gloo"` or `"nccl"`; by default NCCL if every rank has a GPU that no other rank uses, else Gloo. Gloo sends
    tensors of a GPU through host memory, so several ranks may share one GPU.
    `timeout`: how long a rank waits for another, in seconds or as a timedelta; by default ten minutes.
    `device`: of the stages; by default this rank's GPU if there is one and `backend` is not `"gloo"`, else the CPU.
    `deterministic`: make torch's results reproducible bit for bit; on a GPU this costs time (docs/howto/gpu.md).

        topology = ps.comms.init_distributed(timeout=60)
        print(f"rank {topology.rank} of {topology.world_size}, on {topology.device}")

    A second call returns the topology of the first one, whatever its arguments. From here on the process keeps the memory that
    it frees. Raises PenstockError for an unknown backend or a missing GPU, LostRankError if the other ranks do not start.
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
    """Return the topology; call `init_distributed()` first if that has not been done."""
    return init_distributed()


def shutdown() -> None:
    """Leave the ranks: close the process groups, reset the topology. A rank that waits for this one, now or later, raises."""
    global _context
    if _context is None or _context.pid != os.getpid():
        return
    if _context.topology is not None:
        error, rank = getattr(sys, "last_value", None), _context.topology.rank  # the exception that ended the program, if any
        _context.publish_end(status_of_end(rank, error))
        if error is not None:
            report_error_to_torchrun(error, began_here=rank in (getattr(error, "ranks", ()) or (rank,)))
    _context.close()
    _context = None


def current_context() -> ProcessContext | None:
    """Return the context of this process; None if it has not joined any ranks."""
    return _context


def get_next_rank() -> int | None:
    """Return the rank after this one; None on the last."""
    return current_topology().get_next_rank()


def get_prev_rank() -> int | None:
    """Return the rank before this one; None on the first."""
    return current_topology().get_prev_rank()


def _connect_to_ranks(backend: str | None, timeout: float | timedelta | None, device: str | torch.device | None) -> Topology:
    """Check the arguments of `init_distributed`, connect to the other ranks, and return the topology."""
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
        _set_gloo_interface(os.environ.get("MASTER_ADDR", ""))
        backend = _init_process_group(backend, device, timeout)
    elif backend is None:
        backend = agree_on_backend(device, torch_private.default_store(), dist.get_rank(), dist.get_world_size(), timeout)
    return Topology(dist.get_rank(), dist.get_world_size(), device, backend, timeout, torch_private.default_store())


def _init_process_group(backend: str | None, device: torch.device, timeout: timedelta) -> str:
    """Create torch's group of all ranks, and return the backend.

    No rank returns before all have created the group. Else a rank that returns and exits at once would look lost to the others.
    """
    rank, first_store, world_size = os.environ["RANK"], None, 0
    try:
        try:
            first_store, number, world_size = next(rendezvous("env://", timeout=timeout))
        except ValueError as error:  # RANK was not set by a launcher
            problem = f"RANK={rank} is set here, but not all that torchrun sets with it ({error})"
            raise PenstockError(f"{problem}: start the program with torchrun, or unset RANK") from error
        store = dist.PrefixStore(agree_on_run_id(first_store, number, world_size, timeout), first_store)
        backend = backend or agree_on_backend(device, store, number, world_size, timeout)
        carriers = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        with batch_thread_policy():
            dist.init_process_group(carriers, store=store, rank=number, world_size=world_size, timeout=timeout)
        wait_for_all(store, world_size, timeout)
        return backend
    except RuntimeError as error:  # the transport's text names no rank, but may say that an address is wrong
        ended = dict[int, RankStatus]()
        with suppress(RuntimeError):
            ended = read(first_store, range(world_size))
        if ended:
            wait = RankStatus(number, "waited", "for the other ranks to start")
            raise error_of(*diagnose([wait, *ended.values()], range(world_size))) from None
        end = end_of_wait(timeout.total_seconds() if has_timed_out(error) else 0)
        raise LostRankError(f"rank {rank} waited to connect to the other ranks and gave up{end}") from error


def _choose_device(backend: str | None, device: str | torch.device | None) -> torch.device:
    """Return the device of this rank, with its index. Raises PenstockError if it does not exist."""
    torch_device = torch.device(device or ("cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"))
    if torch_device.type == "mps" and not torch.backends.mps.is_available():
        raise PenstockError("device 'mps' was asked for, but torch finds no GPU of Apple's here: use device='cpu'")
    if torch_device.type != "cuda":
        return torch_device
    if not torch.cuda.is_available():
        raise PenstockError("device 'cuda' was asked for, but torch finds no GPU here: use device='cpu'")
    count = torch.cuda.device_count()
    index = read_torchrun_integer("LOCAL_RANK", "0") % count if torch_device.index is None else torch_device.index
    if index >= count:
        raise PenstockError(f"device '{torch_device}' was asked for, and torch finds cuda:0 to cuda:{count - 1} here: use one")
    return torch.device("cuda", index)


def _set_gloo_interface(master: str) -> None:
    """Set Gloo's network interface to the one that leads to the host `master`, unless the user has set one.

    Raises PenstockError if the user's does not exist.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return check_interfaces(names)
    several_machines = os.environ.get("LOCAL_WORLD_SIZE") not in (None, os.environ.get("WORLD_SIZE"))
    interface = find_interface("127.0.0.1" if master in LOOPBACK_HOSTS else master, several_machines)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
