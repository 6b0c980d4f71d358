"""A better table than the one that is shown: searched for at its costs, within a limit on what each rank holds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Schedule, search, simulate, verify
from penstock.schedule.searching.search import Found
from penstock.view.data.timeline import Data

Tell = Callable[[Data], object]
MOST_SEARCHED = 2048  # stages times microbatches: some seconds


def better(schedule: Schedule, costs: Costs, limit: int | None, tell: Tell) -> Found:
    """The best table that a quick search finds for the stages of `schedule`, told on the way: {share, makespan}.

    `limit`: activations in flight on a rank, at most; None: what the ranks hold with `schedule`, each. Raises PenstockError
    for a table that is too large to search for.
    """
    if schedule.num_stages * schedule.microbatches > MOST_SEARCHED:
        raise ScheduleError(
            f"{schedule.num_stages} stages of {schedule.microbatches} microbatches are more than the studio searches for: "
            f"use {max(1, MOST_SEARCHED // schedule.num_stages)} microbatches or fewer, or `penstock search`"
        )

    def progress(share: float, makespan: float) -> None:
        tell({"share": share, "makespan": makespan})

    counted = replace(costs, act=1, keep=None)  # what is limited is a number of activations
    start = schedule if _runs(schedule) else None
    held = simulate(schedule, costs).peak_in_flight if start else None
    limits: int | Sequence[int] | None = limit or held
    return search(counted, schedule.placement, schedule.microbatches, limits, "quick", start=start, progress=progress)


def found_data(found: Found) -> Data:
    """What a search found, for the page to tell."""
    return {"makespan": found.makespan, "bound": found.bound, "because": found.bound_reason, "proven": found.proven}


def _runs(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True
