"""What became of each attempt of a launch, whether there is another, and the report of all of them."""

from collections.abc import Sequence
from textwrap import shorten
from typing import NamedTuple, TypeVar

from penstock.comms.starting.blame import Failure
from penstock.comms.starting.rank_main import LeftError
from penstock.errors import PenstockError

T = TypeVar("T")
LONGEST = 400  # characters of what ended an attempt


class Attempt(NamedTuple):
    """One start of all ranks, and what became of it. Times are those of `time.monotonic()`."""

    ranks: int
    began: float
    ended: float  # when its first rank failed, or its last one was done
    error: BaseException | None = None  # what ended it; None: it came to its end
    culprits: tuple[int, ...] = ()  # the ranks that failed by themselves; empty where it was nobody in particular
    steps_before: int | None = None  # that were done when it began; None: its ranks have run no step of a pipeline
    steps_done: int | None = None  # and when it ended
    new_step: float | None = None  # when a step was done that no attempt before had done


class Results(list[T]):
    """What a function returned on each rank, and the attempts it took."""

    def __init__(self, values: Sequence[T], attempts: Sequence[Attempt]) -> None:
        super().__init__(values)
        self.attempts = tuple(attempts)


def furthest(attempts: Sequence[Attempt]) -> int:
    """The steps that any of them has done."""
    return max((each.steps_done or 0 for each in attempts), default=0)


def is_final(attempts: Sequence[Attempt], failures: Sequence[Failure]) -> bool:
    """Whether another attempt would end like the last: the program wanted to exit, or fails by the same mistake again."""
    return isinstance(failures[-1].error, (SystemExit, LeftError)) or repeated(attempts, failures) > 0


def repeated(attempts: Sequence[Attempt], failures: Sequence[Failure]) -> int:
    """How many attempts, the last ones, failed by the same mistake of the program at the same step, as the next would; 0: none.

    An error that it raised twice is its own. A crash may come from outside: it has to come three times, and at a step.
    """
    needed, step = 3 if failures[-1].died else 2, attempts[-1].steps_done
    last = {(failure.kind, each.steps_done) for failure, each in zip(failures[-needed:], attempts[-needed:], strict=True)}
    known = failures[-1].kind and (step is not None or not failures[-1].died)
    return needed if known and len(last) == 1 and len(failures) >= needed else 0


def told(attempts: Sequence[Attempt]) -> str:
    """The report: a line for each attempt."""
    lines = [f"{len(attempts)} attempts:"]
    for number, each in enumerate(attempts):
        words = [f"{each.ranks} rank{'s' * (each.ranks != 1)}"]
        if each.steps_before is not None and each.steps_done is not None:
            words.append(f"steps {each.steps_before + 1} to {each.steps_done}")
        before = attempts[:number]
        if before and each.steps_before is not None:
            steps = max(0, furthest(before) - each.steps_before)
            words.append(f"{steps} step{'s' * (steps != 1)} lost")
        if before and each.new_step is not None:
            words.append(f"{each.new_step - _failure(before):.1f} s from the failure to the first new step")
        lines.append(f"  {number + 1}: {', '.join(words)}: {said(each)}")
    return "\n".join(lines)


def _failure(before: Sequence[Attempt]) -> float:
    """The moment of the failure after which no new step was done."""
    since = max((number for number, each in enumerate(before) if each.new_step is not None), default=0)
    return before[since].ended


def said(each: Attempt) -> str:
    """What ended an attempt, in a line."""
    if each.error is None:
        return "done"
    printable = "".join(letter if letter.isprintable() else " " for letter in str(each.error))
    text = shorten(printable, LONGEST) or type(each.error).__name__
    return text if isinstance(each.error, PenstockError) else f"{type(each.error).__name__}: {text}"
