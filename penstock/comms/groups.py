"""The process groups one pipeline opens: small, its own, and closed by force when a rank fails."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch.distributed as dist

from penstock import torch_private
from penstock.comms.breaking import break_off, break_off_backend
from penstock.comms.starting.meeting import departed, looks
from penstock.comms.system import need_descriptors, words
from penstock.comms.topology import LOOPBACK, Topology, closed_on_leaving

SOURCE, DESTINATION = 0, 1  # the two ranks of a line's group
FAILED = "failed"  # a key of the store of groups that a rank which gives up leaves there


class Groups:
    """The process groups of one pipeline, or of some `ranks`, opened under names that all of them agree on.

    `beside` are groups of others' making in which these ranks may wait meanwhile.
    """

    def __init__(
        self, topology: Topology, name: str, ranks: Sequence[int] | None = None, beside: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        self.topology = topology
        self.ranks = range(topology.world_size) if ranks is None else ranks
        self.store = dist.PrefixStore(name, topology.store)
        self._open: list[tuple[Any, int]] = []  # each group, and a peer in it
        self._beside = beside
        self._closers: list[Callable[[], object]] = []
        self._wakers: list[Callable[[], object]] = []
        closed_on_leaving.add(self)

    @cached_property
    def everyone(self) -> Any:
        """The Gloo group of all of them, opened at first use. Raises as `gloo`."""
        return self.gloo("everyone", self.ranks.index(self.topology.rank), len(self.ranks))

    def gloo(self, name: str, rank: int, size: int) -> Any:
        """This process as `rank` of a new Gloo group of `size`; returns when all of them are connected.

        Raises OSError if this rank has no file descriptors for it, RuntimeError if another rank does not come.
        """
        need_descriptors(size)
        store = dist.PrefixStore(name, self.store)
        self._meet(store, size)
        group = dist.ProcessGroupGloo(store, rank, size, torch_private.gloo_options([_gloo_device()], self.topology.timeout))
        self._open.append((group, (rank + 1) % size))
        return group

    def nccl(self, name: str, rank: int, size: int) -> Any:
        """This process as `rank` of a new NCCL group of `size`: a communicator and streams of its own."""
        options = torch_private.nccl_options(self.topology.timeout)
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, self.store), rank, size, options)
        self._open.append((group, (rank + 1) % size))
        return group

    def _meet(self, store: Any, size: int) -> None:
        """Wait for the others to come here, but not when one has failed or left: Gloo's own wait would not know."""
        if store.add("here", 1) == size:
            store.set("all", "")
        for _ in looks(self.topology.timeout.total_seconds()):
            if store.check(["all"]):
                return
            if self.store.check([FAILED]) or departed(self.topology.store, self.ranks):
                raise dist.DistError("another rank has failed")
        raise dist.DistError("timed out")

    def at_close(self, close: Callable[[], object]) -> None:
        """Have `close` called when the groups are closed."""
        self._closers.append(close)

    def at_wake(self, wake: Callable[[], object]) -> None:
        """Have `wake` called when another thread must not wait here any more."""
        self._wakers.append(wake)

    def wake(self) -> None:
        """End whatever another thread of this rank waits for here; it closes the groups then."""
        for wake in list(self._wakers):
            wake()
        for group, peer in list(self._open):
            break_off_backend(group, peer)
        for group in self._beside:
            break_off(group)

    def close(self, failed: bool = True) -> None:
        """Close all groups now, whoever waits on them; if nothing has `failed`, what GPUs do for others may come to its end."""
        for close in self._closers:
            close()
        self._closers.clear()
        self._wakers.clear()
        for group, peer in self._open:
            if failed or group.name() == "gloo":
                break_off_backend(group, peer)
        self._open.clear()


def is_of_transport(error: BaseException) -> bool:
    """Whether an operation of a group ended with `error` because of another rank."""
    told = words(error)
    return isinstance(error, dist.DistError) or "gloo/transport" in told or "pair closure" in told


_device: Any = None


def _gloo_device() -> Any:
    """The Gloo device, one event loop thread for all groups of this process.

    The thread competes with the compute for a core. As a batch thread (Linux's SCHED_BATCH) it does not preempt the main
    thread each time it wakes up, which makes small messages faster; it inherits the policy of the thread that starts it.
    """
    global _device
    if _device is None:
        policy = os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else None
        try:
            if policy == os.SCHED_OTHER:
                with suppress(OSError):  # some sandboxes know no other policy
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _device = _new_gloo_device()
        finally:
            if policy == os.SCHED_OTHER:
                with suppress(OSError):
                    os.sched_setscheduler(0, policy, os.sched_param(0))
    return _device


def _new_gloo_device() -> Any:
    if os.environ.get("MASTER_ADDR") in LOOPBACK:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()
