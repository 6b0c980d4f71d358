"""The ranks of a pipeline as one: they agree before data flows, and a failure on one ends the step on all.

The failure protocol: a rank that cannot go on writes a report to the store and closes its groups. That wakes every rank
that waits on it, which does the same, and so on; then each reads the reports and raises the same error. A rank that is
blamed by another and leaves no report is lost.
"""

import json
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from penstock import errors
from penstock.comms.groups import Groups, break_off
from penstock.comms.topology import Topology, lost_or_silent
from penstock.errors import LostRankError, PenstockError

GRACE = 1.0  # seconds a failing rank waits for the others' reports
POLL = 0.005
EXCHANGE_TAG, NUMBER_TAG = 1, 2
WIDEST = 9  # numbers of a row


class WaitFailed(PenstockError):
    """A wait for another rank ended badly. Never leaves Penstock: it becomes what the reports say happened."""

    def __init__(self, what: str, peer: int | None, cause: BaseException) -> None:
        super().__init__(what)
        self.what, self.peer, self.cause = what, peer, cause


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around collectives of others: one that ends because a rank is lost becomes a WaitFailed; `what` as there."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        raise WaitFailed(what, None, error) from error


def is_of_transport(error: BaseException) -> bool:
    """Whether a collective ended with `error` because of another rank."""
    told = str(error)
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in told or "pair closure" in told


@dataclass(frozen=True)
class Report:
    """What a failing rank tells the others: its own error, or whom it was waiting for."""

    rank: int
    when: float
    error: str | None = None  # the name of the error's class, when the error is this rank's own
    text: str = ""
    peer: int | None = None


