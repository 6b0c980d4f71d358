"""Align the clocks of ranks by their messages: none can be received before it was sent.

Messages from rank a to rank b bound the offset of b's clock on one side, messages from b to a on the other. Ranks of one
machine share a clock: their offset is 0 unless messages contradict it. For other ranks the middle of both bounds is taken, as
in NTP, with an error of half their distance.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.schedule import Action
from penstock.schedule.table import dependencies

Interval = tuple[float, float]  # start and end of an action, on its rank's clock


class ClockOffsets(NamedTuple):
    """Seconds to add to every rank's times, and the largest error of the offsets, in seconds."""

    offsets: tuple[float, ...]
    error: float


def clock_offsets(steps: Iterable[Sequence[Mapping[Action, Interval]]], hosts: Sequence[str]) -> ClockOffsets:
    """Return the offsets to rank 0's clock. `steps`: for each step and rank, when its actions ran."""
    lower_bounds = defaultdict[tuple[int, int], float](lambda: -math.inf)  # (a, b) -> offset of b minus offset of a
    for rows in steps:
        rank_of = {action: rank for rank, row in enumerate(rows) for action in row}
        stages = 1 + max((action.stage for action in rank_of), default=-1)
        for action, rank in rank_of.items():
            for earlier in (earlier for options in dependencies(action, stages) for earlier in options if earlier in rank_of):
                if rank_of[earlier] != rank:
                    link = rank_of[earlier], rank
                    lower_bounds[link] = max(lower_bounds[link], rows[link[0]][earlier][1] - rows[rank][action][0])

    offsets, error, links = {0: 0.0}, 0.0, {*lower_bounds, *((target, source) for source, target in lower_bounds)}
    for source in (reached := [0]):  # grows inside the loop
        for target in sorted(end for start, end in links if start == source and end not in offsets):
            low, high = lower_bounds[source, target], -lower_bounds[target, source]
            same_host = hosts[source] == hosts[target]
            offset = _likeliest_offset(low, high, same_host)
            offsets[target] = offsets[source] + offset
            error = max(error, 0.0 if same_host and offset == 0 else _error(low, high))
            reached.append(target)
    return ClockOffsets(tuple(offsets.get(rank, 0.0) for rank in range(len(hosts))), error)


def _likeliest_offset(low: float, high: float, same_host: bool) -> float:
    """Return the likeliest offset between `low` and `high` of two clocks; their middle if low > high."""
    if low > high or (not same_host and math.isfinite(low) and math.isfinite(high)):
        return (low + high) / 2
    return min(max(0.0, low), high)


def _error(low: float, high: float) -> float:
    return abs(high - low) / 2 if math.isfinite(low) and math.isfinite(high) else 0.0
