"""The process groups that pipelines open. After a failure these, and the transports, are closed, which ends all waits.

This works around two properties of NCCL (docs/howto/gpu.md). The first use of a communicator, or of a pair of ranks, waits on
the host for the other side; so each is used once when it is opened. And NCCL's waits only order streams, without a timeout or a
check for lost ranks; so the heartbeat's thread checks for these, and aborts the waits.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist

from penstock import torch_private
from penstock.comms.abort import abort_backend, abort_group
from penstock.comms.rendezvous import ANY_STATUS_KEY, poll, wait_for_all
from penstock.comms.system import check_free_descriptors, print_notice
from penstock.comms.time_limits import DEPARTED_WORK_SECONDS, HEARTBEAT_SECONDS, LONG_WAIT_HEARTBEATS
from penstock.comms.topology import Topology

SOURCE_RANK, DESTINATION_RANK = 0, 1  # in the group of two that sends the messages of a channel


class ProcessGroups:
    """Process groups with names that are the same on all ranks, and transports that are closed with them.

    Every group but `world_group` exists as long as the caller that opened it refers to it. `mesh_groups`: pipeline -> torch's
    groups in which these ranks may wait too; they are aborted as well. The caller may change this mapping.
    """

    def __init__(self, topology: Topology, name: str, mesh_groups: Mapping[int, Sequence[Any]] | None = None) -> None:
        self.topology, self.name = topology, name
        self.ranks = range(topology.world_size)
        self.store = dist.PrefixStore(name, topology.store)
        self.channels_count = itertools.count()  # numbers the `Channels` opened here, the same on every rank
        self.transports: WeakSet[Any] = WeakSet()  # to be aborted and closed with the groups
        self.aborted = False  # if True, a wait that has ended may have received nothing
        self.awaited: tuple[int, str] | None = None  # before a call has begun: (rank that this one waits for, purpose)
        self._open: WeakValueDictionary[int, Any] = WeakValueDictionary()  # id -> group, in the order in which they were opened
        self._mesh_groups = {} if mesh_groups is None else mesh_groups

        # What the last heartbeat found, and how many heartbeats before it found the same.
        self._last_activity: tuple[str, Any, bool] | None = None
        self._beats_in_activity = 0
        self._last_awaited: tuple[int, str] | None = None
        self._beats_in_wait = 0
        topology.context.open_groups[self] = None

    @cached_property
    def world_group(self) -> Any:
        """The Gloo group of all ranks, opened when first used. Raises as `open_gloo_group`."""
        return self.open_gloo_group("world", self.topology.rank, self.topology.world_size)

    def open_gloo_group(self, name: str, rank: int, size: int) -> Any:
        """Open a Gloo group of `size` ranks, of which this process is `rank`; return it when all are connected.

        Raises OSError if this rank has no file descriptors left, RuntimeError if another rank does not connect.
        """
        check_free_descriptors(size)
        store = dist.PrefixStore(name, self.store)
        wait_for_all(store, size, self.topology.timeout, self.rank_has_failed)

        options = torch_private.gloo_options([self.topology.context.gloo_network_device], self.topology.timeout)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        self._open[id(group)] = group
        if self.aborted:  # while this group was connecting and could not be aborted
            raise dist.DistError("another rank has failed")
        return group

    def open_nccl_pair(self, name: str, end: int) -> Any:
        """Open an NCCL group of two, as its SOURCE_RANK or DESTINATION_RANK; return it when the two are connected."""
        group = new_nccl_group(dist.PrefixStore(name, self.store), end, 2, self.topology.timeout)
        self._open[id(group)] = group

        byte = torch.zeros(1, dtype=torch.uint8, device=self.topology.transport_device)
        first_use = group.send([byte], DESTINATION_RANK, 0) if end == SOURCE_RANK else group.recv([byte], SOURCE_RANK, 0)
        wait_for_work(first_use, self.topology, lambda: self.aborted or self.rank_has_failed(), lambda: self.aborted)
        return group

    def rank_has_failed(self, store: dist.Store | None = None) -> bool:
        """Return whether another rank has failed or ended. `store`: the calling thread's own connection, if it has one."""
        store = store or self.topology.store
        return any(place.check([ANY_STATUS_KEY]) for place in (dist.PrefixStore(self.name, store), store))

    def on_heartbeat(self, store: dist.Store) -> None:
        """Abort waits in NCCL if a rank has failed, or if this rank has been in one action longer than the timeout.

        Called by the heartbeat's thread, with its own connection to the store.
        """
        self._warn_if_peer_is_late()

        activity = self.topology.context.activity.now
        step, *_ = activity
        if self.topology.backend != "nccl" or self.aborted or not self._open or not step:
            return

        self._beats_in_activity = self._beats_in_activity + 1 if activity is self._last_activity else 0
        self._last_activity = activity
        if not self._beats_in_activity:
            return
        timed_out = self._beats_in_activity * HEARTBEAT_SECONDS > self.topology.timeout.total_seconds()
        if timed_out or self.rank_has_failed(store):
            self.abort_waits()

    def _warn_if_peer_is_late(self) -> None:
        """Print a line, once for each call, if a rank has not begun it for long: it may be busy, or wait elsewhere."""
        awaited = self.awaited
        self._beats_in_wait = self._beats_in_wait + 1 if awaited is self._last_awaited else 0
        self._last_awaited = awaited
        if awaited is not None and self._beats_in_wait == LONG_WAIT_HEARTBEATS:
            peer, purpose = awaited
            waited, timeout = self._beats_in_wait * HEARTBEAT_SECONDS, self.topology.timeout.total_seconds()
            wait = f"rank {self.topology.rank} has waited for {waited:g} s for rank {peer} {purpose}"
            hint = "is that rank at other work, or in a dist.barrier() of the script's?"
            print_notice(f"{wait}, and waits {timeout:g} s at most: {hint}")

    def abort_waits(self) -> None:
        """End every wait of this rank's other threads in these groups. The thread that waited then closes the groups."""
        self.aborted = True
        for transport in list(self.transports):
            transport.abort_waits()
        for group in list(self._open.values()):  # the world group first, so that no result of aborted receives is exchanged
            abort_backend(group)
        for group in chain.from_iterable(list(self._mesh_groups.values())):
            abort_group(group)

    def close(self, failed: bool = True) -> None:
        """Close all groups, even while ranks wait in them.

        `failed`: False shuts NCCL's groups down in the order in which they were opened, instead of aborting them.
        """
        failed = failed or self.aborted
        for transport in list(self.transports):
            transport.close()
        self.transports.clear()

        for group in list(self._open.values()):
            if failed or group.name() == "gloo":
                abort_backend(group)
            else:
                with suppress(RuntimeError):
                    group.shutdown()
        self._open.clear()


