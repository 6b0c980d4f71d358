"""The order of microbatches of unequal costs that makes a step short.

A pipeline is idle while it fills and drains; the first and last microbatches decide for how long. In any order an action
waits for the same others, so many orders are timed at once, in arrays with an entry for each: all orders of up to 7
microbatches; of more, four initial ones and then, in rounds, those that swap two microbatches of the best.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from math import factorial

import numpy as np

from penstock.plan.dependency_graph import Node, dependency_graph
from penstock.schedule.memory import ActivationSize, TeacherOutputs, changes_memory_at_end
from penstock.schedule.table import Kind, Table, actions_of
from penstock.timing.costs import UNIT_COSTS, Costs

MAX_EXACT_MICROBATCHES = 7  # 5040 orders: a few milliseconds
MAX_ROUNDS = 4  # more gain next to nothing
SEARCH_SHARE = 0.02  # of a step's time, at most, for the search of its order
SECONDS_PER_CELL, SECONDS_PER_CELL_AND_ORDER = 6e-6, 2.5e-8  # of one timing of many orders on a core of 2020, at most
MAX_SWAPS = 276  # of a round: all pairs of 24 microbatches
MIN_GAIN = 1e-9  # of a step; rounding differs by less


def plan_order(
    costs: Sequence[float],
    table: Table,
    stage_costs: Costs = UNIT_COSTS,
    sizes: Sequence[float] = (),
    limit: float | None = None,
    in_seconds: bool = False,
    teacher_outputs: TeacherOutputs | None = None,
) -> list[int]:
    """Return the order to run in: position in the step -> index of the microbatch. The given one, unless another is faster.

    `costs`: of each microbatch, in any unit, at most as many as `table` has; the time of every stage is proportional to it.
    `stage_costs`: of a microbatch of cost 1, or of each; messages cost nothing. `sizes`: of each microbatch. `limit`: the most
    that the microbatches in flight on a rank may take together, as `peak_in_flight` computes it with `teacher_outputs`. If no
    order that was tried keeps it, the one that takes least is returned.
    `in_seconds`: costs are in seconds, and the search takes at most 2 % of the step. If that is too short for any, the
    cheap microbatches run first and last.
    """
    held = None if limit is None else HeldSizes(table, sizes, teacher_outputs)
    timer = OrderTimer(costs, table, stage_costs, held, limit)
    seconds_to_prepare = timer.seconds_to_time(0)
    seconds_left = SEARCH_SHARE * timer.least_step_time - seconds_to_prepare if in_seconds else float("inf")
    if len(costs) <= MAX_EXACT_MICROBATCHES and timer.seconds_to_time(factorial(len(costs))) <= seconds_left:
        return timer.fastest_order(_all_orders(len(costs)))

    orders = _initial_orders(costs)
    seconds_left -= timer.seconds_to_time(orders.shape[1])
    if seconds_left < 0 and limit is None:
        return _cheap_outside(costs)
    return _swap_while_faster(timer.fastest_order(orders), timer, seconds_left)


def peak_in_flight(sizes: Sequence[float], table: Table, teacher_outputs: TeacherOutputs | None = None) -> list[float]:
    """Return for every rank the most that microbatches in flight take at once, in the unit of their `sizes`, in this order.

    On a rank with V stages that have a backward, an activation of one stage takes a V-th of its microbatch. `teacher_outputs`:
    those that wait for their losses count too, in the same unit.
    """
    held, order = HeldSizes(table, sizes, teacher_outputs), np.arange(len(sizes))[:, None]
    return [float(peak) for [peak] in held.peaks(order)]


class HeldSizes:
    """What microbatches take on each rank, in any order of them. Arguments as for `peak_in_flight`."""

    def __init__(self, table: Table, sizes: Sequence[float], teacher_outputs: TeacherOutputs | None) -> None:
        outputs = [0.0] * len(sizes) if teacher_outputs is None else teacher_outputs.sizes
        self._sizes, self._outputs = np.array(sizes, dtype=float), np.array(outputs, dtype=float)
        self._shares_of_ranks = _held_shares(table if teacher_outputs is None else teacher_outputs.table, len(sizes))

    def peaks(self, orders: np.ndarray) -> np.ndarray:
        """Return the most that each rank holds at once in each of `orders`: (microbatches, orders) -> (ranks, orders)."""
        held = np.concatenate([self._sizes[orders], self._outputs[orders]])
        return np.stack([(shares @ held).max(axis=0, initial=0.0) for shares in self._shares_of_ranks])


class OrderTimer:
    """A timer of a step in many orders of its microbatches at once. Arguments as for `plan_order`."""

    def __init__(
        self,
        costs: Sequence[float],
        table: Table,
        stage_costs: Costs = UNIT_COSTS,
        held: HeldSizes | None = None,
        limit: float | None = None,
    ) -> None:
        self._nodes = _nodes_of(table, len(costs))
        self._held, self._limit = held, limit
        stage_costs = replace(stage_costs, microbatch_factors=costs)
        by_microbatch = stage_costs.action_costs_by_microbatch(table.num_stages, len(costs))
        rows = {tuple(row): np.array(row) for stage_rows in by_microbatch.values() for row in stage_rows}
        self._cost_rows = list(rows.values())  # distinct, each with a cost for every microbatch
        numbers = dict(zip(rows, range(len(rows)), strict=True))
        self._row_numbers = {kind: [numbers[tuple(row)] for row in stage_rows] for kind, stage_rows in by_microbatch.items()}
        work = [[sum(by_microbatch[kind][stage]) for kind in (Kind.F, Kind.B)] for stage in range(table.num_stages)]
        self.least_step_time = max(sum(sum(work[stage]) for stage in table.stages_of(rank)) for rank in range(table.ranks))
        self._longest = sum(sum(row) for stage_rows in by_microbatch.values() for row in stage_rows)  # no step takes longer

    def seconds_to_time(self, num_orders: int) -> float:
        """Return the most seconds that `step_times` of `num_orders` takes."""
        return len(self._nodes) * (SECONDS_PER_CELL + num_orders * SECONDS_PER_CELL_AND_ORDER)

    def step_times(self, orders: np.ndarray) -> np.ndarray:
        """Return a step's time in each of `orders`, (microbatches, orders); longer than any step if the limit is not kept."""
        ends, costs = list[np.ndarray](), [row[orders] for row in self._cost_rows]
        for cell, previous, inputs in self._nodes:
            first, *rest = [costs[self._row_numbers[kind][stage]][microbatch] for _, (kind, stage, microbatch, _), *_ in cell]
            end = sum(rest, first)
            needs = [ends[number - 1] for number in (previous, *inputs) if number]
            ends.append(end + _elementwise_max(needs) if needs else end)
        end_of_rank = {node.cell[0].rank: end for node, end in zip(self._nodes, ends, strict=True)}
        times = _elementwise_max(list(end_of_rank.values()))
        if self._limit is None or self._held is None:
            return times
        peaks = self._held.peaks(orders).max(axis=0)
        return np.where(peaks <= self._limit, times, self._longest * peaks / self._limit)

    def fastest_order(self, orders: np.ndarray) -> list[int]:
        """Return the fastest order; the first one if the others gain nothing."""
        times = self.step_times(orders)
        best = int(times.argmin())
        order: list[int] = orders[:, best if times[best] < times[0] * (1 - MIN_GAIN) else 0].tolist()
        return order


