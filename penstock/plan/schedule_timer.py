"""Time one table at many costs, and count what its ranks hold at once.

The rule is that of `simulate`, for tables without pairs, and several times as fast: the search times thousands of partitions
on one table. The final plan is timed by `simulate`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import ge
from random import Random

from penstock.plan.dependency_graph import dependency_graph
from penstock.schedule.memory import waiting_outputs
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Action, Kind
from penstock.schedule.transform import with_full_backwards

KINDS = tuple(Kind)  # F, B, I, W: the order of costs


class ScheduleTimer:
    """Computes the makespan of a proved table for given costs. `peak_counts`: the most microbatches that each rank holds.

    All costs are of whole microbatches; a slice takes an equal share of them, except for the delay of its messages.
    A rank's counts are rows of two numbers for each of its stages: microbatches from their F to their I or B, and from
    their I to their W; none of stages that have F only. The last number of a row is of a teacher's outputs that wait. A row is
    left out if another has at least as many everywhere.
    """

    def __init__(self, schedule: Schedule) -> None:
        table = with_full_backwards(schedule)  # as the engine runs it, and the two of a pair one after the other
        self.schedule = schedule = replace(table, overlaps=frozenset())
        self.placement, self.microbatches, self.slices = schedule.placement, schedule.microbatches, schedule.slices
        self.stages_of_rank = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
        self.operations = _operations_in_order(self.schedule)
        self.peak_counts = [_peak_activation_counts(schedule, rank) for rank in range(schedule.ranks)]
        self._work = [(sorted(Counter(map(self._cost_index, row)).items()), row[0], row[-1]) for row in schedule.actions]

    def _cost_index(self, action: Action) -> int:
        return KINDS.index(action.kind) * len(self.placement) + action.stage

    def makespan_lower_bound(self, costs: Sequence[float]) -> float:
        """Return a lower bound of `makespan`: a rank's work, plus what must run before its first and after its last action."""
        stages, costs = len(self.placement), self._costs_of_slice(costs)
        forwards, inputs = ([0.0, *accumulate(costs[first : first + stages])] for first in (0, 2 * stages))
        of_teacher = self.schedule.num_trained_stages

        def seconds_before(first: Action) -> float:
            return forwards[first.stage] - (forwards[of_teacher] if first.stage >= of_teacher else 0.0)

        def seconds_after(last: Action) -> float:
            if last.kind is Kind.F:
                return forwards[stages] - forwards[last.stage + 1] if last.stage >= of_teacher else 0.0
            return 0.0 if last.kind is Kind.W else inputs[last.stage]

        return max(
            seconds_before(first) + sum([count * costs[code] for code, count in counts]) + seconds_after(last)
            for counts, first, last in self._work
        )

    def makespan_with_jitter(
        self, costs: Sequence[float], message_delays: Sequence[float], jitter: float, random: Random
    ) -> float:
        """Return the makespan if every action randomly takes up to `jitter` more or less, as a share of its time."""
        ends, costs = [0.0], self._costs_of_slice(costs)
        for code, previous, needed, border in self.operations:
            start = max(ends[previous], ends[needed] + message_delays[border])
            ends.append(start + costs[code] * random.uniform(1 - jitter, 1 + jitter))
        return max(ends)

    def makespan(self, costs: Sequence[float], message_delays: Sequence[float], cores: float = math.inf) -> float:
        """Return the makespan. `costs`: of F of every stage, then of B, I, W. `message_delays`: over each border, then a 0.

        A border between two stages of one rank has no delay. While more ranks work than there are `cores`, all of them are
        slower in proportion.
        """
        ends, costs = [0.0], self._costs_of_slice(costs)
        add = ends.append
        for code, previous, needed, border in self.operations:
            free, arrival = ends[previous], ends[needed] + message_delays[border]
            add((free if free > arrival else arrival) + costs[code])
        return max(ends) if cores >= len(self.stages_of_rank) else self._makespan_on_shared_cores(ends[1:], costs, cores)

    def _costs_of_slice(self, costs: Sequence[float]) -> Sequence[float]:
        return costs if self.slices == 1 else [cost / self.slices for cost in costs]

    def _makespan_on_shared_cores(self, ends: Sequence[float], costs: Sequence[float], cores: float) -> float:
        changes = [(end, -1) for end in ends]
        changes += [(end - costs[code], 1) for (code, *_), end in zip(self.operations, ends, strict=True)]
        total = previous_time = 0.0
        working = 0
        for when, change in sorted(changes):
            total += (when - previous_time) * max(1.0, working / cores)
            previous_time, working = when, working + change
        return total


def _operations_in_order(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Return the actions in an order in which all can run, each as numbers of its cost, two actions, and a border.

    The two actions are the one before on the rank and the one whose message, over the border, it needs. Actions count from 1;
    0 stands for none, and the last border too.
    """
    stages, nodes = schedule.num_stages, dependency_graph(schedule)
    lines = []
    for (event,), previous, inputs in nodes:
        kind, stage, *_ = event.action
        needed, border = 0, stages - 1
        if inputs:
            needed = inputs[0]
            border = stage - 1 if kind is Kind.F else stage
        lines.append((KINDS.index(kind) * stages + stage, previous, needed, border))
    return lines


def _peak_activation_counts(schedule: Schedule, rank: int) -> list[tuple[float, ...]]:
    row, stages, slices, chains = schedule.actions[rank], schedule.stages_of(rank), schedule.slices, schedule.chains
    waiting = [0] * (1 + len(row)) if chains.teacher is None else waiting_outputs(row, chains)
    place = {stage: 2 * index for index, stage in enumerate(stages)}
    in_flight = [0] * (2 * len(stages))
    count_tuples = set()
    for number, ((kind, stage, *_), following) in enumerate(zip(row, [*row[1:], None], strict=True), 1):
        at = place[stage]
        if stage not in chains.forward_only:
            in_flight[at] += 1 if kind is Kind.F else -1 if kind in (Kind.B, Kind.I) else 0
            in_flight[at + 1] += 1 if kind is Kind.I else -1 if kind is Kind.W else 0
        is_peak = chains.teacher is not None or following is None or following.kind is not Kind.F  # else F holds more
        if kind is Kind.I or (kind is Kind.F and is_peak):  # after B or W less is held than before
            count_tuples.add((*in_flight, waiting[number]))
    fullest: list[tuple[float, ...]] = []
    for counts in sorted(count_tuples, reverse=True):  # none is above one that comes before it
        if not any(all(map(ge, fuller, counts)) for fuller in fullest):
            fullest.append(counts)
    return fullest if slices == 1 else [tuple(count / slices for count in counts) for counts in fullest]
