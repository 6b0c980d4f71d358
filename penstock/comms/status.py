"""How ranks ended: one record of each rank, of which the first stays, and the one diagnosis that follows from all records.

    kind      the rank                                     text
    raised    raised an error of its own in a call         the error's message
    waited    failed in a call because a wait failed       `for the output of 0F1 from rank 0`
    left      ended its program                            `has finished`, or `ended with ValueError: ..`
    gone      ended without a record                       `is gone (..)`
    stopped   is suspended                                 `is stopped (SIGSTOP; ..)`
    silent    is on another machine, and does not beat     `has given no heartbeat for 120 s`

Records of the first two kinds are in the store of the process groups that the call used, as the next call has new groups. The
others are in the job's store: such a rank does not come back. The ranks that others monitor write their own; `gone`, `stopped`
and `silent` are written by whoever notices: heartbeat.py, or the launcher (launcher/attempt.py, rank_processes.py).
"""

import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock import errors
from penstock.comms.process import ALIVE, ENDED, SUSPENDED, read_beat, read_process_of_rank, read_text
from penstock.comms.rendezvous import ANY_STATUS_KEY, poll
from penstock.comms.system import explain_error
from penstock.comms.time_limits import DEPARTURE_LAG_SECONDS, REPORT_GRACE_SECONDS
from penstock.comms.wait_errors import WaitError, has_timed_out
from penstock.errors import LostRankError, PenstockError

if TYPE_CHECKING:
    from torch.distributed import Store

Kind = Literal["raised", "waited", "left", "gone", "stopped", "silent"]
LOST: tuple[Kind, ...] = ("gone", "stopped", "silent")
GONE = "is gone (its output and its exit code may say why)"
PAUSE_ADVICE = "to pause a job, stop all its processes"  # they go on where they were: heartbeats are counted, not seconds
HANGING_KEY = "status-hanging"  # set once a rank is stopped or silent: its connections stay open, so waits must be aborted


class RankStatus(NamedTuple):
    """How a rank, or its part of a call, has ended: see the module's text."""

    rank: int
    kind: Kind
    text: str
    when: float = 0.0  # time.time()
    error: str = ""  # the class of the error by which it raised or left; of a process that crashed, `exit` or the signal
    peers: Sequence[int] = ()  # waited: for which ranks; empty: for any
    timeout: float = 0.0  # waited: seconds, if the wait has ended by its timeout
    activity: str = ""  # at the last heartbeat, of a rank that is lost, or of the one for which a wait ended by its timeout

    def sentence(self) -> str:
        """Return the status of a rank that left or is lost as text: `rank 2 is gone (..), last seen in 2F3 of step 17`."""
        return f"rank {self.rank} {self.text}" + (f", last seen {self.activity}" if self.activity else "")


def status_of_error(rank: int, error: BaseException, timeout: timedelta, job_store: "Store") -> RankStatus:
    """Return the status of `rank`, whose call raised `error`. `timeout`: of its waits."""
    if isinstance(error, WaitError):
        status = RankStatus(rank, "waited", error.awaited, time.time(), peers=() if error.peer is None else (error.peer,))
        if not has_timed_out(error.cause):
            return status
        activity = "" if error.peer is None else _last_activity(job_store, error.peer)
        return status._replace(timeout=timeout.total_seconds(), activity=activity)
    if not isinstance(error, PenstockError):
        notes = [] if isinstance(error, Exception) else getattr(error, "__notes__", [])  # the action in which a program ended
        text = f"{', '.join([f'rank {rank}', *notes])}: {explain_error(error)}"
        return RankStatus(rank, "raised", text, time.time(), PenstockError.__name__)
    nearest = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)  # other ranks have no others
    return RankStatus(rank, "raised", str(error), time.time(), nearest.__name__)


def status_of_end(rank: int, error: BaseException | None) -> RankStatus:
    """Return the status of `rank` at the end of its program. `error`: by which it has ended, if any."""
    if error is None:
        return RankStatus(rank, "left", "has finished", time.time())
    return RankStatus(rank, "left", f"ended with {explain_error(error)}", time.time(), type(error).__name__)


