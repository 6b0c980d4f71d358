"""Cut a sequence of costs into stages so that the most expensive stage is as cheap as possible."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.errors import MismatchError, format_count

SECONDS, PARAMETERS = "seconds", "parameters"


def check_stage_count(num_layers: int, num_stages: int) -> None:
    """Raise MismatchError unless a model of so many layers can be cut into so many stages."""
    if not num_layers:
        raise MismatchError("the model has no layers: there is nothing to cut into stages")
    if not 1 <= num_stages <= num_layers:
        layers, stages = format_count(num_layers, "layer"), format_count(num_stages, "stage")
        most = f"1 to {num_layers} stages" if num_layers > 1 else "1 stage"
        raise MismatchError(f"cannot cut {layers} into {stages}: use {most}")


def balanced_starts(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return where each of `num_parts` consecutive, non-empty parts of `costs` starts, with the smallest bottleneck.

    Exactly: computed in whole numbers, of which every cost is a multiple. Among the cuts with that bottleneck, one with the
    smallest sum of squares, so that the other parts are even too; on a tie the earlier parts are the longer ones.

    The bottleneck is found by bisection: how far do parts of at most that cost reach? Then dynamic programming over (number of
    parts that follow, first cost of a part). The squares of parts within the bottleneck satisfy the quadrangle inequality, so
    the best end moves on with the start, and each layer takes O(n log n).
    Raises MismatchError for more parts than costs, and for costs that are negative or not finite.
    """
    check_stage_count(len(costs), num_parts)
    invalid = [cost for cost in costs if not 0 <= cost < math.inf]
    if invalid:
        raise MismatchError(f"a cost is a finite number of 0 or more, got {invalid[0]}")

    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    cumulative = [0, *accumulate(int(fraction * scale) for fraction in fractions)]
    return _most_even_starts(cumulative, num_parts, _bottleneck(cumulative, num_parts))


def _bottleneck(cumulative: Sequence[int], num_parts: int) -> int:
    """Return the smallest possible cost of the largest part; `cumulative[i]` is the cost of the first i items."""
    largest_item = max(end - start for start, end in pairwise(cumulative))
    low, high = max(largest_item, -(-cumulative[-1] // num_parts)), cumulative[-1]  # integers of any size
    while low < high:
        middle = (low + high) // 2
        is_enough = _furthest_ends(cumulative, num_parts, middle)[-1] == len(cumulative) - 1
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low


def _furthest_ends(cumulative: Sequence[int], num_parts: int, max_cost: int) -> list[int]:
    """Return how many items 0, 1, .. `num_parts` parts can hold if none costs more than `max_cost`."""
    ends = [0]
    for _ in range(num_parts):
        ends.append(bisect_right(cumulative, cumulative[ends[-1]] + max_cost) - 1)
    return ends


def _most_even_starts(cumulative: Sequence[int], num_parts: int, max_cost: int) -> list[int]:
    """Return the starts of the parts with the smallest sum of squares among those that cost at most `max_cost`."""
    num_items = len(cumulative) - 1
    # Bounds of a start: by the parts before it, and by the number of parts from it on.
    furthest, earliest = _furthest_ends(cumulative, num_parts, max_cost), [num_items]
    for _ in range(num_parts):
        earliest.append(bisect_left(cumulative, cumulative[earliest[-1]] - max_cost))

    # From the last part to the first: `squares[i]` is the smallest sum of the parts that start at i.
    squares, starts = [0] * (num_items + 1), range(num_items, num_items + 1)
    best_ends = []
    for num_following in range(num_parts):
        first = max(earliest[num_following + 1], num_parts - num_following - 1)
        last = min(furthest[num_parts - num_following - 1], num_items - num_following - 1)
        ends, starts = starts, range(first, last + 1)
        best, squares = _best_ends(cumulative, squares, starts, ends, max_cost)
        best_ends.append(best)

    result = [0]
    for best in reversed(best_ends[1:]):
        result.append(best[result[-1]])
    return result


def _best_ends(
    cumulative: Sequence[int], following: Sequence[int], starts: range, ends: range, max_cost: int
) -> tuple[list[int], list[int]]:
    """Return by start the last of the best `ends` of a part, and the sum of squares of it and of the parts `following`."""
    best, squares = [0] * len(cumulative), [0] * len(cumulative)
    # The middle start by trying every end; the best ends of the starts before it are not after its own, and vice versa.
    todo = [(starts, ends[0], ends[-1])]
    while todo:
        starts, low, high = todo.pop()
        if starts:
            middle = len(starts) // 2
            start = starts[middle]
            first = max(low, start + 1)
            stop = min(high + 1, bisect_right(cumulative, cumulative[start] + max_cost))
            candidates = zip(cumulative[first:stop], following[first:stop], strict=True)
            sums = [(end - cumulative[start]) ** 2 + following_sum for end, following_sum in candidates]
            squares[start] = min(sums)
            best[start] = end = stop - 1 - sums[::-1].index(squares[start])
            todo += [(starts[:middle], low, end), (starts[middle + 1 :], end, high)]
    return best, squares


@dataclass(frozen=True)
class Balance:
    """How evenly a sequence of named units is cut into stages; `print` it."""

    names: tuple[str, ...]  # of the units, in order
    costs: tuple[float, ...]  # of the units
    starts: tuple[int, ...]  # the first unit of every stage
    cost_kind: str = SECONDS  # SECONDS of forward and backward for a microbatch, or PARAMETERS: of frozen ones a part counts

    @classmethod
    def best(cls, names: Sequence[str], costs: Sequence[float], stages: int, cost_kind: str = SECONDS) -> "Balance":
        """Return the cut into `stages` stages with the smallest bottleneck. Raises MismatchError as `balanced_starts`."""
        return cls(tuple(names), tuple(costs), tuple(balanced_starts(costs, stages)), cost_kind)

    @cached_property
    def stage_costs(self) -> tuple[float, ...]:
        """The cost of every stage."""
        return tuple(math.fsum(self.costs[start:end]) for start, end in self.ranges())

    @property
    def bottleneck(self) -> float:
        """The cost of the most expensive stage."""
        return max(self.stage_costs)

    @property
    def lower_bound(self) -> float:
        """A lower bound of the bottleneck of any cut into as many stages: an even share, or the most expensive unit."""
        return max(math.fsum(self.costs) / len(self.starts), *self.costs)

    def __str__(self) -> str:
        """A line for each stage, the bottleneck, and its lower bound."""
        units = ["..".join(dict.fromkeys((self.names[start], self.names[end - 1]))) for start, end in self.ranges()]
        costs = [self._format(cost) for cost in self.stage_costs]
        units_width, costs_width = max(map(len, units)), max(map(len, costs))
        lines = [f"stage {stage:<3}{units[stage]:<{units_width}}  {costs[stage]:>{costs_width}}" for stage in range(len(units))]
        share = self.lower_bound / self.bottleneck if self.bottleneck else 1.0
        slowest = f"{'slowest' if self.cost_kind == SECONDS else 'largest'} stage {self._format(self.bottleneck)}"
        return "\n".join([*lines, f"{slowest}, no cut can be below {self._format(self.lower_bound)} ({share:.1%} of it)"])

    def ranges(self) -> list[tuple[int, int]]:
        """Return the units of each stage, as (first, end)."""
        return list(pairwise((*self.starts, len(self.costs))))

    def _format(self, cost: float) -> str:
        return f"{1000 * cost:.3f} ms" if self.cost_kind == SECONDS else f"{cost:,.0f} {self.cost_kind}"
