"""All ranks as one: they make the same calls, agree before data flows, and a failure on one ends the call on all.

All pipelines of the ranks share one control group. Each row of numbers that the ranks exchange there carries the call it
belongs to. So a rank that saves while others step, or steps another pipeline than they do, is told by the next row.

The failure protocol: a rank that cannot go on writes a report to the store and closes its groups. That wakes every rank
that waits on it, which does the same, and so on; then each reads the reports (failure_reports.py) and raises the same error.
A rank that is blamed by another and leaves no report is lost.
"""

import itertools
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from penstock import torch_private
from penstock.comms import failure_reports
from penstock.comms.abort import abort_group
from penstock.comms.encoding import all_gather_encoded, encode_to_tensor
from penstock.comms.failure_reports import FailureReport
from penstock.comms.process_groups import ProcessGroups, is_transport_error
from penstock.comms.system import convert_os_errors, explain_error
from penstock.comms.topology import Topology, describe_wait_failure
from penstock.errors import LostRankError, MismatchError, NonFiniteError, PenstockError, ResourceError

EXCHANGE_TAG, TRANSFER_TAG = 1, 2
MAX_ROW_NUMBERS = 14  # numbers of a row
CALL = struct.Struct("6d")  # the name of a call, as the numbers in front of a row that have its bytes
OF_PIPELINE = " of pipeline "  # behind the name, and before the number, where a pipeline's method is called


class WaitError(PenstockError):
    """A wait for another rank ended badly. Never leaves Penstock: it becomes what the reports say happened."""

    def __init__(self, what: str, peer: int | None, cause: BaseException) -> None:
        super().__init__(what)
        self.what, self.peer, self.cause = what, peer, cause


class PendingTransfer(NamedTuple):
    """A tensor on its way to or from another rank."""

    work: Any
    tensor: torch.Tensor  # which must stay, unchanged, until that is done
    peer: int
    what: str  # this rank is to do when it waits

    def wait(self) -> None:
        """Wait until it has arrived."""
        with convert_runtime_errors(f"for rank {self.peer} {self.what}", self.peer):
            self.work.wait()


class convert_runtime_errors:
    """Around operations of the control group: one that ends badly becomes a WaitFailed; `what` and `peer` as there."""

    def __init__(self, what: str, peer: int | None = None) -> None:
        self._what, self._peer = what, peer

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise WaitError(self._what, self._peer, error) from error


