"""Why an attempt failed, and because of which ranks: exit codes and the ranks' own errors decide, over what others guess.

What ranks came to is given in the order in which it happened. A rank whose process is killed loses the pipe of its outcome
before it loses its connections, so its death is known before what others make of it.
"""

import re
import signal
from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.comms.starting.rank_main import Outcome
from penstock.errors import LostRankError, PenstockError

UNGUARDED = 86  # the exit code of a rank that launches ranks while it imports the program
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # no program does it to itself


class Died(LostRankError):
    """A rank's process ended without an outcome."""

    def __init__(self, text: str, by_itself: bool = False) -> None:
        super().__init__(text)
        self.by_itself = by_itself  # a crash that may come again, not somebody's signal


class Failure(NamedTuple):
    """Why an attempt failed."""

    error: BaseException
    culprits: tuple[int, ...]  # the ranks that failed by themselves; empty where it is nobody's fault in particular
    traceback: str = ""
    kind: str = ""  # failures of one kind are the same mistake of the program; empty where it was none
    died: bool = False


def death(rank: int, exitcode: int | None) -> PenstockError:
    """What ended the process of `rank`."""
    if exitcode == UNGUARDED:
        where = "this program launches ranks wherever it is imported, and every rank imports it"
        return PenstockError(f'{where}: put what launches under `if __name__ == "__main__":`')
    if exitcode is not None and exitcode < 0:
        number = -exitcode
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(number, f"signal {number}")  # a real-time one has no name
        return Died(f"rank {rank} was killed by {name}", number not in FROM_OUTSIDE)
    return Died(f"rank {rank} ended with exit code {exitcode} before it was done", True)


def blamed(outcomes: Mapping[int, Outcome]) -> Failure | None:
    """Why an attempt failed whose ranks came to these `outcomes`, in this order; None if all is well."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if not outcome.well}
    if not failed:
        return None
    first = next((rank for rank, outcome in failed.items() if not outcome.hearsay), None)
    if first is None:
        return _hearsay(failed, outcomes.keys())
    if isinstance(failed[first].value, Died):
        return _deaths(failed, first)
    told_of = failed[first].ranks
    theirs = next((rank for rank in told_of if rank in failed and _is_own(failed[rank])), first)
    error = failed[theirs].value  # in its own words: another rank, which had heard of it, may have ended before
    kind = type(error), str(error)
    alike = [rank for rank, each in failed.items() if (type(each.value), str(each.value)) == kind and not each.ranks]
    culprits = told_of or (alike if len(alike) == 1 else ())  # if several have found the same, it is nobody's
    return Failure(error, tuple(culprits), failed[alike[0] if alike else first].traceback, _kind(error))


def _is_own(outcome: Outcome) -> bool:
    """Whether a rank raised by itself what it failed with."""
    return not outcome.hearsay and not outcome.ranks and not isinstance(outcome.value, Died)


def _deaths(failed: Mapping[int, Outcome], first: int) -> Failure:
    """Ranks died: the first, and those that were killed on their own; a rank may abort because another has gone."""
    error = failed[first].value
    others = {rank: each.value for rank, each in failed.items() if isinstance(each.value, Died) and rank != first}
    culprits = (first, *[rank for rank, each in others.items() if not each.by_itself])
    told = "; ".join(str(failed[rank].value) for rank in culprits)
    for each in failed.values():
        if isinstance(each.value, LostRankError) and each.hearsay and set(each.ranks) <= set(culprits):
            return Failure(LostRankError(f"{each.value}; {told}"), culprits, each.traceback, _kind(error), died=True)
    return Failure(LostRankError(told), culprits, "", _kind(error), died=True)


def _hearsay(failed: Mapping[int, Outcome], heard_of: Collection[int]) -> Failure:
    """Ranks have lost others of which nothing is known: those are the culprits that are blamed and say nothing."""
    blame = [rank for each in failed.values() for rank in each.ranks]
    silent = tuple(dict.fromkeys(rank for rank in blame if rank not in heard_of))
    told = [each for each in failed.values() if isinstance(each.value, LostRankError)]
    if not told:
        first, outcome = next(iter(failed.items()))
        return Failure(LostRankError(f"rank {first} has lost the other ranks"), silent, outcome.traceback)
    witness = next((each for each in told if set(each.ranks) & set(silent)), told[0])
    return Failure(witness.value, silent, witness.traceback)


def _kind(error: BaseException) -> str:
    """What is the same where a program makes a mistake again, perhaps with other ranks."""
    if isinstance(error, Died) and not error.by_itself:
        return ""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