class Control:
    """The control group of one pipeline, or of several side by side.

    `beside` are process groups that others have made for these ranks. A failure breaks them off too, so that nobody waits
    there; they cannot be made again, and so it is the end.
    """

    def __init__(self, topology: Topology, name: str, beside: Sequence[Any] = ()) -> None:
        self.topology, self.name, self.beside = topology, name, beside
        self.alone = topology.world_size == 1
        self.generation = 0  # one more each time the groups had to be opened again
        self.groups: Groups | None = None
        self._group: Any = None
        self._peers = [rank for rank in range(topology.world_size) if rank != topology.rank]
        self._sending: list[Any] = []
        self._receiving: list[Any] = []
        if self.alone:
            self._post_receives()
        self._lost: str | None = None

    def connect(self) -> Groups | None:
        """Open the groups if they are not open; None in a world of one. Raises LostRankError once a rank was lost."""
        if self._lost:
            raise LostRankError(f"this pipeline ended when {self._lost}: start the ranks again")
        if self.groups is None and not self.alone:
            self.generation += 1
            self.groups = Groups(self.topology, f"{self.name}/{self.generation}")
            for group in self.beside:
                self.groups.at_close(partial(break_off, group))
            try:
                self._group = self.groups.gloo("control", self.topology.rank, self.topology.world_size)
                self._post_receives()
            except RuntimeError as error:
                self.fail(WaitFailed("to connect to the other ranks", None, error))
        return self.groups

    def gather(self, row: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's `row` of numbers, by rank. `what` says what the others are to do, should it fail: `to end the step`."""
        self.tell(row, what)
        return self.hear(what)

    def tell(self, row: Sequence[float], what: str) -> None:
        """The first half of `gather`: send this rank's `row`, at most WIDEST numbers, to every other, without waiting.

        A message to each and receives posted one exchange ahead make it one latency, whatever the number of ranks; Gloo's
        own all-gather goes around in a ring.
        """
        self.connect()
        mine = torch.tensor([*row, *[0.0] * (WIDEST - len(row))], dtype=torch.float64)
        self._told, self._width = mine, len(row)
        sent, self._sending = self._sending, []
        try:
            self._sending = [(self._group.send([mine], peer, EXCHANGE_TAG), mine) for peer in self._peers]
            for work, _ in sent:
                work.wait()  # long received
        except RuntimeError as error:
            raise WaitFailed(f"for the other ranks {what}", None, error) from error
        self._heard, self._receiving = (self._rows, self._receiving), []
        self._post_receives()

    def hear(self, what: str) -> list[list[float]]:
        """The second half: wait for the others' rows."""
        rows, receiving = self._heard
        rows[self.topology.rank] = self._told
        for peer, work in zip(self._peers, receiving, strict=True):
            try:
                if isinstance(work, RuntimeError):
                    raise work
                work.wait()
            except RuntimeError as error:
                raise WaitFailed(f"for rank {peer} {what}", peer, error) from error
        return rows[:, : self._width].tolist()

    def _post_receives(self) -> None:
        """Post the receives of the next exchange; a peer that has ended meanwhile matters only if there is one."""
        self._rows = torch.zeros(self.topology.world_size, WIDEST, dtype=torch.float64)
        self._receiving = [self._post_receive(peer) for peer in self._peers]

    def _post_receive(self, peer: int) -> Any:
        try:
            return self._group.recv([self._rows[peer]], peer, EXCHANGE_TAG)
        except RuntimeError as error:
            return error

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, by rank."""
        if self.alone:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for (size,) in self.gather([data.numel()], what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        everyone = padded.new_empty((len(sizes), max(sizes)))
        try:
            self._group.allgather([list(everyone)], [padded]).wait()
        except RuntimeError as error:
            raise WaitFailed(f"for the other ranks {what}", None, error) from error
        return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(everyone, sizes, strict=True)]

    def send(self, number: float, peer: int) -> None:
        """Send one number to `peer`, which is waiting for it."""
        self._one(self._group.send, torch.tensor([number], dtype=torch.float64), peer)

    def receive(self, peer: int) -> float:
        """The number that `peer` sends."""
        number = torch.zeros(1, dtype=torch.float64)
        self._one(self._group.recv, number, peer)
        return number.item()

    def _one(self, transfer: Any, number: torch.Tensor, peer: int) -> None:
        try:
            transfer([number], peer, NUMBER_TAG).wait()
        except RuntimeError as error:
            raise WaitFailed(f"for rank {peer} to compare their clocks", peer, error) from error

    def fail(self, error: BaseException) -> NoReturn:
        """End the step on every rank because of `error`; raises what happened, the same on every rank."""
        if self.alone or self.groups is None:  # there is nobody, or nobody any more, to tell
            raise error
        self._publish(error)
        self.close()
        if not isinstance(error, WaitFailed):
            self._lost = str(error) if self.beside else None
            raise error
        verdict = self._verdict(self._reports(), error)
        if self.beside or isinstance(verdict, LostRankError):
            self._lost = str(verdict)
        raise verdict from error.cause

    def close(self) -> None:
        """Close the groups; the next `connect` opens new ones."""
        if self.groups is not None:
            self.groups.close()
        self.groups = self._group = None
        self._sending = []

    def _publish(self, error: BaseException) -> None:
        assert self.groups is not None
        if isinstance(error, WaitFailed):
            why = lost_or_silent(error.cause, self.topology.timeout)
            report = Report(self.topology.rank, time.time(), None, f"waited {error.what}: {why}", error.peer)
        else:
            kind = type(error).__name__ if isinstance(error, PenstockError) else "PenstockError"
            text = str(error) if isinstance(error, PenstockError) else f"rank {self.topology.rank} ended: {error!r}"
            report = Report(self.topology.rank, time.time(), kind, text)
        self.groups.store.set(f"report-{self.topology.rank}", json.dumps(asdict(report)))
        self._failed = self.groups.store

    def _reports(self) -> dict[int, Report]:
        """The reports of this failure: until one names an error of its own, all are accounted for, or the grace is over."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + GRACE
        while True:
            for rank in set(range(self.topology.world_size)) - reports.keys():
                if self._failed.check([f"report-{rank}"]):
                    reports[rank] = Report(**json.loads(self._failed.get(f"report-{rank}")))
            accounted = reports.keys() | {report.peer for report in reports.values()}  # who closes has reported before
            complete = accounted >= set(range(self.topology.world_size)) or any(report.error for report in reports.values())
            if complete or time.monotonic() > deadline:
                return reports
            time.sleep(POLL)

    def _verdict(self, reports: dict[int, Report], error: WaitFailed) -> PenstockError:
        """The one error that explains all reports."""
        own = [report for report in reports.values() if report.error]
        if own:
            first = min(own, key=lambda report: (report.when, report.rank))
            return getattr(errors, str(first.error))(first.text)
        witnesses = [report for report in reports.values() if report.peer is not None and report.peer not in reports]
        absent = sorted({report.peer for report in witnesses if report.peer is not None})
        absent = absent or sorted(set(range(self.topology.world_size)) - reports.keys())
        witness = min(witnesses or reports.values(), key=lambda report: report.when)
        told = f"rank {witness.rank} {witness.text}"
        if not absent:
            return LostRankError(f"the ranks lost each other: {told}")
        verb = "does not answer" if "no answer" in told else "is gone"
        return LostRankError(f"rank {', '.join(map(str, absent))} {verb}: {told}")