def new_nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a new NCCL group of `size` ranks, of which this process is `rank`. It connects at its first use."""
    return dist.ProcessGroupNCCL(store, rank, size, torch_private.nccl_options(timeout))


def wait_for_work(
    work: dist.Work, topology: Topology, rank_has_failed: Callable[[], bool], was_aborted: Callable[[], bool]
) -> None:
    """Wait on the host until `work`, an operation of a group, is done.

    Raises RuntimeError if it `was_aborted` (aborted work counts as completed), or if it is not done although `rank_has_failed`.
    A rank that has left may have sent its part before: DEPARTED_WORK_SECONDS remain for that to arrive.
    """
    if topology.backend == "nccl":  # whose own `wait` only orders streams
        timeout = topology.timeout.total_seconds()
        if not _poll_work(work, timeout, rank_has_failed) and not _poll_work(work, DEPARTED_WORK_SECONDS):
            raise dist.DistError("another rank has failed" if rank_has_failed() else "timed out")
        if was_aborted():
            raise dist.DistError("another rank has failed")
    work.wait()


def _poll_work(work: dist.Work, seconds: float, rank_has_failed: Callable[[], bool] = lambda: False) -> bool:
    """Return True once `work` is done; False after `seconds`, or once `rank_has_failed`."""
    for _ in poll(seconds):
        if work.is_completed():
            return True
        if rank_has_failed():
            break
    return False


def call_unprofiled(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, called in a thread that torch.profiler does not record if it records this one.

    A recorded transfer of Gloo writes its end into the profiler's memory. If the profiler has stopped by then, that memory is
    freed and the process crashes. So transfers that may outlive a step are begun by this function.
    """
    if not torch_private.profiler_is_active():
        return function(*args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()
