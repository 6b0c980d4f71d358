"""Balance: a line of costs cut so that the dearest stage is as cheap as any cut can make it."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.errors import MismatchError

SECONDS, PARAMETERS = "seconds", "parameters"


def balanced_starts(costs: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` consecutive, non-empty parts of `costs` starts, so that the dearest is as cheap as possible.

    Exactly: computed in whole numbers, of which every cost is a multiple. Among the cuts with that bottleneck, one with
    the smallest sum of squares, so that the rest is even too; on a tie the earlier parts are the longer ones.

    The bottleneck is found by bisection (how far parts of at most that cost reach). Then dynamic programming over (parts
    that follow, first cost of a part): the squares of parts no dearer than the bottleneck satisfy the quadrangle
    inequality, so the best end moves on with the start and each layer takes O(n log n).
    Raises MismatchError for more parts than costs, and for costs that are negative or not finite.
    """
    if not 1 <= parts <= len(costs):
        raise MismatchError(f"cannot cut {len(costs)} layers into {parts} stages: use 1 to {len(costs)} stages")
    wrong = [cost for cost in costs if not 0 <= cost < math.inf]
    if wrong:
        raise MismatchError(f"a cost is a finite number of 0 or more, got {wrong[0]}")
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    total = [0, *accumulate(int(fraction * scale) for fraction in fractions)]
    return _evenest(total, parts, _bottleneck(total, parts))


def _bottleneck(total: Sequence[int], parts: int) -> int:
    """The smallest cost of the dearest of `parts` parts; `total[i]` is what the first i items cost."""
    dearest = max(end - start for start, end in pairwise(total))
    low, high = max(dearest, -(-total[-1] // parts)), total[-1]  # whole numbers of any size
    while low < high:
        middle = (low + high) // 2
        enough = _reached(total, parts, middle)[-1] == len(total) - 1
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _reached(total: Sequence[int], parts: int, most: int) -> list[int]:
    """How many items 0, 1, .. `parts` parts can hold if none may cost more than `most`."""
    ends = [0]
    for _ in range(parts):
        ends.append(bisect_right(total, total[ends[-1]] + most) - 1)
    return ends


def _evenest(total: Sequence[int], parts: int, most: int) -> list[int]:
    """The starts of the parts with the smallest sum of squares of which none costs more than `most`."""
    count = len(total) - 1
    furthest, earliest = _reached(total, parts, most), [count]  # starts: with the parts before, with those that follow
    for _ in range(parts):
        earliest.append(bisect_left(total, total[earliest[-1]] - most))
    squares, starts = [0] * (count + 1), range(count, count + 1)  # the smallest sums, by where the parts that follow start
    best_ends = []
    for rest in range(parts):  # `rest` parts follow this one
        first, last = max(earliest[rest + 1], parts - rest - 1), min(furthest[parts - rest - 1], count - rest - 1)
        ends, starts = starts, range(first, last + 1)
        best, squares = _best_ends(total, squares, starts, ends, most)
        best_ends.append(best)
    found = [0]
    for best in reversed(best_ends[1:]):
        found.append(best[found[-1]])
    return found


def _best_ends(
    total: Sequence[int], after: Sequence[int], starts: range, ends: range, most: int
) -> tuple[list[int], list[int]]:
    """By start: the last of the best `ends` of a part, and the sum of squares of it and of what comes `after`."""
    best, squares = [0] * len(total), [0] * len(total)
    todo = [(starts, ends[0], ends[-1])]
    while todo:  # the middle start by trying every end; the starts on its two sides have theirs on the same sides
        starts, low, high = todo.pop()
        if starts:
            middle = len(starts) // 2
            start = starts[middle]
            begin, until = max(low, start + 1), min(high + 1, bisect_right(total, total[start] + most))
            sums = [(end - total[start]) ** 2 + rest for end, rest in zip(total[begin:until], after[begin:until], strict=True)]
            squares[start] = min(sums)
            best[start] = end = until - 1 - sums[::-1].index(squares[start])
            todo += [(starts[:middle], low, end), (starts[middle + 1 :], end, high)]
    return best, squares


@dataclass(frozen=True)
class Balance:
    """How evenly a line of named units is cut into stages; `print` it."""

    names: tuple[str, ...]  # of the units, in order
    costs: tuple[float, ...]  # of the units
    starts: tuple[int, ...]  # the first unit of every stage
    cost_kind: str = SECONDS  # what the costs count: SECONDS of forward and backward for a microbatch, or PARAMETERS

    @classmethod
    def best(cls, names: Sequence[str], costs: Sequence[float], stages: int, what: str = SECONDS) -> "Balance":
        """The cut into `stages` stages whose dearest stage is the cheapest. Raises MismatchError as `starts`."""
        return cls(tuple(names), tuple(costs), tuple(balanced_starts(costs, stages)), what)

    @cached_property
    def stage_costs(self) -> tuple[float, ...]:
        """What every stage costs."""
        return tuple(math.fsum(self.costs[start:end]) for start, end in self._ranges())

    @property
    def bottleneck(self) -> float:
        """What the dearest stage costs."""
        return max(self.stage_costs)

    @property
    def lower_bound(self) -> float:
        """What no cut into as many stages can be below: an even share of all, and the dearest unit."""
        return max(math.fsum(self.costs) / len(self.starts), *self.costs)

    def __str__(self) -> str:
        """A line for each stage, what the slowest costs, and what no cut can be below."""
        spans = ["..".join(dict.fromkeys((self.names[start], self.names[end - 1]))) for start, end in self._ranges()]
        told = [self._told(cost) for cost in self.stage_costs]
        wide, right = max(map(len, spans)), max(map(len, told))
        lines = [f"stage {stage:<3}{spans[stage]:<{wide}}  {told[stage]:>{right}}" for stage in range(len(spans))]
        share = self.lower_bound / self.bottleneck if self.bottleneck else 1.0
        slowest = f"{'slowest' if self.cost_kind == SECONDS else 'largest'} stage {self._told(self.bottleneck)}"
        return "\n".join([*lines, f"{slowest}, no cut can be below {self._told(self.lower_bound)} ({share:.1%} of it)"])

    def _ranges(self) -> list[tuple[int, int]]:
        return list(pairwise((*self.starts, len(self.costs))))

    def _told(self, cost: float) -> str:
        return f"{1000 * cost:.3f} ms" if self.cost_kind == SECONDS else f"{cost:,.0f} {self.cost_kind}"
