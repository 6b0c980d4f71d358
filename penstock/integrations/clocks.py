"""Ranks' clocks lined up by their messages: none can be received before it was sent.

Messages from rank a to rank b say how far b's clock is ahead at most, those from b to a at least. Ranks of one machine share
a clock, so they are moved only where messages contradict it. Otherwise the middle is taken, as in NTP, and half of what lies
between may be wrong.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.schedule import Action
from penstock.schedule.table import dependencies

Interval = tuple[float, float]  # start and end of an action, on its rank's clock


class ClockOffsets(NamedTuple):
    """Seconds to add to every rank's times, and those by which that may be wrong."""

    offsets: tuple[float, ...]
    error: float


def clock_offsets(steps: Iterable[Sequence[Mapping[Action, Interval]]], hosts: Sequence[str]) -> ClockOffsets:
    """Return the offsets to rank 0's clock. `steps`: of each step, for every rank, when its actions ran."""
    lower_bounds = defaultdict[tuple[int, int], float](lambda: -math.inf)  # (a, b) -> offset of b less that of a
    for rows in steps:
        homes = {action: rank for rank, row in enumerate(rows) for action in row}
        stages = 1 + max((action.stage for action in homes), default=-1)
        for action, rank in homes.items():
            for needed in (needed for options in dependencies(action, stages) for needed in options if needed in homes):
                if homes[needed] != rank:
                    link = homes[needed], rank
                    lower_bounds[link] = max(lower_bounds[link], rows[link[0]][needed][1] - rows[rank][action][0])

    offsets, error, links = {0: 0.0}, 0.0, {*lower_bounds, *((target, source) for source, target in lower_bounds)}
    for source in (reached := [0]):  # which grows
        for target in sorted(end for start, end in links if start == source and end not in offsets):
            low, high = lower_bounds[source, target], -lower_bounds[target, source]
            same_host = hosts[source] == hosts[target]
            ahead = _ahead(low, high, same_host)
            offsets[target] = offsets[source] + ahead
            error = max(error, 0.0 if same_host and ahead == 0 else _error(low, high))
            reached.append(target)
    return ClockOffsets(tuple(offsets.get(rank, 0.0) for rank in range(len(hosts))), error)


def _ahead(low: float, high: float, same_host: bool) -> float:
    """The offset between two clocks that is at least `low` and at most `high`, where that can be."""
    if low > high or (not same_host and math.isfinite(low) and math.isfinite(high)):
        return (low + high) / 2
    return min(max(0.0, low), high)


def _error(low: float, high: float) -> float:
    return abs(high - low) / 2 if math.isfinite(low) and math.isfinite(high) else 0.0
