"""The process groups that pipelines open: small, their own, and closed by force when a rank fails.

NCCL's differ from Gloo's in two ways that are made up for here (docs/howto/gpu.md). Whoever uses a communicator or a pair of
ranks first waits on the host for the other side: so all are used once where they are opened. And their waits order streams
only, know no lost rank and no timeout: so the heartbeat's thread looks, and ends them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
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
from penstock.comms.heartbeat import HEARTBEAT_SECONDS
from penstock.comms.process import IN_STEP_MASK, STEP_WORD
from penstock.comms.rendezvous import poll, read_departures, wait_for_all
from penstock.comms.system import check_free_descriptors, error_text, print_notice
from penstock.comms.topology import Topology

SOURCE_RANK, DESTINATION_RANK = 0, 1  # the two ranks of a line's group
DEPARTED_WORK_SECONDS = 1.0  # seconds in which what a rank that has left did at its end arrives
LONG_WAIT_HEARTBEATS = 60  # of the heartbeat: a wait of 30 s
FAILED_KEY = "failed"  # a key of the store of groups that a rank which gives up leaves there


class ProcessGroups:
    """Process groups, opened under names that all ranks agree on, and other lines that end with them.

    All but `everyone` belong to whoever has asked for them, and go with it. `meshes` have groups of others' making in which
    these ranks may wait meanwhile.
    """

    def __init__(self, topology: Topology, name: str, meshes: Mapping[int, Sequence[Any]] | None = None) -> None:
        self.topology, self.name = topology, name
        self.ranks = range(topology.world_size)
        self.store = dist.PrefixStore(name, topology.store)
        self.openings = itertools.count()  # of pipelines' channels: a part of their names, the same on every rank
        self._open: WeakValueDictionary[int, Any] = WeakValueDictionary()  # in the order of their opening
        self._meshes = {} if meshes is None else meshes  # the caller's, who changes it
        self.lines: WeakSet[Any] = WeakSet()  # what else to `wake` and `close`
        self.woken = False  # no wait that has ended since means anything
        self._position: tuple[int, ...] = ()  # of this rank in its step, when the heartbeat looked last
        self._looks = 0  # in a row that saw it there
        self.awaited: tuple[int, str] | None = None  # a rank that this one waits for before a call begins, and what for
        self._awaited_before: tuple[int, str] | None = None  # when the heartbeat looked last
        self._looks_at_wait = 0
        topology.context.open_groups[self] = None

    @cached_property
    def everyone(self) -> Any:
        """The Gloo group of all of them, opened at first use. Raises as `gloo`."""
        return self.gloo("everyone", self.topology.rank, self.topology.world_size)

    def gloo(self, name: str, rank: int, size: int) -> Any:
        """This process as `rank` of a new Gloo group of `size`; returns when all of them are connected.

        Raises OSError if this rank has no file descriptors for it, RuntimeError if another rank does not come.
        """
        check_free_descriptors(size)
        store = dist.PrefixStore(name, self.store)
        wait_for_all(store, size, self.topology.timeout, self.is_over)
        group = dist.ProcessGroupGloo(
            store, rank, size, torch_private.gloo_options([self.topology.context.gloo_device], self.topology.timeout)
        )
        self._open[id(group)] = group
        if self.woken:  # while it connected, when there was nothing to break off
            raise dist.DistError("another rank has failed")
        return group

    def nccl(self, name: str, end: int) -> Any:
        """This process as the SOURCE or DESTINATION of a new NCCL group of two; returns when they are connected."""
        group = new_nccl_group(dist.PrefixStore(name, self.store), end, 2, self.topology.timeout)
        self._open[id(group)] = group
        byte = torch.zeros(1, dtype=torch.uint8, device=self.topology.transport_device)
        self.finish(group.send([byte], DESTINATION_RANK, 0) if end == SOURCE_RANK else group.recv([byte], SOURCE_RANK, 0))
        return group

    def finish(self, work: Any) -> None:
        """Wait on the host until `work` is done. Raises RuntimeError if another rank has failed, or does not come."""
        wait_for_work(work, self.topology, lambda: self.woken or self.is_over(), lambda: self.woken)

    def is_over(self, store: Any = None) -> bool:
        """Whether another rank has failed or left, by the job's `store` or this thread's own connection to it."""
        store = store or self.topology.store
        return dist.PrefixStore(self.name, store).check([FAILED_KEY]) or bool(read_departures(store, self.ranks))

    def look(self, store: Any) -> None:
        """The heartbeat calls it: end what is waited for by NCCL once that is in vain, or this rank stands still in a step."""
        self._say_what_is_awaited()
        position = tuple(self.topology.context.activity.words)
        if self.topology.backend != "nccl" or self.woken or not self._open or not position[STEP_WORD] & IN_STEP_MASK:
            return
        self._looks = self._looks + 1 if position == self._position else 0
        self._position = position
        if self._looks and (self._looks * HEARTBEAT_SECONDS > self.topology.timeout.total_seconds() or self.is_over(store)):
            self.wake()

    def _say_what_is_awaited(self) -> None:
        """A line, once a call, where another rank has not begun it for long: it may work, but also wait elsewhere itself."""
        awaited = self.awaited
        self._looks_at_wait = self._looks_at_wait + 1 if awaited is self._awaited_before else 0
        self._awaited_before = awaited
        if awaited is not None and self._looks_at_wait == LONG_WAIT_HEARTBEATS:
            peer, what = awaited
            waited, most = self._looks_at_wait * HEARTBEAT_SECONDS, self.topology.timeout.total_seconds()
            told = f"rank {self.topology.rank} has waited for {waited:g} s for rank {peer} {what}, and waits {most:g} s at most"
            print_notice(f"{told}: is that rank at other work, or in a dist.barrier() of the script's?")

    def wake(self) -> None:
        """End whatever another thread of this rank waits for here; it closes the groups then."""
        self.woken = True
        for line in list(self.lines):
            line.wake()
        for group in list(self._open.values()):  # `everyone` first: what is computed on nothing must be told nobody
            abort_backend(group)
        for group in chain.from_iterable(list(self._meshes.values())):
            abort_group(group)

    def close(self, failed: bool = True) -> None:
        """Close all groups, whoever waits on them; NCCL's, if nothing has `failed`, in peace, in the order of their opening."""
        failed = failed or self.woken
        for line in list(self.lines):
            line.close()
        self.lines.clear()
        for group in list(self._open.values()):
            if failed or group.name() == "gloo":
                abort_backend(group)
            else:
                with suppress(RuntimeError):
                    group.shutdown()
        self._open.clear()


