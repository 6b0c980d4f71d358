"""What a search is asked for, checked: the ranks of the stages, and how much memory each may take."""

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.searching.machine import TOLERANCE
from penstock.schedule.timing.simulate import Costs


def checked_placement(placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """`placement`, with a stage at least for each rank; raises ScheduleError for one that is none, or no microbatches."""
    homes = tuple(placement)
    if not homes or any(type(home) is not int for home in homes) or set(homes) != set(range(max(homes) + 1)):
        raise ScheduleError(f"placement={placement!r} is none: give the rank of every stage, each rank from 0 on at least one")
    if type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(f"microbatches={microbatches!r}: use a whole number of 1 or more")
    return homes


def checked_limits(limit: float | Sequence[float] | None, costs: Costs, placement: tuple[int, ...]) -> list[float]:
    """The limit of every rank; raises ScheduleError if one is too low for one microbatch, and says what that takes."""
    ranks = max(placement) + 1
    given = float("inf") if limit is None else limit
    limits = [float(given)] * ranks if isinstance(given, int | float) else [float(each) for each in given]
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
