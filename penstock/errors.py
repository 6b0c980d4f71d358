"""The errors Penstock raises, one family; and the check of a whole number, which most calls begin with."""

from collections.abc import Iterable
from numbers import Integral
from typing import TypeGuard


class PenstockError(Exception):
    """The root of every error Penstock raises on purpose."""

    def __init__(self, text: object = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)  # of those raised on all ranks: where it began, as far as that is known


class ScheduleError(PenstockError, ValueError):
    """A schedule cannot be built, or its table cannot be proved."""


class MismatchError(PenstockError, ValueError):
    """Two things that must agree do not: ranks, shapes, dtypes, names, batch and microbatches."""


class StageError(PenstockError):
    """The model or the loss raised an exception while a rank ran an action."""


class NonFiniteError(StageError):
    """A watched step met a value that is NaN or infinite (`Pipeline(.., on_nonfinite=..)`); raised on all ranks at its end."""


class LostRankError(PenstockError):
    """A rank died, or did not answer within the timeout."""


class ResourceError(PenstockError):
    """A rank's own system refuses it something: a file descriptor, memory, addresses."""


def is_whole_number(value: object, least: float = float("-inf")) -> TypeGuard[int]:
    """Whether `value` is a whole number of `least` or more, numpy's too. True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
