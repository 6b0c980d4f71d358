"""What a search is asked for, checked: numbers, the ranks of the stages, and how much memory each may take."""

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from penstock.errors import ScheduleError, is_whole_number
from penstock.schedule.searching.machine import INFINITE, TOLERANCE
from penstock.schedule.timing.simulate import Costs


def checked_whole(name: str, value: int, least: float) -> int:
    """`value`; raises ScheduleError if it is no whole number of `least` or more."""
    if not is_whole_number(value, least):
        raise ScheduleError(f"{name}={value!r}: use a whole number" + (f" of {least:g} or more" if least > -INFINITE else ""))
    return int(value)


def checked_placement(placement: Sequence[int]) -> tuple[int, ...]:
    """`placement`, with a stage at least for each rank; raises ScheduleError for one that is none."""
    homes = tuple(placement) if isinstance(placement, Iterable) else ()
    if not homes or not all(map(is_whole_number, homes)) or {*homes} != {*range(max(homes) + 1)}:
        raise ScheduleError(f"placement={placement!r} is none: give the rank of every stage, each rank from 0 on at least one")
    return tuple(map(int, homes))


def checked_limits(limit: float | Sequence[float] | None, costs: Costs, placement: tuple[int, ...]) -> list[float]:
    """The limit of every rank; raises ScheduleError if one is too low for one microbatch, and says what that takes."""
    ranks = max(placement) + 1
    given: Any = INFINITE if limit is None else limit
    try:
        limits = [float(given)] * ranks if isinstance(given, Real) else [each + 0.0 for each in given]
    except TypeError:
        raise ScheduleError(f"limit={limit!r}: give one number, or one for each rank") from None
    if len(limits) != ranks:
        raise ScheduleError(f"limit has {len(limits)} numbers for {ranks} ranks: give one number, or one for each rank")
    least = [0.0] * ranks
    for size, home in zip(costs.sizes(len(placement)), placement, strict=True):
        least[home] += size.act
    short = [rank for rank in range(ranks) if not least[rank] <= limits[rank] * (1 + TOLERANCE)]
    if short:
        told = ", ".join(f"rank {rank} {least[rank]:g} (limit {limits[rank]:g})" for rank in short)
        raise ScheduleError(f"no table keeps the limit: the activations of one microbatch take on {told}")
    return limits
