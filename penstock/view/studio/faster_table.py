"""Search for a faster table than the one shown, at its costs, within a limit of activations on each rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.plan.search.table_search import Found
from penstock.schedule import Costs, Schedule, search, simulate, verify
from penstock.schedule.table import Kind
from penstock.view.data.timeline_data import Data

ReportProgress = Callable[[Data], object]
MAX_STAGES_TIMES_MICROBATCHES = 2048  # a search takes some seconds


def find_better(schedule: Schedule, costs: Costs, limit: int | None, report: ReportProgress) -> Found:
    """Return the best table that a quick search finds for the stages of `schedule`; `report` gets {share, makespan}.

    `limit`: most activations in flight on a rank; None: as many on each rank as with `schedule`. Raises ScheduleError for a
    table that is too large.
    """
    if schedule.num_stages * schedule.microbatches > MAX_STAGES_TIMES_MICROBATCHES:
        raise ScheduleError(
            f"{schedule.num_stages} stages of {schedule.microbatches} microbatches are more than the studio searches for: "
            f"use {max(1, MAX_STAGES_TIMES_MICROBATCHES // schedule.num_stages)} microbatches or fewer, or `penstock search`"
        )

    def progress(share: float, makespan: float) -> None:
        report({"share": share, "makespan": makespan})

    unit_costs = replace(costs, act=1, keep=None)  # the limit counts activations
    if costs.is_ragged:  # costs for each microbatch, so that factors do not change the sizes of activations
        seconds = costs.action_costs_by_microbatch(schedule.num_stages, schedule.microbatches)
        forward, backward, inputs, weights = (seconds[kind] for kind in Kind)
        unit_costs = replace(
            unit_costs,
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            backward=backward,
            microbatch_factors=(),
        )
    start = schedule if _is_valid(schedule) else None
    peaks = simulate(schedule, costs).peak_in_flight if start else None
    limits: float | Sequence[float] | None = limit or peaks
    return search(
        unit_costs,
        schedule.placement,
        schedule.microbatches,
        limits,
        "quick",
        start=start,
        progress=progress,
        teacher=schedule.teacher,
        ahead=schedule.ahead,
    )


def found_data(result: Found) -> Data:
    """Return the result of a search as data for the page."""
    return {"makespan": result.makespan, "bound": result.bound, "because": result.bound_reason, "proven": result.proven}


def _is_valid(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True
