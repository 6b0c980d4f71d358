"""What ranks tell each other through the store when they cannot go on, and the one error that follows on all of them."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from penstock import errors
from penstock.comms.heartbeat import SILENT, STANDS, describe_suspended_ranks, detect_departures, find_living_ranks, select_lost
from penstock.comms.process_groups import FAILED_KEY, ProcessGroups
from penstock.comms.rendezvous import departure_error, poll, read_text
from penstock.comms.topology import DEPARTURE_LAG_SECONDS
from penstock.errors import LostRankError, PenstockError

REPORT_GRACE_SECONDS = 1.0  # seconds a failing rank waits for the others' reports


@dataclass(frozen=True)
class FailureReport:
    """What a failing rank tells the others: its own error, or what it waited for, from whom, and how that ended."""

    rank: int
    when: float
    error: str | None = None  # the name of the error's class, when the error is this rank's own
    text: str = ""  # of that error, or what it waited for
    peer: int | None = None
    end: str = ""


def own_error_report(rank: int, error: BaseException) -> FailureReport:
    """The report of a rank whose own `error` it is. An error of a class from elsewhere is told as the nearest in errors.py."""
    if not isinstance(error, PenstockError):
        return FailureReport(rank, time.time(), PenstockError.__name__, f"rank {rank} ended: {error!r}")
    family = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
    return FailureReport(rank, time.time(), family.__name__, str(error))


def publish_report(groups: ProcessGroups, report: FailureReport) -> None:
    """Write `report`, unless its rank has written one before."""
    with suppress(RuntimeError):  # the store may be gone, with the rank that had it
        groups.store.compare_set(_key(report.rank), "", json.dumps(asdict(report)))
        groups.store.set(FAILED_KEY, "")


def collect_reports(groups: ProcessGroups, mine: FailureReport) -> tuple[list[FailureReport], dict[int, str]]:
    """The reports of a failure, `mine` or what this rank had written before among them; what became of ranks that have left.

    Waits until one names an error of its own, a rank is known to be lost, all are accounted for, or the grace is over. A rank
    that another waited for may be dead, but what it told at its end may also be still on its way: if it lives, it is.
    """
    reports, left_here, begin, store = dict[int, FailureReport](), dict[int, str](), time.monotonic(), groups.topology.store
    with suppress(RuntimeError):
        for _ in poll(REPORT_GRACE_SECONDS):
            silent = set(groups.ranks) - reports.keys()
            left_here = detect_departures(store, silent)  # before its report is looked for: a rank tells all before it leaves
            for rank in silent:
                if told := read_text(groups.store, _key(rank)):
                    reports[rank] = FailureReport(**json.loads(told))
                    left_here.pop(rank, None)
            silent -= reports.keys()
            if first_own_error(reports.values()) or not silent - left_here.keys():
                break
            blamed, late = {each.peer for each in reports.values()}, time.monotonic() > begin + DEPARTURE_LAG_SECONDS
            if select_lost(left_here) and (late or blamed & select_lost(left_here).keys()):
                break
            if late and silent <= left_here.keys() | blamed and not find_living_ranks(store, silent - left_here.keys()):
                break
    reports.setdefault(mine.rank, mine)
    return [reports[rank] for rank in sorted(reports)], left_here


def first_own_error(reports: Collection[FailureReport]) -> PenstockError | None:
    """The first error that a rank told as its own, if there is one."""
    own = [(each.when, each.rank, each.error, each.text) for each in reports if each.error]
    if not own:
        return None
    _, rank, kind, text = min(own)
    error: PenstockError = getattr(errors, kind)(text, [rank])
    return error


def diagnose(groups: ProcessGroups, reports: Sequence[FailureReport], left_here: Mapping[int, str]) -> PenstockError:
    """The one error that explains all that was `read`: a rank's own, else who is lost.

    That is who is known to be; else who has left; else who is blamed and tells nothing, unless it lives: then that is told of
    it only if it did not answer in time.
    """
    if error := first_own_error(reports):
        return error
    silent, store = set(groups.ranks) - {each.rank for each in reports}, groups.topology.store
    witnesses = [each for each in reports if each.peer is None or each.peer in silent]
    in_time = not any("no answer" in each.end for each in witnesses)
    living, known = set[int](), select_lost(left_here)
    with suppress(RuntimeError):
        known = known or ({} if in_time else describe_suspended_ranks(store, silent))
        living = find_living_ranks(store, silent - left_here.keys()) if in_time else set()
    blamed = {each.peer for each in witnesses if each.peer is not None} - living
    absent = sorted(known or blamed or silent - living)
    witness = min([each for each in witnesses if each.peer in absent] or witnesses or reports, key=lambda each: each.when)
    waited = f"rank {witness.rank} waited {witness.text}"
    if told := {rank: left_here[rank] for rank in absent if rank in left_here and rank not in known}:
        return departure_error(told, waited)
    verb = "is gone" if in_time else "does not answer"
    names = ", ".join(f"rank {rank} {known.get(rank, verb)}" for rank in absent) or "the ranks lost each other"
    end = "" if STANDS in names or SILENT in names else f": {witness.end}"  # this rank has closed the connection itself
    return LostRankError(f"{names}: {waited}{end}", absent)


def _key(rank: int) -> str:
    return f"report-{rank}"
