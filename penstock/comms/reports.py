"""What ranks tell each other, through the store, when a step fails, and the one error that follows from it on all of them."""

import json
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from penstock import errors
from penstock.comms.groups import FAILED
from penstock.errors import LostRankError, PenstockError

GRACE = 1.0  # seconds a failing rank waits for the others' reports
POLL = 0.005


@dataclass(frozen=True)
class Report:
    """What a failing rank tells the others: its own error, or whom it was waiting for."""

    rank: int
    when: float
    error: str | None = None  # the name of the error's class, when the error is this rank's own
    text: str = ""
    peer: int | None = None


def own_report(rank: int, error: BaseException) -> Report:
    """The report of a rank whose own `error` it is. An error of a class from elsewhere is told as the nearest in errors.py."""
    if not isinstance(error, PenstockError):
        return Report(rank, time.time(), PenstockError.__name__, f"rank {rank} ended: {error!r}")
    family = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
    return Report(rank, time.time(), family.__name__, str(error))


def publish(store: Any, report: Report) -> None:
    """Write `report`, unless its rank has written one before."""
    store.compare_set(_key(report.rank), "", json.dumps(asdict(report)))
    store.set(FAILED, "")


def read(store: Any, ranks: int) -> dict[int, Report]:
    """The reports of a failure: until one names an error of its own, all `ranks` are accounted for, or the grace is over."""
    reports: dict[int, Report] = {}
    deadline = time.monotonic() + GRACE
    while True:
        for rank in set(range(ranks)) - reports.keys():
            if store.check([_key(rank)]):
                reports[rank] = Report(**json.loads(store.get(_key(rank))))
        accounted = reports.keys() | {report.peer for report in reports.values()}  # who closes has reported before
        complete = accounted >= set(range(ranks)) or any(report.error for report in reports.values())
        if complete or time.monotonic() > deadline:
            return reports
        time.sleep(POLL)


def verdict(reports: dict[int, Report], ranks: int) -> PenstockError:
    """The one error that explains all reports: a rank's own, the first, else who is lost."""
    own = [report for report in reports.values() if report.error]
    if own:
        first = min(own, key=lambda report: (report.when, report.rank))
        return getattr(errors, str(first.error))(first.text)
    return _lost(reports.values(), sorted(set(range(ranks)) - reports.keys()))


def _lost(reports: Collection[Report], silent: list[int]) -> LostRankError:
    """Who is gone: whoever is blamed and leaves no report, else all that left none."""
    witnesses = [report for report in reports if report.peer in silent]
    absent = sorted({report.peer for report in witnesses if report.peer is not None}) or silent
    witness = min(witnesses or reports, key=lambda report: report.when)
    told = f"rank {witness.rank} {witness.text}"
    if not absent:
        return LostRankError(f"the ranks lost each other: {told}")
    verb = "does not answer" if "no answer" in told else "is gone"
    return LostRankError(f"rank {', '.join(map(str, absent))} {verb}: {told}")


def _key(rank: int) -> str:
    return f"report-{rank}"
