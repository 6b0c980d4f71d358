"""The outcome of one attempt (one start of all ranks), and which ranks failed by themselves.

Exit codes and a rank's own errors count more than reports of ranks about each other. Results of ranks are in the order in which
they arrived: the pipe of a killed rank closes before its connections do, so its death is known before the errors that it causes
on other ranks.
"""

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple, TypeVar

from penstock.errors import LostRankError, PenstockError
from penstock.launcher.rank_main import EarlyExitError, RankResult

T = TypeVar("T")
UNGUARDED_EXIT_CODE = 86  # of a rank that would launch ranks while it imports the program
SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # not caused by a crash
MAX_ERROR_CHARACTERS = 400


class RankDiedError(LostRankError):
    """The process of a rank ended without a result.

    `crashed`: True for a crash, which may happen again; False for a signal from outside.
    """

    def __init__(self, text: str, crashed: bool = False) -> None:
        super().__init__(text)
        self.crashed = crashed


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


def exit_error(rank: int, exitcode: int | None) -> PenstockError:
    """Return the error for the process of `rank`, which ended with `exitcode` and without a result."""
    if exitcode == UNGUARDED_EXIT_CODE:
        problem = "this program launches ranks wherever it is imported, and every rank imports it"
        return PenstockError(f'{problem}: put what launches under `if __name__ == "__main__":`')
    if exitcode is not None and exitcode < 0:
        number = -exitcode
        names = {known_signal.value: known_signal.name for known_signal in signal.Signals}
        name = names.get(number, f"signal {number}")  # a real-time signal has no name
        return RankDiedError(f"rank {rank} was killed by {name}", crashed=number not in SIGNALS_FROM_OUTSIDE)
    return RankDiedError(f"rank {rank} ended with exit code {exitcode} before it was done", crashed=True)


def diagnose_attempt(ranks: int, results: Mapping[int, RankResult]) -> Attempt:
    """Return the attempt whose ranks had these `results` (rank -> result, in the order in which they arrived).

    | the first rank that failed, and not because others are lost | the attempt's error                           |
    |---------------------------------------------------------------|-----------------------------------------------|
    | raised an error                                               | that error, or the one that it names as origin |
    | died                                                          | LostRankError with its death                  |
    | there is none                                                 | LostRankError with the ranks that sent nothing |
    """
    steps = max((result.steps_done for result in results.values() if result.steps_done is not None), default=None)
    failed = {rank: result for rank, result in results.items() if not result.succeeded}
    first_rank = next((rank for rank, result in failed.items() if not result.lost_others), None)
    if not failed:
        attempt = Attempt(ranks)
    elif first_rank is None:
        attempt = _attempt_with_lost_ranks(ranks, failed, results.keys())
    elif isinstance(failed[first_rank].value, RankDiedError):
        attempt = _attempt_with_dead_ranks(ranks, failed, first_rank)
    else:
        attempt = _attempt_with_error(ranks, failed, first_rank)
    return attempt._replace(steps_done=steps)


def _attempt_with_error(ranks: int, failed: Mapping[int, RankResult], first_rank: int) -> Attempt:
    """Return the attempt in which `first_rank` raised an error: its own, or that of a rank that its error names."""
    origins = failed[first_rank].ranks
    origin = next((rank for rank in origins if rank in failed and _raised_own_error(failed[rank])), first_rank)
    error = failed[origin].value

    kind_and_text = type(error), str(error)
    ranks_with_same_error = [
        rank for rank, result in failed.items() if (type(result.value), str(result.value)) == kind_and_text and not result.ranks
    ]
    # If several raised the same, no rank in particular failed.
    failed_ranks = origins or (ranks_with_same_error if len(ranks_with_same_error) == 1 else ())
    traceback = failed[ranks_with_same_error[0] if ranks_with_same_error else first_rank].traceback
    return Attempt(ranks, error, tuple(failed_ranks), traceback=traceback, mistake=_error_without_numbers(error))


def _raised_own_error(result: RankResult) -> bool:
    return not result.lost_others and not result.ranks and not isinstance(result.value, RankDiedError)


def _attempt_with_dead_ranks(ranks: int, failed: Mapping[int, RankResult], first_rank: int) -> Attempt:
    """Return the attempt in which `first_rank` died.

    Other ranks that were killed by a signal have failed too. A rank that crashed may have done so because a rank was gone.
    """
    error = failed[first_rank].value
    deaths = {rank: result.value for rank, result in failed.items() if isinstance(result.value, RankDiedError)}
    failed_ranks = (first_rank, *[rank for rank, death in deaths.items() if rank != first_rank and not death.crashed])
    causes = "; ".join(str(failed[rank].value) for rank in failed_ranks)

    text, traceback = causes, ""
    for result in failed.values():
        blames_them = result.lost_others and set(result.ranks) <= set(failed_ranks)
        if isinstance(result.value, LostRankError) and blames_them:
            text, traceback = f"{result.value}; {causes}", result.traceback
            break
    return Attempt(
        ranks, LostRankError(text), failed_ranks, traceback=traceback, mistake=_error_without_numbers(error), died=True
    )


def _attempt_with_lost_ranks(ranks: int, failed: Mapping[int, RankResult], ranks_with_result: Collection[int]) -> Attempt:
    """Return the attempt in which all errors say that other ranks are lost. Of these ranks, those without a result failed."""
    blamed = [rank for result in failed.values() for rank in result.ranks]
    silent = tuple(dict.fromkeys(rank for rank in blamed if rank not in ranks_with_result))
    witnesses = [result for result in failed.values() if isinstance(result.value, LostRankError)]
    if not witnesses:
        first_rank, result = next(iter(failed.items()))
        return Attempt(ranks, LostRankError(f"rank {first_rank} has lost the other ranks"), silent, traceback=result.traceback)
    witness = next((result for result in witnesses if set(result.ranks) & set(silent)), witnesses[0])
    return Attempt(ranks, witness.value, silent, traceback=witness.traceback)


def _error_without_numbers(error: BaseException) -> str:
    """Return the error as text in which ranks and steps are replaced by #; empty for a signal from outside."""
    if isinstance(error, RankDiedError) and not error.crashed:
        return ""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
