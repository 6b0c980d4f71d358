"""Reports of failed ranks, written before they close their groups and then read by all; the one error that all raise."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from penstock import errors
from penstock.comms.heartbeat import (
    IS_SILENT,
    IS_SUSPENDED,
    describe_suspended_ranks,
    find_living_ranks,
    publish_and_read_departures,
    select_lost,
)
from penstock.comms.process_groups import FAILED_KEY, ProcessGroups
from penstock.comms.rendezvous import departure_error, poll, read_text
from penstock.comms.time_limits import DEPARTURE_LAG_SECONDS, REPORT_GRACE_SECONDS
from penstock.errors import LostRankError, PenstockError


@dataclass(frozen=True)
class FailureReport:
    """Why a rank has failed: either by an error of its own, or because a wait for other ranks failed.

    |                | `error`          | `text`                   | `peer`             | `end`                     |
    |----------------|------------------|--------------------------|--------------------|---------------------------|
    | error          | name of its class | its message             | None               | empty                     |
    | failed wait    | None             | `for the output of 0F1 ..` | the rank, or None: any | `no answer within 60 s` |
    """

    rank: int
    when: float  # time.time()
    error: str | None = None
    text: str = ""
    peer: int | None = None
    end: str = ""


def own_error_report(rank: int, error: BaseException) -> FailureReport:
    """Return the report of an `error` that `rank` itself raised; its class is replaced by the nearest one in errors.py."""
    if not isinstance(error, PenstockError):
        return FailureReport(rank, time.time(), PenstockError.__name__, f"rank {rank} ended: {error!r}")
    nearest = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return FailureReport(rank, time.time(), nearest.__name__, str(error))


def publish_report(groups: ProcessGroups, report: FailureReport) -> None:
    """Write `report` into the store, unless its rank has written one before."""
    with suppress(RuntimeError):  # the store may be gone with the process that has it
        groups.store.compare_set(_report_key(report.rank), "", json.dumps(asdict(report)))
        groups.store.set(FAILED_KEY, "")


def collect_reports(groups: ProcessGroups, own_report: FailureReport) -> tuple[list[FailureReport], dict[int, str]]:
    """Return the reports of all ranks that have written one, and rank -> reason for the others that have left.

    Waits up to REPORT_GRACE_SECONDS, and ends earlier when

    1. a report has a rank's own error, or every rank has reported or left: no other report matters;
    2. a rank is lost, and either a report names it as the `peer` of a failed wait, or DEPARTURE_LAG_SECONDS have passed;
    3. DEPARTURE_LAG_SECONDS have passed, and every rank that has not reported has left or is named, and none is seen alive.
       A named rank that is alive may still report.

    `own_report` is added for this rank if the store has none.
    """
    reports, departures = dict[int, FailureReport](), dict[int, str]()
    begin, store = time.monotonic(), groups.topology.store
    with suppress(RuntimeError):
        for _ in poll(REPORT_GRACE_SECONDS):
            silent = set(groups.ranks) - reports.keys()
            # Before the reports are read: a rank reports before it leaves.
            departures = publish_and_read_departures(store, silent)
            for rank in silent:
                if text := read_text(groups.store, _report_key(rank)):
                    reports[rank] = FailureReport(**json.loads(text))
                    departures.pop(rank, None)
            silent -= reports.keys()

            if first_own_error(reports.values()) or not silent - departures.keys():
                break
            blamed = {report.peer for report in reports.values()}
            lag_is_over = time.monotonic() > begin + DEPARTURE_LAG_SECONDS
            lost_ranks = select_lost(departures)
            if lost_ranks and (lag_is_over or blamed & lost_ranks.keys()):
                break
            explained = departures.keys() | blamed
            if lag_is_over and silent <= explained and not find_living_ranks(store, silent - departures.keys()):
                break

    reports.setdefault(own_report.rank, own_report)
    return [reports[rank] for rank in sorted(reports)], departures


def first_own_error(reports: Collection[FailureReport]) -> PenstockError | None:
    """Return the earliest error that a rank itself raised; None if all reports are of failed waits."""
    own_errors = [(report.when, report.rank, report.error, report.text) for report in reports if report.error]
    if not own_errors:
        return None
    _, rank, kind, text = min(own_errors)
    error: PenstockError = getattr(errors, kind)(text, [rank])
    return error


def diagnose(groups: ProcessGroups, reports: Sequence[FailureReport], departures: Mapping[int, str]) -> PenstockError:
    """Return the one error that explains what `collect_reports` returned. The first line that applies counts:

    | what is known                                          | the error                                              |
    |--------------------------------------------------------|--------------------------------------------------------|
    | a rank raised an error of its own                      | that error                                             |
    | ranks whose processes are gone, suspended or silent    | `rank 2 is gone: rank 1 waited ..`                     |
    | ranks that exited by themselves                        | `rank 1 waited .., but rank 2 has finished`            |
    | ranks that failed waits name, that have not reported and are not seen alive | `rank 2 is gone: rank 1 waited ..` |
    | a wait ended by its timeout                            | `rank 2 does not answer: ..`, even if rank 2 is alive  |
    """
    if error := first_own_error(reports):
        return error

    silent, store = set(groups.ranks) - {report.rank for report in reports}, groups.topology.store
    witnesses = [report for report in reports if report.peer is None or report.peer in silent]
    timed_out = any("no answer" in report.end for report in witnesses)

    living, lost_ranks = set[int](), select_lost(departures)
    with suppress(RuntimeError):
        lost_ranks = lost_ranks or (describe_suspended_ranks(store, silent) if timed_out else {})
        living = set() if timed_out else find_living_ranks(store, silent - departures.keys())

    blamed = {report.peer for report in witnesses if report.peer is not None} - living
    absent = sorted(lost_ranks or blamed or silent - living)

    candidates = [report for report in witnesses if report.peer in absent] or witnesses or reports
    witness = min(candidates, key=lambda report: report.when)
    wait = f"rank {witness.rank} waited {witness.text}"
    if departed := {rank: departures[rank] for rank in absent if rank in departures and rank not in lost_ranks}:
        return departure_error(departed, wait)

    verb = "does not answer" if timed_out else "is gone"
    names = ", ".join(f"rank {rank} {lost_ranks.get(rank, verb)}" for rank in absent) or "the ranks lost each other"
    # If the heartbeat has ended the wait, this rank itself has closed the connection: that explains nothing.
    end = "" if IS_SUSPENDED in names or IS_SILENT in names else f": {witness.end}"
    return LostRankError(f"{names}: {wait}{end}", absent)


def _report_key(rank: int) -> str:
    return f"report-{rank}"
