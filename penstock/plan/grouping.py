"""Group rows of different lengths into microbatches, each of which is padded to its longest row."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import inf

from penstock.errors import MismatchError
from penstock.schedule.memory import format_bytes, parse_bytes

Cost = Callable[[int, int], float]  # (rows, length of the longest) -> seconds, or any unit
Limit = float | str | None  # of padded tokens; or of bytes, as "2GB"
MIN_BAR_ROWS = 100_000


def group_rows(lengths: Sequence[int], microbatches: int, cost: Cost | None = None, limit: Limit = None) -> list[list[int]]:
    """Group rows into microbatches so that the pipeline's step is short. Return the row numbers of each microbatch.

        groups = ps.plan.group_rows([5, 120, 7, 118, 60, 6], microbatches=3)  # [[0, 2, 5], [1, 3], [4]]

    A rank computes for the sum of all microbatches' costs. While the pipeline fills and drains, it waits for about the largest
    of these costs. So (sum + largest) is minimised. Rows of similar length waste the least padding, so each group is a run of
    the rows sorted by length, and dynamic programming finds the best runs: of up to 512 rows exactly, of more within about one
    per cent, 20,000 rows in a second. Cheap groups come first and last, expensive ones in the middle, so that the pipeline
    fills and drains quickly.

    `lengths`: tokens of each row, at least 1. `microbatches`: the number of groups, none of them empty.
    `cost(rows, longest)`: returns the cost of a microbatch in any unit; by default its padded tokens, rows x longest.
    `limit`: the most padded tokens of a microbatch; or the most bytes of its activations on a rank, as "2GB", if `cost` is
    `pipe.plan_costs()`, or has a method `bytes(rows, longest)`. The result depends on these arguments alone.

    Raises MismatchError for fewer rows than microbatches, a length below 1, a cost of NaN, and a limit that cannot be kept.
    """
    from penstock.plan.group_search import RunCosts, best_group_ends  # imports numpy, which a pipeline without groups needs not

    lengths = list(map(int, lengths))
    size_limit = MicrobatchLimit(limit, getattr(cost, "bytes", None))
    _check_lengths_and_limit(lengths, microbatches, size_limit)

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs = RunCosts([lengths[row] for row in order], *_cost_within_limit(cost, size_limit))
    fitting_ends = costs.longest_fitting_ends()
    if len(fitting_ends) > microbatches:
        raise MismatchError(
            f"{len(lengths)} rows do not fit into {microbatches} microbatches of at most "
            f"{size_limit.size_text(size_limit.max_size)}: give {len(fitting_ends)} microbatches or more, or a higher limit"
        )

    with _progress_bar(len(lengths)) as on_progress:
        ends = best_group_ends(costs, microbatches, fitting_ends, on_progress)
    runs = list(pairwise([0, *ends]))
    cost_of_run = dict(zip(runs, costs.costs_of(runs), strict=True))
    runs.sort(key=lambda run: (cost_of_run[run], run))
    return [sorted(order[start:end]) for start, end in (*runs[::2], *reversed(runs[1::2]))]


class MicrobatchLimit:
    """The limit on a microbatch: in padded tokens, or in bytes as `bytes_of(rows, longest)` returns them.

    Raises MismatchError for a `limit` that is neither, and for one in bytes without `bytes_of`.
    """

    def __init__(self, limit: Limit, bytes_of: Callable[[float, float], float] | None) -> None:
        amount = parse_bytes(limit) if isinstance(limit, str) else inf if limit is None else limit
        if not isinstance(amount, int | float) or not amount > 0:
            raise MismatchError(f"limit={limit!r}: give padded tokens, as 4096, or bytes, as '2GB', or None for no limit")
        self.max_size, self._bytes_of = amount, bytes_of if isinstance(limit, str) else None
        self.is_in_bytes = isinstance(limit, str)
        if isinstance(limit, str) and bytes_of is None:
            raise MismatchError(
                f"limit={limit!r} is in bytes, which pipe.plan_costs() measures: call it after a few steps over lists, for "
                "group_rows give its result as cost; or give the limit in padded tokens"
            )

    def size(self, rows: float, longest: float) -> float:
        """Return the size of a microbatch of `rows` padded to `longest` tokens, in the limit's unit."""
        return self._bytes_of(rows, longest) if self._bytes_of else rows * longest

    def size_text(self, size: float) -> str:
        """Return a size as text, with its unit."""
        return format_bytes(size) if self._bytes_of else f"{size:,.0f} padded tokens"


def _check_lengths_and_limit(lengths: Sequence[int], microbatches: int, limit: MicrobatchLimit) -> None:
    if not 1 <= microbatches <= len(lengths):
        raise MismatchError(f"{len(lengths)} rows cannot be shared out over {microbatches} microbatches: each needs one")
    if min(lengths) < 1:
        raise MismatchError(f"row {lengths.index(min(lengths))} has length {min(lengths)}: a row has at least one token")
    if limit.size(1, max(lengths)) > limit.max_size:
        row, size = lengths.index(max(lengths)), limit.size_text(limit.size(1, max(lengths)))
        raise MismatchError(
            f"row {row} of length {max(lengths)} takes {size} alone, more than the limit of "
            f"{limit.size_text(limit.max_size)} of a microbatch: shorten it, or give a higher limit"
        )


def _cost_within_limit(cost: Cost | None, limit: MicrobatchLimit) -> tuple[Cost | None, float]:
    """Return the cost that is inf above the limit; or no cost, and the limit in padded tokens."""
    if cost is None and not limit.is_in_bytes:
        return None, limit.max_size
    cost_of = cost or (lambda rows, longest: rows * longest)
    return (lambda rows, longest: cost_of(rows, longest) if limit.size(rows, longest) <= limit.max_size else inf), inf


@contextmanager
def _progress_bar(rows: int) -> Iterator[Callable[[float], object]]:
    """Show a bar on rank 0's terminal if there are many rows. Yield a function that advances it by a share of the work."""
    if rows < MIN_BAR_ROWS or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"grouping {rows:,} rows", total=1.0)
        yield lambda share: bar.advance(task, share)
