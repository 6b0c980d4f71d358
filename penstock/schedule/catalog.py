"""The schedules there are, by name."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Schedule, loop_placement
from penstock.schedule.gpipe import gpipe
from penstock.schedule.naive import naive
from penstock.schedule.one_f_one_b import one_f_one_b


@dataclass(frozen=True)
class Family:
    """One rule that makes a table for any P and M, with what a reader wants to know before choosing it."""

    rule: Callable[[int, int, int], Iterator[Action]]  # (rank, P, M) -> the rank's actions
    needs: str  # what P, V and M must satisfy
    bubble: str  # idle time of a rank, T = its forward and backward of one microbatch, no send cost
    in_flight: str  # activations in flight on rank r

    @property
    def summary(self) -> str:
        """The first sentence of the rule's docstring."""
        return (self.rule.__doc__ or "").partition(".\n")[0].partition(": `")[0].strip()


FAMILIES: dict[str, Family] = {
    "naive": Family(naive, "any P, any M", "(P-1) M T", "1"),
    "gpipe": Family(gpipe, "any P, any M", "(P-1) T", "M"),
    "1f1b": Family(one_f_one_b, "any P, any M", "(P-1) T", "min(P-r, M)"),
}


def names() -> list[str]:
    """The names `build` knows."""
    return list(FAMILIES)


def build(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options: object) -> Schedule:
    """The table of schedule `name` for P = `ranks`, M = `microbatches` and V = `stages_per_rank`.

    Raises ScheduleError, with the nearest value that works, for a name, a number or an option it cannot build.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ScheduleError(f"unknown schedule {name!r}{did_you_mean(name, names())}: choose from {', '.join(names())}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{name} cannot be built with {what}={value!r}: use a whole number of 1 or more")
    if stages_per_rank not in (None, 1):
        raise ScheduleError(f"{name} has one stage on each rank, not stages_per_rank={stages_per_rank!r}: leave it out")
    if options:
        raise ScheduleError(f"{name} has no option {', '.join(sorted(options))}")
    rows = tuple(tuple(family.rule(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule(name, loop_placement(ranks, ranks), microbatches, rows)


def did_you_mean(text: str, choices: list[str]) -> str:
    """` (did you mean 1f1b?)` when a choice is near `text`, else nothing."""
    near = difflib.get_close_matches(str(text).lower().replace("_", "-"), choices, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
