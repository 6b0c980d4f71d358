"""What became of one start of all ranks, and because of which: exit codes and own errors decide, over what others guess.

What ranks came to is given in the order in which it happened. A rank whose process is killed loses the pipe of its outcome
before it loses its connections, so its death is known before what others make of it.
"""

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple, TypeVar

from penstock.comms.launch.rank_main import EarlyExitError, RankResult
from penstock.errors import LostRankError, PenstockError

T = TypeVar("T")
UNGUARDED_EXIT_CODE = 86  # the exit code of a rank that launches ranks while it imports the program
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # no program does it to itself
LONGEST = 400  # characters of what ended an attempt


class RankDiedError(LostRankError):
    """A rank's process ended without an outcome."""

    def __init__(self, text: str, by_itself: bool = False) -> None:
        super().__init__(text)
        self.by_itself = by_itself  # a crash that may come again, not somebody's signal


class Attempt(NamedTuple):
    """One start of all ranks, and what became of it."""

    ranks: int
    error: BaseException | None = None  # what ended it; None: it came to its end
    culprits: tuple[int, ...] = ()  # the ranks that failed by themselves; empty where it was nobody in particular
    steps_done: int | None = None  # by the pipelines of its ranks; None: no rank has told of one
    traceback: str = ""  # of the error, on its rank
    mistake: str = ""  # the same where the program makes a mistake again, perhaps on other ranks; empty where it was none
    died: bool = False  # a rank has, without a word

    def end(self) -> str:
        """What ended it, in a line."""
        printable = "".join(letter if letter.isprintable() else " " for letter in str(self.error))
        text = shorten(printable, LONGEST) or type(self.error).__name__
        return text if isinstance(self.error, PenstockError) else f"{type(self.error).__name__}: {text}"


class LaunchResults(list[T]):
    """What a function returned on each rank, and the attempts it took."""

    def __init__(self, values: Sequence[T], attempts: Sequence[Attempt]) -> None:
        super().__init__(values)
        self.attempts = tuple(attempts)


def would_fail_again(attempts: Sequence[Attempt]) -> bool:
    """Whether another attempt would end like the last: the program wanted to exit, or fails by the same mistake again."""
    return isinstance(attempts[-1].error, SystemExit | EarlyExitError) or count_same_failures(attempts) > 0


def count_same_failures(attempts: Sequence[Attempt]) -> int:
    """How many attempts, the last ones, failed by the same mistake of the program at the same step, as the next would; 0: none.

    An error that it raised twice is its own. A crash may come from outside: it has to come three times, and at a step.
    """
    last = attempts[-1]
    needed = 3 if last.died else 2
    alike = {(each.mistake, each.steps_done) for each in attempts[-needed:]}
    known = last.mistake and (last.steps_done is not None or not last.died)
    return needed if known and len(alike) == 1 and len(attempts) >= needed else 0


def exit_error(rank: int, exitcode: int | None) -> PenstockError:
    """What ended the process of `rank`."""
    if exitcode == UNGUARDED_EXIT_CODE:
        where = "this program launches ranks wherever it is imported, and every rank imports it"
        return PenstockError(f'{where}: put what launches under `if __name__ == "__main__":`')
    if exitcode is not None and exitcode < 0:
        number = -exitcode
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(number, f"signal {number}")  # a real-time one has no name
        return RankDiedError(f"rank {rank} was killed by {name}", number not in FROM_OUTSIDE)
    return RankDiedError(f"rank {rank} ended with exit code {exitcode} before it was done", True)


def diagnose_attempt(ranks: int, outcomes: Mapping[int, RankResult]) -> Attempt:
    """The attempt whose `ranks` came to these `outcomes`, in this order.

    The first error counts. One that only says that others are lost does not, unless there is no other.
    """
    steps = max((each.steps_done for each in outcomes.values() if each.steps_done is not None), default=None)
    failed = {rank: outcome for rank, outcome in outcomes.items() if not outcome.well}
    first = next((rank for rank, outcome in failed.items() if not outcome.lost_others), None)
    if not failed:
        attempt = Attempt(ranks)
    elif first is None:
        attempt = _lost(ranks, failed, outcomes.keys())
    elif isinstance(failed[first].value, RankDiedError):
        attempt = _died(ranks, failed, first)
    else:
        attempt = _raised(ranks, failed, first)
    return attempt._replace(steps_done=steps)


def _raised(ranks: int, failed: Mapping[int, RankResult], first: int) -> Attempt:
    """A rank raised an error: its own, or that of another rank of which it had heard, which may have ended before."""
    named = failed[first].ranks
    origin = next((rank for rank in named if rank in failed and _is_own(failed[rank])), first)
    error = failed[origin].value
    text = type(error), str(error)
    alike = [rank for rank, each in failed.items() if (type(each.value), str(each.value)) == text and not each.ranks]
    culprits = named or (alike if len(alike) == 1 else ())  # if several have found the same, it is nobody's
    traceback = failed[alike[0] if alike else first].traceback
    return Attempt(ranks, error, tuple(culprits), traceback=traceback, mistake=_mistake(error))


def _is_own(outcome: RankResult) -> bool:
    """Whether a rank raised by itself what it failed with."""
    return not outcome.lost_others and not outcome.ranks and not isinstance(outcome.value, RankDiedError)


def _died(ranks: int, failed: Mapping[int, RankResult], first: int) -> Attempt:
    """Ranks died: the first, and those that were killed on their own; a rank may abort because another has gone."""
    error = failed[first].value
    others = {rank: each.value for rank, each in failed.items() if isinstance(each.value, RankDiedError) and rank != first}
    culprits = (first, *[rank for rank, each in others.items() if not each.by_itself])
    deaths = "; ".join(str(failed[rank].value) for rank in culprits)
    for each in failed.values():
        if isinstance(each.value, LostRankError) and each.lost_others and set(each.ranks) <= set(culprits):
            text, traceback = f"{each.value}; {deaths}", each.traceback
            break
    else:
        text, traceback = deaths, ""
    return Attempt(ranks, LostRankError(text), culprits, traceback=traceback, mistake=_mistake(error), died=True)


def _lost(ranks: int, failed: Mapping[int, RankResult], heard_of: Collection[int]) -> Attempt:
    """Ranks have lost others of which nothing is known: those are the culprits that are blamed and say nothing."""
    blamed = [rank for each in failed.values() for rank in each.ranks]
    silent = tuple(dict.fromkeys(rank for rank in blamed if rank not in heard_of))
    named = [each for each in failed.values() if isinstance(each.value, LostRankError)]
    if not named:
        first, outcome = next(iter(failed.items()))
        return Attempt(ranks, LostRankError(f"rank {first} has lost the other ranks"), silent, traceback=outcome.traceback)
    witness = next((each for each in named if set(each.ranks) & set(silent)), named[0])
    return Attempt(ranks, witness.value, silent, traceback=witness.traceback)


def _mistake(error: BaseException) -> str:
    if isinstance(error, RankDiedError) and not error.by_itself:
        return ""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
