"""The waits that go when all stages take the same time: imbalance. Those that stay are made by the order of the table.

A stage's time is that of a forward and a full backward of one microbatch, on average, without overlapped pairs. In the step
with even stages each action is shorter or longer by its stage's factor, ranks run their rows in the same order, and messages
and the engine take as long as they did.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from statistics import fmean

from penstock.schedule.table import Action, Kind
from penstock.timing.events import TimelineEvents

ROUNDING = 1e-9  # of a time: sizes and waits that differ by less are equal


def imbalance_before_actions(step: TimelineEvents, between_fill_and_drain: Collection[Action]) -> dict[Action, float]:
    """Return action -> the part of the wait before it that is imbalance, in the time unit of `step`; no action with none.

    Together they are what the waits before the actions `between_fill_and_drain` lose with even stages, where some get longer.
    """
    sizes = _stage_sizes(step)
    mean = fmean(sizes.values()) if sizes else 0.0
    if not between_fill_and_drain or all(abs(size - mean) <= ROUNDING * mean for size in sizes.values()):
        return {}

    even_ends = _ends_with_even_stages(step, {stage: mean / size for stage, size in sizes.items() if size})
    waits, even_waits = (dict(_waits(step, ends)) for ends in ({event.action: event.end for event in step.events}, even_ends))
    savings = [(action, waits[action] - even_waits[action]) for action in between_fill_and_drain]
    longer = sum(saving for _, saving in savings if saving > 0)
    total = sum(saving for _, saving in savings)
    if total <= ROUNDING * step.makespan:
        return {}
    return {action: saving * total / longer for action, saving in savings if saving > ROUNDING * step.makespan}


def _stage_sizes(step: TimelineEvents) -> dict[int, float]:
    """Return stage -> its time for a microbatch; without a stage of which only pairs are known."""
    durations = defaultdict[tuple[Kind, int], list[float]](list)
    for cell in step.all_cells():
        if len(cell) == 1:
            durations[cell[0].action[:2]].append(cell[0].end - cell[0].start)
    means = {key: fmean(values) for key, values in durations.items()}

    forwards = {stage: time for (kind, stage), time in means.items() if kind is Kind.F}
    halves = {stage for kind, stage in means if kind is Kind.I and (Kind.W, stage) in means}
    backwards = {stage: means[Kind.I, stage] + means[Kind.W, stage] for stage in halves}
    backwards |= {stage: time for (kind, stage), time in means.items() if kind is Kind.B}
    parts = [part for part in (forwards, backwards) if part]
    return {
        stage: sum(part[stage] for part in parts) for stage in range(step.num_stages) if all(stage in part for part in parts)
    }


def _ends_with_even_stages(step: TimelineEvents, factors: Mapping[int, float]) -> dict[Action, float]:
    """Return when every action ends if those of each stage take `factors` times as long."""
    previous = {cell[0].action: earlier for rank in range(step.ranks) for earlier, cell in pairwise([(), *step.cells(rank)])}
    ends: dict[Action, float] = {}
    for cell in sorted(step.all_cells(), key=lambda cell: (cell[0].start, cell[0].end)):
        earlier = [*previous[cell[0].action], *step.remote_needs(cell)]
        known = [event for event in earlier if event.action in ends]  # a measured rank's clock may be behind
        ready = max((event.end for event in known), default=step.start)
        even_ready = max((ends[event.action] for event in known), default=step.start)

        factor = fmean(factors.get(event.action.stage, 1.0) for event in cell)
        duration = factor * (max(event.end for event in cell) - cell[0].start)
        for event in cell:
            ends[event.action] = even_ready + max(0.0, cell[0].start - ready) + duration
    return ends


def _waits(step: TimelineEvents, ends: Mapping[Action, float]) -> Iterator[tuple[Action, float]]:
    """Yield the first action of each cell, and how long its rank waits for actions on other ranks before it."""
    for rank in range(step.ranks):
        free = step.start
        for cell in step.cells(rank):
            needed = max((ends[event.action] for event in step.remote_needs(cell)), default=free)
            yield cell[0].action, max(0.0, needed - free)
            free = max(free, *(ends[event.action] for event in cell))
