"""The outcome of one attempt (one start of all ranks), and which ranks failed by themselves.

Results of ranks are in the order in which they arrived: the pipe of a killed rank closes before its connections do, so its
death is known before the errors that it causes on other ranks.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple, TypeVar

from penstock.comms.status import RankStatus, diagnose
from penstock.errors import LostRankError, PenstockError
from penstock.launcher.rank_main import EarlyExitError, RankResult

T = TypeVar("T")
UNGUARDED_EXIT_CODE = 86  # of a rank that would launch ranks while it imports the program
SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # not caused by a crash
FAULT_HANDLER_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
HINTS: dict[int, str] = dict.fromkeys(FAULT_HANDLER_SIGNALS, " (PYTHONFAULTHANDLER=1 prints where)")
HINTS[signal.SIGKILL] = " (out of memory? see dmesg)"
MAX_ERROR_CHARACTERS = 400


class Attempt(NamedTuple):
    """One start of all ranks, and its outcome."""

    ranks: int
    error: BaseException | None = None  # None if all ranks returned
    failed_ranks: tuple[int, ...] = ()  # ranks that failed by themselves; empty if none in particular did
    steps_done: int | None = None  # training steps of the ranks' pipelines; None if no rank has reported a step
    traceback: str = ""  # of the error, on its rank
    mistake: str = ""  # the error without its numbers, so that the same mistake on another rank is equal; empty for a signal
    died: bool = False  # whether a rank's process ended without a result

    def error_in_one_line(self) -> str:
        """Return the error in one line."""
        printable = "".join(letter if letter.isprintable() else " " for letter in str(self.error))
        text = shorten(printable, MAX_ERROR_CHARACTERS) or type(self.error).__name__
        return text if isinstance(self.error, PenstockError) else f"{type(self.error).__name__}: {text}"


class LaunchResults(list[T]):
    """The list of a function's results by rank, and the `attempts` that it took."""

    def __init__(self, values: Sequence[T], attempts: Sequence[Attempt]) -> None:
        super().__init__(values)
        self.attempts = tuple(attempts)


def would_fail_again(attempts: Sequence[Attempt]) -> bool:
    """Return whether another attempt would fail like the last: the program called `sys.exit`, or repeats the same mistake."""
    return isinstance(attempts[-1].error, SystemExit | EarlyExitError) or count_same_failures(attempts) > 0


def count_same_failures(attempts: Sequence[Attempt]) -> int:
    """Return how many of the last attempts failed by the same mistake at the same step; 0 if the program may not be at fault.

    An error that was raised twice is a mistake of the program. A crash may have another cause: it must happen three times,
    after a step.
    """
    last_attempt = attempts[-1]
    needed = 3 if last_attempt.died else 2
    failures = {(attempt.mistake, attempt.steps_done) for attempt in attempts[-needed:]}
    can_be_compared = last_attempt.mistake and (last_attempt.steps_done is not None or not last_attempt.died)
    return needed if can_be_compared and len(failures) == 1 and len(attempts) >= needed else 0


def exit_result(rank: int, exitcode: int | None) -> RankResult:
    """Return the result of `rank`, whose process ended with `exitcode` and without one."""
    if exitcode == UNGUARDED_EXIT_CODE:
        problem = "this program launches ranks wherever it is imported, and every rank imports it"
        text = f'{problem}: put what launches under `if __name__ == "__main__":`'
        return RankResult.of_error(rank, PenstockError(text))
    if exitcode is None or exitcode >= 0:
        text = f"ended with exit code {exitcode} before it was done (its output may say why; os._exit() prints nothing)"
        return RankResult(None, RankStatus(rank, "gone", text, error="exit"))
    names = {known_signal.value: known_signal.name for known_signal in signal.Signals}
    name = names.get(-exitcode, f"signal {-exitcode}")  # a real-time signal has no name
    crash = "" if -exitcode in SIGNALS_FROM_OUTSIDE else name
    hint = HINTS.get(-exitcode, "")
    return RankResult(None, RankStatus(rank, "gone", f"was killed by {name}{hint}", error=crash))


