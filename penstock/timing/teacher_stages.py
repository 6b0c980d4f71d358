"""Where the stages of a teacher lie: where the model's do, or in a V that begins and ends on the rank of the loss.

With as many stages as the model, on the same ranks, the loss's rank has nothing to run before its first input. In a V it has
the teacher's first stage, and works from the beginning: the rank that reads the inputs passes them on to it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Action, Cell, Kind, actions_of
from penstock.timing.costs import UNIT_COSTS, Costs
from penstock.timing.simulate import simulate
from penstock.timing.teacher_tables import v_of_teacher, with_teacher

LEAST_GAIN = 0.01  # of a step: a V has more messages
MAX_CACHED_TABLES = 32  # of all pipelines of a process
NUM_CELLS_EARLY = 2  # that a rank runs after it has passed on inputs, before they are needed


def teacher_ranks(
    schedule: Schedule, costs: Costs = UNIT_COSTS, forward_ratio: float = 1.0, max_stages: int | None = None
) -> tuple[int, ...]:
    """Return the rank of each stage of a teacher with which a step of `schedule` is shorter: the model's ranks, or a V.

    `costs`, `forward_ratio`: see `costs_with_teacher`. `max_stages`: that the teacher can be cut into. Compares steps that run
    the teacher ahead; of equal ones those that run it for their own losses.
    """
    same, v = schedule.placement, v_of_teacher(schedule.placement)
    if v == same or (max_stages is not None and len(v) > max_stages):
        return same
    for ahead in (True, False):
        with_same, with_v = (_makespan(schedule, placement, ahead, costs, forward_ratio) for placement in (same, v))
        if abs(with_v - with_same) > LEAST_GAIN * with_same:
            return same if with_same < with_v else v
    return same


def _makespan(schedule: Schedule, placement: tuple[int, ...], ahead: bool, costs: Costs, forward_ratio: float) -> float:
    costs_of_both = costs_with_teacher(costs, schedule.stages, len(placement), forward_ratio)
    if costs is UNIT_COSTS:
        return simulate(with_even_teacher(schedule, placement, ahead, forward_ratio), costs_of_both).makespan
    return simulate(with_teacher(schedule, placement, ahead, costs_of_both), costs_of_both).makespan


@lru_cache(MAX_CACHED_TABLES)  # a pipeline compares tables, then runs one, and the next pipeline often has equal ones
def with_even_teacher(schedule: Schedule, placement: tuple[int, ...], ahead: bool, forward_ratio: float) -> Schedule:
    """Return `with_teacher` by unit costs of the model, for a teacher of that `forward_ratio` that is cut evenly."""
    costs = costs_with_teacher(UNIT_COSTS, schedule.stages, len(placement), forward_ratio)
    return with_teacher(schedule, placement, ahead, costs)


def costs_with_teacher(costs: Costs, num_stages: int, num_teacher_stages: int, forward_ratio: float = 1.0) -> Costs:
    """Return the `costs` of a model's `num_stages` stages, and behind them those of a teacher that is cut evenly.

    `forward_ratio`: the time of the teacher's forward, in times the model's. Its messages are as the model's are on average.
    """
    forward = costs.action_costs(num_stages)[Kind.F]
    teacher_forward = forward_ratio * sum(forward) / num_teacher_stages

    def extend(cost: Any, teacher_cost: float | None = None) -> Any:
        if teacher_cost is None:
            return [*cost, *[fmean(cost or [0.0])] * num_teacher_stages] if isinstance(cost, Sequence) else cost
        return [*(cost if isinstance(cost, Sequence) else [cost] * num_stages), *[teacher_cost] * num_teacher_stages]

    return replace(
        costs,
        forward=extend(costs.forward, teacher_forward),
        backward_input=extend(costs.backward_input, 0.0),
        backward_weight=extend(costs.backward_weight, 0.0),
        backward=None if costs.backward is None else extend(costs.backward, 0.0),
        send=extend(costs.send),
        size=extend(costs.size),
        bandwidth=extend(costs.bandwidth),
        act=extend(costs.act, 0.0),
        keep=None if costs.keep is None else extend(costs.keep, 0.0),
    )


def with_passed_inputs(table: Schedule, costs: Costs = UNIT_COSTS) -> Schedule:
    """Return a table whose teacher begins on the rank that reads the inputs, with a stage there that passes them on.

    That stage becomes the teacher's first, and its others move up by one. `costs`: of `table`, whose order stays. A table whose
    teacher begins there is returned as it is.
    """
    first, reader = table.num_trained_stages, table.placement[0]
    if table.teacher is None or table.placement[first] == reader:
        return table
    rows = [[_with_later_teacher(cell, first) for cell in table.cells(rank)] for rank in range(table.ranks)]

    # Each microbatch's inputs leave some cells before the teacher begins with them.
    timeline = simulate(table, costs)
    needed = {event.action.microbatch: event.start for event in timeline.events if event.action.stage == first}
    starts = {event.action: event.start for event in timeline.rows[reader]}
    cell_starts = [starts[actions_of(cell)[0]] for cell in table.cells(reader)]
    for microbatch in reversed(range(table.microbatches)):
        num_before = sum(start < needed[microbatch] for start in cell_starts)
        rows[reader].insert(max(0, num_before - NUM_CELLS_EARLY), Action(Kind.F, first, microbatch))

    placement = (*table.placement[:first], reader, *table.placement[first:])
    return replace(table, placement=placement).with_cells(rows)


def _with_later_teacher(cell: Cell, first: int) -> Cell:
    """Return a cell with the teacher's stages, from `first` on, moved up by one."""
    moved = [action._replace(stage=action.stage + (action.stage >= first)) for action in actions_of(cell)]
    return moved[0] if isinstance(cell, Action) else (moved[0], moved[1])