def _elementwise_max(times: list[np.ndarray]) -> np.ndarray:
    latest = times[0]
    for time in times[1:]:
        latest = np.maximum(latest, time)
    return latest


def _initial_orders(costs: Sequence[float]) -> np.ndarray:
    """Return the given order, the one with the cheap microbatches outside, and those of rising and falling costs."""
    rising = _rising(costs)
    return np.array([list(range(len(costs))), _cheap_outside(costs), rising, rising[::-1]]).T


def _cheap_outside(costs: Sequence[float]) -> list[int]:
    """Return the order with the cheap microbatches first and last."""
    rising = _rising(costs)
    return [*rising[::2], *reversed(rising[1::2])]


def _rising(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (costs[index], index))


@lru_cache(MAX_EXACT_MICROBATCHES + 1)
def _all_orders(count: int) -> np.ndarray:
    """Return all orders of `count` microbatches, the given one first."""
    return np.array(list(permutations(range(count)))).T


def _swap_while_faster(order: list[int], timer: OrderTimer, seconds_left: float) -> list[int]:
    """Return `order` after the best swap of two microbatches in each round, while one gains and `seconds_left` last."""
    first, second = np.triu_indices(len(order), 1)
    stride = -(-len(first) // MAX_SWAPS)
    round_seconds = timer.seconds_to_time(1 + -(-len(first) // stride))
    for number in range(min(MAX_ROUNDS, int(max(0.0, min(MAX_ROUNDS * round_seconds, seconds_left)) / round_seconds))):
        rows, swap_rows = (part[number % stride :: stride] for part in (first, second))
        orders = np.repeat(np.array(order)[:, None], 1 + len(rows), axis=1)
        columns = np.arange(1, 1 + len(rows))
        orders[rows, columns], orders[swap_rows, columns] = orders[swap_rows, columns], orders[rows, columns]
        better = timer.fastest_order(orders)
        if better == order and stride == 1:
            break
        order = better
    return order


# ---- dependencies


@lru_cache(16)
def _nodes_of(table: Table, microbatches: int) -> list[Node]:
    """Return the dependencies of the first `microbatches` of a table, which are the same in every order of them."""
    return dependency_graph(_first_microbatches(table, microbatches))


@lru_cache(16)
def _held_shares(table: Table, microbatches: int) -> list[np.ndarray]:
    """Return for each rank (states, 2 x microbatches): the share of each microbatch that it holds, then 1 for each whose
    output of a teacher waits.
    """
    cut = _first_microbatches(table, microbatches)
    return [np.unique(_held_after_actions(cut, rank, microbatches), axis=0) for rank in range(table.ranks)]


def _held_after_actions(table: Table, rank: int, microbatches: int) -> np.ndarray:
    chains, size = table.chains, ActivationSize()
    loss_stage, teacher_end = table.num_trained_stages - 1, table.num_stages - 1
    with_backward = set(table.stages_of(rank)) - chains.forward_only
    actions = [action for cell in table.cells(rank) for action in sorted(actions_of(cell), key=changes_memory_at_end)]

    changes = np.zeros((len(actions), 2, microbatches))
    for (kind, stage, microbatch, _), (activation, output) in zip(actions, changes, strict=True):
        if stage in with_backward:
            activation[microbatch] = size.memory_change(kind)
        if kind is Kind.F and chains.loss_waits:
            output[microbatch] = (stage == teacher_end) - (stage == loss_stage)
    held = changes.cumsum(axis=0)
    held[:, 0] /= max(1, len(with_backward)) * table.slices
    return held.reshape(len(actions), 2 * microbatches)


def _first_microbatches(table: Table, microbatches: int) -> Table:
    """Return the table with only its first `microbatches`."""
    return table.filter_actions(lambda action: action.microbatch < microbatches) if microbatches < table.microbatches else table