def publish(store: "Store", status: RankStatus) -> None:
    """Write a rank's status for all other ranks, unless it has one."""
    with suppress(RuntimeError):  # the store may be gone with the process that has it
        store.compare_set(f"status-{status.rank}", "", json.dumps(status))
        store.set(ANY_STATUS_KEY, "")
        if status.kind in ("stopped", "silent"):
            store.set(HANGING_KEY, "")


def read(store: "Store | None", ranks: Collection[int]) -> dict[int, RankStatus]:
    """Return the statuses of those of `ranks` that have one."""
    if store is None or not store.check([ANY_STATUS_KEY]):
        return {}
    texts = {rank: read_text(store, f"status-{rank}") for rank in ranks}
    return {rank: RankStatus(*json.loads(text)) for rank, text in texts.items() if text}


def publish_gone_and_read(store: "Store", ranks: Collection[int]) -> dict[int, RankStatus]:
    """Write `gone` for those of `ranks` that ended without a status; return the statuses of `ranks` in the job's store."""
    statuses = read(store, ranks)
    ended = ranks_in_state(store, set(ranks) - statuses.keys(), ENDED)
    for rank in ended:
        publish_loss(store, rank, "gone", GONE)
    return statuses | read(store, ended)


def publish_suspended(store: "Store", ranks: Collection[int]) -> bool:
    """Write the statuses of those of `ranks` that are suspended; return whether there are any."""
    suspended = ranks_in_state(store, ranks, SUSPENDED)
    for rank in suspended:
        publish_loss(store, rank, "stopped", f"is stopped (SIGSTOP; {PAUSE_ADVICE})")
    return bool(suspended)


def publish_loss(store: "Store", rank: int, kind: Kind, text: str) -> None:
    """Write that `rank` is lost, with its activity, unless it has a status."""
    publish(store, RankStatus(rank, kind, text, time.time(), activity=_last_activity(store, rank)))


def _last_activity(store: "Store", rank: int) -> str:
    with suppress(RuntimeError):
        return read_beat(store, rank).activity
    return ""


def ranks_in_state(store: "Store", ranks: Collection[int], state: str) -> set[int]:
    """Return those of `ranks` whose processes this machine shows in `state` (ALIVE, SUSPENDED, ENDED)."""
    return {rank for rank in ranks if read_process_of_rank(store, rank).state() == state}


def explain_failure(job_store: "Store", call_store: "Store | None", ranks: Collection[int], own: RankStatus) -> PenstockError:
    """Return the one error that explains why the wait in `own` has failed, the same on all ranks.

    `call_store`: of the groups that the call used; None for a wait outside of a call, in which other ranks do not report.
    """
    statuses = collect(job_store, call_store, ranks, own)
    alive = set[int]()
    with suppress(RuntimeError):
        alive = ranks_in_state(job_store, set(ranks) - {status.rank for status in statuses}, ALIVE)
    return error_of(*diagnose(statuses, own.peers if call_store is None else ranks, alive))


def collect(job_store: "Store", call_store: "Store | None", ranks: Collection[int], own: RankStatus) -> list[RankStatus]:
    """Return the statuses that explain a failed call: errors of ranks first, each group in the order of time.

    Waits up to REPORT_GRACE_SECONDS, and ends earlier when

    1. a rank has raised an error of its own, or every rank has a status: nothing else matters;
    2. a rank is lost, or nobody reports, and a rank that has ended was waited for, or DEPARTURE_LAG_SECONDS have passed;
    3. DEPARTURE_LAG_SECONDS have passed, and every rank without a report has ended or was waited for, and none is seen alive.
       A rank that was waited for and that is alive may still report.
    """
    reports, ended = {own.rank: own}, dict[int, RankStatus]()
    begin = time.monotonic()
    with suppress(RuntimeError):
        for _ in poll(REPORT_GRACE_SECONDS):
            silent = set(ranks) - reports.keys()
            ended = publish_gone_and_read(job_store, silent)  # before the reports are read: a rank reports before it leaves
            reports |= read(call_store, silent | {own.rank})  # a thread of this rank may have reported before
            silent -= reports.keys()
            ended = {rank: status for rank, status in ended.items() if rank in silent}

            if any(status.kind == "raised" for status in reports.values()) or silent == ended.keys():
                break
            awaited = {peer for status in reports.values() for peer in status.peers}
            is_late = time.monotonic() > begin + DEPARTURE_LAG_SECONDS
            lost = any(status.kind in LOST for status in ended.values())
            if (lost or call_store is None) and (is_late or awaited & ended.keys()):
                break
            if is_late and silent <= ended.keys() | awaited and not ranks_in_state(job_store, silent - ended.keys(), ALIVE):
                break

        if any(status.timeout for status in reports.values()):
            publish_suspended(job_store, silent - ended.keys())
            ended |= read(job_store, silent)
    return sorted((*reports.values(), *ended.values()), key=lambda status: (status.kind != "raised", status.when, status.rank))