@contextmanager
def convert_transport_errors(what: str) -> Iterator[None]:
    """Around collectives of others, whose own errors stay what they are: the same for one that ends because a rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if not is_transport_error(error):
            raise
        raise WaitError(what, None, error) from error


_count = itertools.count()  # of control groups of all ranks in this process, the same on every rank: their names


def shared_control_group(topology: Topology) -> "ControlGroup":
    """The control group of all ranks, the same for all pipelines until a rank is lost."""
    if not isinstance(topology, Topology):
        raise MismatchError(f"topology= takes what ps.comms.init_distributed() returns, got {topology!r}")
    if topology.world_size == 1:
        return ControlGroup(topology, "alone")
    shared: ControlGroup | None = topology.context.control_group
    if shared is None or shared.lost or shared.topology != topology or shared.topology.store is not topology.store:
        topology.context.control_group = shared = ControlGroup(topology, f"penstock/{next(_count)}")
    return shared


class ControlGroup:
    """The control group of all ranks, or one of them for a purpose of its own.

    Pipelines of a mesh have process groups that others have made for these ranks. A failure of a call of theirs breaks them off
    too, so that nobody waits there; they cannot be made again, and so it is the end of the pipeline.
    """

    def __init__(self, topology: Topology, name: str) -> None:
        self.topology, self.name = topology, name
        self._meshes: dict[int, Sequence[Any]] = {}  # pipeline -> the process groups of its mesh
        self._waits_in: dict[int, Sequence[Any]] = {}  # the same of the pipelines whose calls ranks are in
        self.ended_pipelines: dict[int, str] = {}  # pipeline whose mesh is broken off -> why
        self.alone = topology.world_size == 1
        self.times_closed = 0  # how often the groups have been closed since a rank failed
        self.lost = False  # a rank was
        self.failure = ""  # how
        self.groups: ProcessGroups | None = None
        self._group: Any = None
        self._peers = [rank for rank in range(topology.world_size) if rank != topology.rank]
        self._sending: list[Any] = []
        self._receiving: list[Any] = []
        self._call, self._in_call = "", threading.RLock()
        self._has_begun = False  # the call, on all ranks: they have met in it

    @contextmanager
    def collective_call(self, call: str, pipeline: int | None = None, announces: bool = True) -> Iterator[None]:
        """Around what all ranks do as one `call`: if a rank makes another call, or fails inside, all raise the same error.

        `announces`: False for a call whose first wait for other ranks is an exchange of this group.
        """
        if not self._in_call.acquire(blocking=False):
            raise PenstockError("these ranks are in a call of another thread: make one call at a time")
        outer, self._call = self._call, call if pipeline is None else f"{call}{OF_PIPELINE}{pipeline}"
        self._has_begun = bool(outer)
        waits_in = dict(self._waits_in)
        self._enter_meshes([pipeline])
        try:
            if announces:
                self.all_gather_row((), f"to call {call}")
            yield
        except NonFiniteError:  # on all of them already, at the end of the step
            raise
        except BaseException as error:
            self.fail_on_all_ranks(error)
        finally:
            self._call = outer
            self._waits_in.clear()
            self._waits_in.update(waits_in)
            self._in_call.release()

    def add_mesh_groups(self, pipeline: int, groups: Sequence[Any]) -> None:
        """Ranks may wait in these process groups during calls of `pipeline`, and during this one."""
        if groups:
            self._meshes[pipeline] = groups
            self._enter_meshes([pipeline])

    def _enter_meshes(self, pipelines: Iterable[int | None]) -> None:
        self._waits_in.update({each: self._meshes[each] for each in pipelines if each in self._meshes})

    def open_groups(self) -> ProcessGroups | None:
        """Open the groups if they are not open; None in a world of one.

        Raises LostRankError once a rank was lost, ResourceError if a rank cannot open them.
        """
        if self.lost:
            raise LostRankError(f"this pipeline ended when {self.failure}: start the ranks again")
        if self.groups is None and not self.alone:
            what = "connect to the other ranks"
            self.groups = ProcessGroups(self.topology, f"{self.name}/{self.times_closed}", self._waits_in)
            try:
                with convert_runtime_errors(f"to {what}"), convert_os_errors(f"rank {self.topology.rank} could not {what}"):
                    self._group = self.groups.everyone
                    self._post_receives()
            except (ResourceError, WaitError) as error:
                self.fail_on_all_ranks(error)
        return self.groups

    def all_gather_row(self, row: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's `row` of numbers, by rank. `what` says what the others are to do, should it fail: `to end the step`."""
        self.begin_all_gather_row(row, what)
        return self.finish_all_gather_row(what)

    def begin_all_gather_row(self, row: Sequence[float], what: str) -> None:
        """The first half of `gather`: send this rank's `row`, at most WIDEST numbers, to every other, without waiting.

        A message to each and receives posted one exchange ahead make it one latency, whatever the number of ranks; Gloo's
        own all-gather goes around in a ring.
        """
        self.open_groups()
        self._told = [*_name_as_numbers(self._call), *map(float, row)]
        if self.alone:
            return
        mine = torch.tensor([*self._told, *[0.0] * (MAX_ROW_NUMBERS - len(row))], dtype=torch.float64, device="cpu")
        sent, self._sending = self._sending, []
        for number, peer in enumerate(self._peers):
            with convert_runtime_errors(f"for rank {peer} {what}", peer):
                self._sending.append((self._group.send([mine], peer, EXCHANGE_TAG), mine))
                if sent:
                    sent[number][0].wait()  # long received
        self._heard, self._receiving = (self._rows, self._receiving), []
        self._post_receives()

    def finish_all_gather_row(self, what: str) -> list[list[float]]:
        """The second half: wait for the others' rows. Raises MismatchError if they belong to another call."""
        if self.alone:
            return [self._told[NAME:]]
        rows, receiving = self._heard
        try:
            for peer, work in zip(self._peers, receiving, strict=True):
                if self.groups is not None and not self._has_begun:
                    self.groups.awaited = peer, what
                with convert_runtime_errors(f"for rank {peer} {what}", peer):
                    if isinstance(work, RuntimeError):
                        raise work
                    work.wait()
            self._has_begun = True
        except WaitError:
            self._enter_meshes(map(_pipeline_of, rows.tolist()))  # of the ranks that have come so far
            raise
        finally:
            if self.groups is not None:
                self.groups.awaited = None
        heard = rows[:, : len(self._told)].tolist()
        heard[self.topology.rank] = self._told  # not into `rows`: it may be of an inference mode before
        if any(row[:NAME] != self._told[:NAME] for row in heard):
            self._enter_meshes(map(_pipeline_of, heard))
            raise MismatchError(_different_calls(list(map(_call_of, heard))))
        return [row[NAME:] for row in heard]

    def _post_receives(self) -> None:
        """Post the receives of the next exchange; a peer that has ended meanwhile matters only if there is one."""
        self._rows = torch.zeros(self.topology.world_size, NAME + MAX_ROW_NUMBERS, dtype=torch.float64, device="cpu")
        self._receiving = [self._post_receive(peer) for peer in self._peers]

    def _post_receive(self, peer: int) -> Any:
        try:
            return self._group.recv([self._rows[peer]], peer, EXCHANGE_TAG)
        except RuntimeError as error:
            return error

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, by rank."""
        if self.alone:
            return [value]
        mine = encode_to_tensor(value)
        sizes = [int(size) for (size,) in self.all_gather_row([mine.numel()], what)]
        with convert_runtime_errors(f"for the other ranks {what}"):
            return all_gather_encoded(mine, sizes, lambda rows, row: self._group.allgather([rows], [row]).wait())

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> PendingTransfer:
        """Begin to send a tensor on the CPU to `peer`, which receives one of as many bytes; `what` as in `gather`."""
        return self._transfer("send", tensor, peer, what)

    def receive(self, tensor: torch.Tensor, peer: int, what: str) -> torch.Tensor:
        """`tensor`, filled with what `peer` sends."""
        self._transfer("recv", tensor, peer, what).wait()
        return tensor

    def _transfer(self, way: str, tensor: torch.Tensor, peer: int, what: str) -> PendingTransfer:
        self.open_groups()
        with convert_runtime_errors(f"for rank {peer} {what}", peer):
            return PendingTransfer(getattr(self._group, way)([tensor], peer, TRANSFER_TAG), tensor, peer, what)

    def fail_on_all_ranks(self, error: BaseException) -> NoReturn:
        """End the call on every rank because of `error`; raises what happened, the same on every rank."""
        if broken := _of_device(error):
            error = LostRankError(f"rank {self.topology.rank} has lost its GPU: {explain_error(broken)}", [self.topology.rank])
            self.failure, self.lost = str(error), True
        if self.alone or self.groups is None:  # there is nobody, or nobody any more, to tell
            raise error
        if self.groups.woken and isinstance(error, Exception) and not isinstance(error, WaitError):
            error = WaitError("for a rank that failed meanwhile", None, error)  # it computed on what never came
        groups, mine = self.groups, self._report(error)
        failure_reports.publish_report(groups, mine)
        self._close()
        if not isinstance(error, WaitError):
            self._note(error)
            raise error
        verdict = failure_reports.diagnose(groups, *failure_reports.collect_reports(groups, mine))
        self.lost = self.lost or isinstance(verdict, LostRankError)
        self._note(verdict)
        raise verdict from (None if is_transport_error(error.cause) else error.cause)  # the transport's words help nobody

    def _note(self, error: BaseException) -> None:
        """Remember what has ended the calls that ranks were in."""
        self.failure = self.failure or (str(error) if self.lost else "")
        self.ended_pipelines.update({pipeline: str(error) for pipeline, why in self.ended_pipelines.items() if not why})

    def _close(self) -> None:
        """Close the groups; the next `connect` opens new ones."""
        if self.groups is not None:
            self.groups.close()
        self.groups = self._group = None
        self.times_closed += 1
        self._sending = []
        for pipeline, groups in self._waits_in.items():
            for group in groups:
                abort_group(group)
            self.ended_pipelines[pipeline] = ""
            self._meshes.pop(pipeline, None)
        if self._waits_in:
            torch_private.clear_dtensor_caches()  # other meshes' tensors would wait in these groups

    def _report(self, error: BaseException) -> FailureReport:
        if not isinstance(error, WaitError):
            return failure_reports.own_error_report(self.topology.rank, error)
        end = describe_wait_failure(error.cause, self.topology.timeout)
        return FailureReport(self.topology.rank, time.time(), None, error.what, error.peer, end)


def _of_device(error: BaseException | None) -> torch.AcceleratorError | None:
    """The error of the GPU that `error` began with (an assert in a kernel, an illegal address): it does no more then."""
    return error if error is None or isinstance(error, torch.AcceleratorError) else _of_device(error.__cause__)


@lru_cache(64)
def _name_as_numbers(call: str) -> tuple[float, ...]:
    """The name of a call, which is ASCII, as numbers that travel in a row."""
    return CALL.unpack(call.encode()[: CALL.size].ljust(CALL.size))


NAME = len(_name_as_numbers(""))  # numbers in front of a row


def _call_of(row: Sequence[float]) -> str:
    """The name of the call that a row belongs to; empty if none has come."""
    return CALL.pack(*row[:NAME]).decode().strip(" \0")


def _pipeline_of(row: Sequence[float]) -> int | None:
    number = _call_of(row).partition(OF_PIPELINE)[2]
    return int(number) if number else None


def _different_calls(calls: Sequence[str]) -> str:
    """That each rank makes another one of these `calls`, by rank, in words."""
    names = [call.partition(OF_PIPELINE) for call in calls]
    numbers = {number for _, _, number in names if number}
    ranks: dict[str, list[str]] = {}
    for rank, (call, (name, _, _)) in enumerate(zip(calls, names, strict=True)):
        ranks.setdefault(call if len(numbers) > 1 else name, []).append(str(rank))
    told = [
        f"rank{'s' * (len(those) > 1)} {'/'.join(those)} call{'s' * (len(those) == 1)} {call}" for call, those in ranks.items()
    ]
    numbered = " (pipelines are numbered as they were built)" if len(numbers) > 1 else ""
    what_to_do = "all ranks must make the same calls in the same order, none behind `if rank == 0:`"
    return f"the ranks do different things: {', '.join(told)}{numbered}: {what_to_do}"
