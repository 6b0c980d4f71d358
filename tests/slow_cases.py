"""Which cases of a test `make test` runs, and which it leaves to `make slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test for all `cases`, with the mark `slow` on those that are not among the `quick` ones."""
    parameters = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*values, marks=[] if case in quick else [pytest.mark.slow]) for case, values in parameters]


def group_of(case: Any, quick: Collection[Any], cases: Iterable[Any]) -> tuple[Any, ...]:
    """Return the cases that run on ranks in one go with this one: the `quick` ones, or all the others."""
    return tuple(one for one in cases if (one in quick) == (case in quick))
