"""Group rows of different lengths into microbatches, each of which is padded to its longest row."""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.schedule.memory import format_bytes, parse_bytes

Cost = Callable[[int, int], float]  # (rows, length of the longest) -> seconds, or any unit
Limit = float | str | None  # of padded tokens; or of bytes, as "2GB"
LARGEST_COSTS_TRIED = 8


def group_rows(lengths: Sequence[int], microbatches: int, cost: Cost | None = None, limit: Limit = None) -> list[list[int]]:
    """Group rows into microbatches so that the pipeline's step is short. Return the row numbers of each microbatch.

        groups = ps.plan.group_rows([5, 120, 7, 118, 60, 6], microbatches=3)  # [[0, 2, 5], [1, 3], [4]]

    A rank computes for the sum of all microbatches' costs. While the pipeline fills and drains, it waits for about the largest
    of these costs. So (sum + largest) is minimised. Rows of similar length waste the least padding, so each group is a run of
    the rows sorted by length, and dynamic programming finds the best runs. Cheap groups come first and last, expensive ones in
    the middle, so that the pipeline fills and drains quickly.

    `lengths`: tokens of each row, at least 1. `microbatches`: the number of groups, none of them empty.
    `cost(rows, longest)`: returns the cost of a microbatch in any unit; by default its padded tokens, rows x longest.
    `limit`: the most padded tokens of a microbatch; or the most bytes of its activations on a rank, as "2GB", if `cost` is
    `pipe.plan_costs()`, or has a method `bytes(rows, longest)`. The result depends on these arguments alone.

    Raises MismatchError for fewer rows than microbatches, a length below 1, and a limit that cannot be kept.
    """
    size_limit = SizeLimit(limit, getattr(cost, "bytes", None))
    _check_lengths_and_limit(lengths, microbatches, size_limit)
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    ordered = [lengths[row] for row in order]
    costs = _group_cost_matrix(ordered, cost, size_limit)
    ends = _best_group_ends(costs, microbatches)
    if ends is None:
        raise MismatchError(
            f"{len(lengths)} rows do not fit into {microbatches} microbatches of at most {size_limit.format(size_limit.most)}: "
            f"give {_fewest_groups(costs)} microbatches or more, or a higher limit"
        )

    runs = list(zip([0, *ends], ends, strict=False))
    runs.sort(key=lambda run: (costs[run].item(), run))
    return [sorted(order[start:end]) for start, end in (*runs[::2], *reversed(runs[1::2]))]


class SizeLimit:
    """The limit on a microbatch: in padded tokens, or in bytes as `bytes_of(rows, longest)` returns them.

    Raises MismatchError for a `limit` that is neither, and for one in bytes without `bytes_of`.
    """

    def __init__(self, limit: Limit, bytes_of: Callable[[float, float], float] | None) -> None:
        amount = parse_bytes(limit) if isinstance(limit, str) else inf if limit is None else limit
        if not isinstance(amount, int | float) or not amount > 0:
            raise MismatchError(f"limit={limit!r}: give padded tokens, as 4096, or bytes, as '2GB', or None for no limit")
        self.most, self._bytes_of = amount, bytes_of if isinstance(limit, str) else None
        if isinstance(limit, str) and bytes_of is None:
            raise MismatchError(
                f"limit={limit!r} is in bytes, which pipe.plan_costs() measures: call it after a few steps over lists, for "
                "group_rows give its result as cost; or give the limit in padded tokens"
            )

    def size(self, rows: float, longest: float) -> float:
        """Return the size of a microbatch of `rows` padded to `longest` tokens, in the limit's unit."""
        return self._bytes_of(rows, longest) if self._bytes_of else rows * longest

    def format(self, size: float) -> str:
        """Return a size as text, with its unit."""
        return format_bytes(size) if self._bytes_of else f"{size:,.0f} padded tokens"


def _check_lengths_and_limit(lengths: Sequence[int], microbatches: int, limit: SizeLimit) -> None:
    if not 1 <= microbatches <= len(lengths):
        raise MismatchError(f"{len(lengths)} rows cannot be shared out over {microbatches} microbatches: each needs one")
    if min(lengths) < 1:
        raise MismatchError(f"row {lengths.index(min(lengths))} has length {min(lengths)}: a row has at least one token")
    if limit.size(1, max(lengths)) > limit.most:
        row, size = lengths.index(max(lengths)), limit.format(limit.size(1, max(lengths)))
        raise MismatchError(
            f"row {row} of length {max(lengths)} takes {size} alone, more than the limit of {limit.format(limit.most)} of a "
            "microbatch: shorten it, or give a higher limit"
        )


def _group_cost_matrix(lengths: Sequence[int], cost: Cost | None, limit: SizeLimit) -> Tensor:
    """Return the matrix whose entry [start, end] is the cost of the sorted rows start .. end - 1; inf above the limit."""
    costs = torch.full((len(lengths) + 1, len(lengths) + 1), inf, dtype=torch.float64, device="cpu")
    for end, longest in enumerate(lengths, 1):
        sizes = [(end - start, longest) for start in range(end)]
        column = [(cost(*size) if cost else size[0] * longest) if limit.size(*size) <= limit.most else inf for size in sizes]
        costs[:end, end] = costs.new_tensor(column)
    return costs


def _best_group_ends(costs: Tensor, groups: int) -> list[int] | None:
    """Return the ends of the `groups` runs for which (sum + largest) of their costs is least; None if nothing fits.

    First the runs with the least sum are found. Then the same is repeated for lower bounds on the largest cost.
    """

    def sum_and_largest(ends: list[int]) -> tuple[float, float]:
        run_costs = [costs[run].item() for run in zip([0, *ends], ends, strict=False)]
        return sum(run_costs) + max(run_costs), max(run_costs)

    best_ends = _cheapest_group_ends(costs, groups)
    if best_ends is None:
        return None
    least, largest_cost = sum_and_largest(best_ends)
    candidates = costs[costs < largest_cost].unique()
    last_row_alone = costs[-2, -1]
    candidates = candidates[candidates >= last_row_alone]
    for largest in candidates[:: max(1, -(-len(candidates) // LARGEST_COSTS_TRIED))].tolist():
        ends = _cheapest_group_ends(costs.where(costs <= largest, inf), groups)
        if ends is not None and (total := sum_and_largest(ends)[0]) < least:
            least, best_ends = total, ends
    return best_ends


def _cheapest_group_ends(costs: Tensor, groups: int) -> list[int] | None:
    """Return the ends of the `groups` runs with the least sum of costs; None if nothing fits."""
    total = torch.full_like(costs[0], inf)
    total[0] = 0
    starts = []
    for _ in range(groups):
        total, start = (total[:, None] + costs).min(dim=0)
        starts.append(start.tolist())
    if not torch.isfinite(total[-1]):
        return None

    ends, end = [], len(total) - 1
    for start in reversed(starts):
        ends.append(end)
        end = start[end]
    return ends[::-1]


def _fewest_groups(costs: Tensor) -> int:
    """Return the least number of runs that fit, by making each as long as possible."""
    groups, start, rows = 0, 0, len(costs) - 1
    while start < rows:
        start = int(torch.isfinite(costs[start]).nonzero().max())
        groups += 1
    return groups
