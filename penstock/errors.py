"""The errors that Penstock raises, all subclasses of one; its warnings; and what many rooms check."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TypeGuard

_PACKAGE = str(Path(__file__).parent)


class PenstockError(Exception):
    """The base class of every error that Penstock raises on purpose."""

    def __init__(self, text: object = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)  # for an error that all ranks raise: the ranks where it began, if known


class ScheduleError(PenstockError, ValueError):
    """A schedule cannot be built, or its table cannot be proved."""


class MismatchError(PenstockError, ValueError):
    """Two things that must agree do not: ranks, shapes, dtypes, names, batch and microbatches."""


class StageError(PenstockError):
    """The model or the loss raised an exception."""


class NonFiniteError(StageError):
    """A step with `on_nonfinite=` found NaN or infinity."""


class LostRankError(PenstockError):
    """A rank died, or did not answer within the timeout."""

    wait = ""  # the wait that it ended, if one is known: `rank 1 waited for the output of 0F1 from rank 0`
    activities: Sequence[str] = ()  # of `ranks`, when they were last seen: `in 2F3 of step 17`


class ResourceError(PenstockError):
    """The system refused file descriptors, memory or addresses."""


def is_whole_number(value: object, minimum: float = float("-inf")) -> TypeGuard[int]:
    """Return whether `value` is an integer, numpy's too, of `minimum` or more. True and False are not."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= minimum


def require_equal(
    values: Sequence[object] | Mapping[int, object], problem: str, form: str = "has {}", advice: str = ""
) -> None:
    """Raise MismatchError, as `the ranks do not save alike: rank 0 has a, rank 2 has b`, unless all ranks' values are equal.

    `values`: by rank, the same on every rank, so that all raise. `problem`: `do not save alike`. `form`: of a rank's value.
    `advice`: ends the sentence.
    """
    if type(values) is list and values.count(values[0]) == len(values):  # the common case
        return
    value_of_rank = values if isinstance(values, Mapping) else dict(enumerate(values))
    first_rank, expected = next(iter(value_of_rank.items()))
    for rank, value in value_of_rank.items():
        if value != expected:
            difference = f"rank {first_rank} {form.format(expected)}, rank {rank} {form.format(value)}"
            raise MismatchError(f"the ranks {problem}: {difference}{advice}")


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """Return `2 stages`, or `1 stage`."""
    return f"{number} {noun}{ending * (number != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message that is not empty, or else the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that has called this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