def diagnose(
    statuses: Collection[RankStatus], ranks: Collection[int], alive: Collection[int] = ()
) -> tuple[list[RankStatus], RankStatus | None]:
    """Return the statuses that explain why `ranks` failed, and a wait that failed because of them (None for an error).

    The first line that applies counts:

    | what is known                                                | the cause                                            |
    |--------------------------------------------------------------|------------------------------------------------------|
    | a rank raised an error, before any was lost                  | that error                                           |
    | ranks are gone, stopped or silent                            | these                                                |
    | ranks that were waited for have left                         | these                                                |
    | a wait ended by its timeout                                  | who was waited for, alive or not: `does not answer`  |
    | ranks that were waited for have no status, and none is alive | these: `is gone`                                     |
    | none of these                                                | no rank: they have lost each other                   |

    `statuses`: in the order of time, as far as it is known. `alive`: ranks without a status whose processes are seen to run. A
    wait for any rank is one for all ranks that have not raised or waited.
    """
    first = next((status for status in statuses if status.kind in ("raised", *LOST)), None)
    if first is not None and first.kind == "raised":
        return [first], None

    waits = [status for status in statuses if status.kind == "waited"]
    silent = set(ranks) - {status.rank for status in statuses if status.kind in ("raised", "waited")}
    open_waits = [wait for wait in waits if not wait.peers or silent & set(wait.peers)]
    timed_out = any(wait.timeout for wait in open_waits)
    present = set[int]() if timed_out else set(alive)

    lost = {status.rank: status for status in statuses if status.kind in LOST}
    left = {status.rank: status for status in statuses if status.kind == "left"}
    awaited = {peer for wait in open_waits for peer in wait.peers} & silent - present
    absent = set(lost) or awaited or silent - present

    witness = next(iter([wait for wait in waits if absent & set(wait.peers)] or open_waits or waits), None)
    if cause := lost or {rank: left[rank] for rank in absent & left.keys()}:
        return list(cause.values()), witness
    activities = {} if witness is None else dict.fromkeys(witness.peers, witness.activity)
    unknown = RankStatus(0, "silent", "does not answer") if timed_out else RankStatus(0, "gone", GONE)
    return [unknown._replace(rank=rank, activity=activities.get(rank, "")) for rank in sorted(absent)], witness


def end_of_wait(timeout_seconds: float) -> str:
    """Return why a wait for another rank has ended: its timeout has passed, or, if that is 0, its connection is closed."""
    timeout = f": no answer within {timeout_seconds:g} s (init_distributed(timeout=..))"
    return timeout if timeout_seconds else ": the connection is closed"


def error_of(cause: Sequence[RankStatus], witness: RankStatus | None) -> PenstockError:
    """Return the error for what `diagnose` returned."""
    cause = sorted(cause, key=lambda status: status.rank)
    if witness is None:
        (first,) = cause
        error: PenstockError = getattr(errors, first.error)(first.text, [first.rank])
        return error

    wait, absent = f"rank {witness.rank} waited {witness.text}", [status.rank for status in cause]
    names = ", ".join(status.sentence() for status in cause) or "the ranks lost each other"
    if any(status.kind == "left" for status in cause):
        hint = "" if all(status.error for status in cause) else ": every rank must make the same calls"
        return LostRankError(f"{wait}, but {names}{hint}", absent)

    # If the heartbeat has ended the wait, this rank itself has closed the connection: that explains nothing.
    end = end_of_wait(witness.timeout) if witness.timeout or not cause or cause[0].kind == "gone" else ""
    lost = LostRankError(f"{names}: {wait}{end}", absent)
    lost.wait, lost.activities = wait, [status.activity for status in cause]
    return lost
