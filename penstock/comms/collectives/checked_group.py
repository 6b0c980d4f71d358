"""How the ranks of a group make sure that they are in the same call before data flows between them.

A collective in which ranks disagree is no error of the transport: it fills tensors with garbage or ends a process. So every
rank says first what it was called with. Where all ranks of the group are on one machine that costs no message: each writes a
number that stands for its call into memory that all of them see, then looks at the others' numbers, and starts only if those
that are there are the same. Of two ranks that disagree the later one always sees the earlier one's number, so it never
starts, and their data never meets: that needs no waiting. Whoever sees a difference closes the group's connections, which
wakes those that had started. A rank that was done before the one that disagrees came, as may be in a broadcast, has the right
data, and raises the error at its next call.

Where memory cannot be shared (several machines, GPUs with NCCL) the ranks send each other that number instead. What each was
called with is told only where they differ, in the reports of the ranks.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from penstock import torch_private
from penstock.comms.breaking import break_off_backend
from penstock.comms.collectives.call import CollectiveCall
from penstock.comms.collectives.call_board import CallBoard
from penstock.comms.groups import Groups
from penstock.comms.health.lives import lost
from penstock.comms.health.reports import Report, own_error, own_report, publish, read, verdict
from penstock.comms.shared_memory import shared_memory
from penstock.comms.system import named
from penstock.comms.topology import Topology, lost_or_silent
from penstock.errors import MismatchError, PenstockError, ResourceError

IN = "in "  # what a rank waited in: a call
DIFFER = "another rank is in another call"  # how that ended for who has seen it; ranks may be in two calls though all is well


class CheckedGroup:
    """This rank among the ranks of one group, in connections of their own that can be closed when they disagree."""

    def __init__(self, topology: Topology, ranks: Sequence[int], group: Any) -> None:
        self.topology, self.ranks, self.size = topology, tuple(ranks), len(ranks)
        self.rank = self.ranks.index(topology.rank)
        self._name = None if group is None else group.group_name  # of torch's, which this is not to keep from its end
        self._nccl = None if topology.backend != "nccl" or group is None else torch_private.backend_of(group, topology.device)
        self._groups: Groups | None = None
        self._gloo: Any = None
        self._board: CallBoard | None = None
        self._timeout = topology.timeout.total_seconds()
        self._before: CollectiveCall | None = None  # the last call
        self._ended: PenstockError | None = None

    def run(self, call: CollectiveCall, check: bool, start: Callable[[Any], Any]) -> None:
        """Do what `start` does with the group's backend, once all ranks are in the same `call`; returns when it is done.

        Raises MismatchError if they are not, LostRankError if one is lost or does not come; then the group has ended.
        """
        groups = self._groups or self._open(call)
        if check:
            self._compare(call)
            self._before = call
        work = start(self._gloo if self._nccl is None else self._nccl)
        try:
            groups.finish(work)
        except RuntimeError as error:
            self._fail(call, error)

    def _open(self, call: CollectiveCall) -> Groups:
        """Connect the ranks, at first use."""
        if self._ended is not None:
            raise type(self._ended)(f"this group has ended: {self._ended}")
        name = f"collectives/{self._name}/{'-'.join(map(str, self.ranks))}"
        self._groups = groups = Groups(self.topology, name, self.ranks)
        try:
            with named(f"rank {self.topology.rank} could not connect for the {call}"):
                self._connect(groups)
        except ResourceError as error:
            publish(groups, own_report(self.topology.rank, error))
            groups.close()
            self._end(error)
        except RuntimeError as error:
            self._fail(call, error)
        return groups

    def _connect(self, groups: Groups) -> None:
        self._gloo = groups.everyone
        if self._nccl is None:
            memory = shared_memory(self._gloo, self.rank, lambda: CallBoard.bytes(self.size))
            self._board = board = None if memory is None else CallBoard(memory, self.rank, self.size)
            if board is not None:
                groups.at_close(lambda: board.close(board.count + 1))
                groups.at_wake(lambda: board.close(board.count))

    def _compare(self, call: CollectiveCall) -> None:
        """See that no rank is in another call."""
        try:
            alike = self._exchange(call.digest) if self._board is None else self._board.arrive(call.digest, self._timeout)
        except RuntimeError as error:
            self._fail(call, error)
        if not alike:
            self._fail(call, None)

    def _exchange(self, digest: int) -> bool:
        """Every rank's digest to every rank; whether all are the same."""
        mine = torch.tensor([digest], device="cpu")
        everyone = mine.new_empty(self.size, 1)
        self._gloo.allgather([list(everyone)], [mine]).wait()
        return bool((everyone == mine).all())

    def _fail(self, call: CollectiveCall, error: RuntimeError | None) -> NoReturn:
        """End this call on all ranks; raises what happened."""
        groups, board = self._groups, self._board
        assert groups is not None
        if board is not None and board.close(board.count) < board.count and self._before is not None:
            call = self._before  # in which this rank was done before
        differ = error is None and (board is None or board.differ)
        end = lost_or_silent(error, self.topology.timeout) if error else DIFFER if differ else "another rank gave up"
        mine = Report(self.topology.rank, time.time(), text=f"{IN}{call}", end=end)
        publish(groups, mine)
        groups.close()
        if self._nccl is not None:
            break_off_backend(self._nccl)
        reports, gone = read(groups, mine)
        calls = {each.rank: each.text.removeprefix(IN) for each in reports}
        apart = DIFFER in {each.end for each in reports} and len({*calls.values()}) > 1
        apart = apart and not lost(gone) and not own_error(reports)
        self._end(_mismatch(calls) if apart else verdict(groups, reports, gone))

    def _end(self, ended: PenstockError) -> NoReturn:
        self._groups, self._ended = None, ended
        raise ended from None  # the transport's words help nobody


def _mismatch(calls: dict[int, str]) -> MismatchError:
    """Which ranks were called with what."""
    told = []
    for text in dict.fromkeys(calls.values()):
        ranks = [str(rank) for rank, each in calls.items() if each == text]
        told.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} called {text}")
    return MismatchError(f"the ranks are in different calls: {'; '.join(told)}")


_groups: "WeakKeyDictionary[dist.ProcessGroup, CheckedGroup]" = WeakKeyDictionary()  # torch's -> ours, which ends with it


def checked_group(group: Any, topology: Topology) -> CheckedGroup:
    """This rank in torch's `group`, the whole world if None, with the calls of its ranks checked."""
    if group is not None and (group is dist.GroupMember.NON_GROUP_MEMBER or group.rank() < 0):
        raise PenstockError(f"rank {topology.rank} is not in this group, so it takes no part in its collectives")
    group = dist.group.WORLD if group is None else group
    if group is None:
        return CheckedGroup(topology, [0], None)  # a world of one
    checked = _groups.get(group)
    if checked is None or checked.topology is not topology:
        checked = _groups[group] = CheckedGroup(topology, dist.get_process_group_ranks(group), group)
    return checked