def diagnose_attempt(ranks: int, results: Mapping[int, RankResult]) -> Attempt:
    """Return the attempt whose ranks had these `results` (rank -> result, in the order in which they arrived).

    The table of `diagnose` says what counts. A crash after the first failure does not: it may have come of that. Ranks that
    nobody waited for count as alive.
    """
    steps = max((result.steps_done for result in results.values() if result.steps_done is not None), default=None)
    failed = {rank: result for rank, result in results.items() if not result.succeeded}
    if not failed:
        return Attempt(ranks, steps_done=steps)

    first = next((result.status for result in failed.values() if result.status.kind != "waited"), None)
    statuses = [result.status for result in results.values() if result.status is first or not result.crashed]
    awaited = {peer for status in statuses for peer in status.peers}
    cause, witness = diagnose(statuses, range(ranks), set(range(ranks)) - awaited)

    if witness is None and cause[0].kind == "raised":
        return _attempt_with_error(ranks, failed, cause[0])._replace(steps_done=steps)
    return _attempt_with_lost_ranks(ranks, failed, cause, witness)._replace(steps_done=steps)


def _attempt_with_error(ranks: int, failed: Mapping[int, RankResult], status: RankStatus) -> Attempt:
    """Return the attempt that ended by the error in `status`, which its rank or another one has sent."""
    sender = next(rank for rank, result in failed.items() if result.status is status)
    own_errors = [rank for rank, result in failed.items() if (result.status.kind, result.status.rank) == ("raised", rank)]
    origin = status.rank if status.rank in own_errors else sender

    error = failed[origin].value
    kind_and_text = type(error), str(error)
    equal_errors = [rank for rank in own_errors if (type(failed[rank].value), str(failed[rank].value)) == kind_and_text]
    none_in_particular = sender == origin and len(equal_errors) > 1
    mistake = _without_numbers(f"{type(error).__name__}: {error}")
    return Attempt(
        ranks, error, () if none_in_particular else (status.rank,), traceback=failed[origin].traceback, mistake=mistake
    )


def _attempt_with_lost_ranks(
    ranks: int, failed: Mapping[int, RankResult], cause: Sequence[RankStatus], witness: RankStatus | None
) -> Attempt:
    """Return the attempt that ended because the ranks in `cause` died, or do not answer; with the error of the `witness`."""
    failed_ranks = tuple(status.rank for status in cause if status.kind != "left")
    error, traceback = next(
        ((result.value, result.traceback) for result in failed.values() if result.status is witness), (None, "")
    )
    if not failed_ranks or failed_ranks[0] not in failed:
        if not isinstance(error, LostRankError):
            assert witness is not None
            error = LostRankError(f"rank {witness.rank} has lost the other ranks")
        return Attempt(ranks, error, failed_ranks, traceback=traceback)

    if witness is None or not isinstance(error, LostRankError) or not set(witness.peers) <= set(failed_ranks):
        text, traceback = _sentences(cause), ""
    elif error.wait:  # the traceback of a rank that waited says no more
        activities, traceback = dict(zip(error.ranks, error.activities, strict=True)), ""
        text = f"{_sentences([status._replace(activity=activities.get(status.rank, '')) for status in cause])}: {error.wait}"
    else:
        text = f"{error}; {_sentences(cause)}"
    mistake = _without_numbers(cause[0].sentence()) if cause[0].error else ""
    return Attempt(ranks, LostRankError(text), failed_ranks, traceback=traceback, mistake=mistake, died=True)


def _sentences(statuses: Sequence[RankStatus]) -> str:
    return "; ".join(status.sentence() for status in statuses)


def _without_numbers(text: str) -> str:
    """Return `text` with # for ranks and steps."""
    return re.sub(r"[0-9]+", "#", text)