def new_nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """This process as `rank` of a new NCCL group of `size`, which connects itself at its first use."""
    return dist.ProcessGroupNCCL(store, rank, size, torch_private.nccl_options(timeout))


def wait_for_work(work: Any, topology: Topology, is_over: Callable[[], bool], was_ended: Callable[[], bool]) -> None:
    """Wait on the host until `work` is done. Raises RuntimeError if it `was_ended`, or was not done when it `is_over`.

    NCCL's own `wait` orders streams only, so it is looked at. A rank that has left may have done its part before: that is given
    a moment to arrive. An operation that was ended says that it is done.
    """
    if topology.backend == "nccl":
        if not _is_done(work, topology.timeout.total_seconds(), is_over) and not _is_done(work, DEPARTED_WORK_SECONDS):
            raise dist.DistError("another rank has failed" if is_over() else "timed out")
        if was_ended():
            raise dist.DistError("another rank has failed")
    work.wait()


def _is_done(work: Any, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Whether `work` is, within so many seconds and before it `is_over`."""
    for _ in poll(seconds):
        if work.is_completed():
            return True
        if is_over():
            break
    return False


def is_transport_error(error: BaseException) -> bool:
    """Whether an operation of a group ended with `error` because of another rank."""
    told = error_text(error)
    return isinstance(error, dist.DistError) or "gloo/transport" in told or "pair closure" in told
