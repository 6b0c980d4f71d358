"""The search for groups: runs of sorted rows for which the sum of their costs, and the largest once more, is least.

Dynamic programming over every boundary between rows takes time with the square of the rows. So:

1. Up to `MAX_BOUNDARIES` boundaries are tried, spread evenly over rows, tokens and growth of length. Of fewer rows that is all.
2. All ends of groups are then moved together, each within a window of boundaries, in steps that shrink to one row. Where that
   gains, groups are also merged in one place and halved in another.
3. Of more than `MAX_COARSE_GROUPS` groups, a half, a quarter, .. is searched first. Each of these runs stands for
   `groups_per_run` equal groups. Then the longest are halved, and all ends are moved again.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MismatchError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_BOUNDARIES = 512
MAX_COARSE_GROUPS = 128
EDGE_ROWS = 32  # every boundary so near to either end is tried: a few of the longest rows may cost the most
LARGEST_COSTS_TRIED = 8
LARGEST_COST_FACTORS = (inf, 1.0, 0.98, 0.95, 0.9, 0.8)  # bounds tried while ends move, as shares of the largest cost
WINDOW_COSTS = 2**15  # evaluated when all ends move once
SPLITS_TRIED = 7  # places at which a run may be cut in two
MIN_WINDOW = 4  # boundaries tried on each side of an end
MIN_GAIN = 1e-4  # of a move; with less, the next smaller step follows


class RunCosts:
    """The costs of runs of rows sorted by length, from `cost(rows, longest)`; inf where it does not fit.

    `cost` is called once for each pair of numbers in a call. `tokens_limit`: without `cost`, runs cost their padded tokens, and
    at most so many fit. Raises MismatchError for a cost of NaN.
    """

    def __init__(self, lengths: Sequence[int], cost: Callable[[int, int], float] | None, tokens_limit: float = inf) -> None:
        self.lengths, self._cost, self._tokens_limit = np.array(lengths, np.int64), cost, tokens_limit

    def __call__(self, starts: Integers, ends: Integers, groups_per_run: float = 1.0) -> Floats:
        """Return the costs of rows start .. end - 1, each run as that many equal groups; inf for no row. Shapes broadcast."""
        starts, ends = np.broadcast_arrays(starts, ends)
        has_rows = ends > starts
        groups = np.clip(ends - starts, 1.0, groups_per_run)
        rows = np.maximum(1, np.ceil((ends - starts) / groups)).astype(np.int64)
        longest = np.where(has_rows, self.lengths[ends - 1], self.lengths[0])
        return np.where(has_rows, groups * self._evaluate(rows, longest), inf)

    def _evaluate(self, rows: Integers, longest: Integers) -> Floats:
        if self._cost is None:
            tokens = (rows * longest).astype(np.float64)
            return np.where(tokens <= self._tokens_limit, tokens, inf)

        base = int(self.lengths[-1]) + 1
        pairs, places = np.unique(rows * base + longest, return_inverse=True)
        costs = np.array([self._cost(*divmod(pair, base)) for pair in pairs.tolist()], np.float64)
        if np.isnan(costs).any():
            group_rows, group_longest = divmod(int(pairs[np.isnan(costs)][0]), base)
            raise MismatchError(
                f"cost(rows={group_rows}, longest={group_longest}) is NaN: give a cost that returns a number for every group"
            )
        return costs[places].reshape(rows.shape)

    def costs_of(self, runs: Sequence[tuple[int, int]]) -> list[float]:
        """Return the cost of each run, given as start and end."""
        starts, ends = np.array(runs).T
        costs: list[float] = self(starts, ends).tolist()
        return costs

    def longest_fitting_ends(self) -> list[int]:
        """Return the ends of the fewest runs that fit: each is as long as possible."""
        ends, rows = [0], len(self.lengths)
        while ends[-1] < rows:
            fits, too_long = ends[-1] + 1, rows + 1
            while too_long - fits > 1:
                middle = (fits + too_long) // 2
                is_fitting = np.isfinite(self(np.array([ends[-1]]), np.array([middle]))[0])
                fits, too_long = (middle, too_long) if is_fitting else (fits, middle)
            ends.append(fits)
        return ends[1:]


def best_group_ends(
    costs: RunCosts, groups: int, fitting_ends: Sequence[int], on_progress: Callable[[float], object]
) -> list[int]:
    """Return the ends of the `groups` runs for which (sum + largest) of their costs is least, or nearly so for many rows.

    `fitting_ends`: of at most `groups` runs that fit. `on_progress` is called with the share of the work that was just done.
    """
    counts = [groups]
    while counts[-1] > MAX_COARSE_GROUPS and len(costs.lengths) > MAX_BOUNDARIES:
        counts.append(ceil(counts[-1] / 2))
    boundaries = _candidate_boundaries(costs.lengths, fitting_ends)
    matrix = costs(boundaries[:, None], boundaries[None, :], groups / counts[-1])
    places = _best_ends_in_matrix(matrix, counts[-1])
    ends = list(fitting_ends) if places is None else boundaries[places].tolist()
    if len(boundaries) > len(costs.lengths) and len(ends) == groups:
        return ends

    for count in reversed(counts):
        if len(ends) <= count:
            ends = _improve_ends(costs, _halve_longest(ends, count), groups / count)
        on_progress(count / sum(counts))
    return ends


def _candidate_boundaries(lengths: Integers, fitting_ends: Sequence[int]) -> Integers:
    """Return the boundaries between rows to be tried, 0 and the number of rows included."""
    rows = len(lengths)
    if rows <= MAX_BOUNDARIES:
        return np.arange(rows + 1)
    growth = np.sqrt(np.diff(lengths, prepend=lengths[0]))  # runs of least padding are so dense
    shares = np.arange(1, MAX_BOUNDARIES // 3 + 1) / (MAX_BOUNDARIES // 3)
    spread = [
        np.searchsorted(amount, shares * amount[-1])
        for amount in (np.arange(1.0, rows + 1), lengths.cumsum().astype(np.float64), growth.cumsum())
    ]
    edges = np.arange(1, EDGE_ROWS)
    return np.unique(np.concatenate([*spread, edges, rows - edges, [0, rows], np.array(fitting_ends)])).astype(np.int64)


def _best_ends_in_matrix(costs: Floats, groups: int) -> Integers | None:
    """Return the ends of the best runs, as indices of `costs`; None if nothing fits. costs[start, end] is that of a run.

    First the runs with the least sum are found. Then the same is repeated for lower bounds on the largest cost.
    """

    def sum_and_largest(ends: Integers) -> tuple[float, float]:
        run_costs = costs[np.concatenate([[0], ends[:-1]]), ends]
        return run_costs.sum() + run_costs.max(), run_costs.max()

    best_ends = _cheapest_ends(costs, groups)
    if best_ends is None:
        return None
    best_sum, largest_cost = sum_and_largest(best_ends)
    last_row_alone = costs[-2, -1]
    candidates = np.unique(costs[(costs < largest_cost) & (costs >= last_row_alone)])
    for largest in candidates[:: max(1, ceil(len(candidates) / LARGEST_COSTS_TRIED))].tolist():
        ends = _cheapest_ends(np.where(costs <= largest, costs, inf), groups)
        if ends is not None and (total := sum_and_largest(ends)[0]) < best_sum:
            best_sum, best_ends = total, ends
    return best_ends


def _cheapest_ends(costs: Floats, groups: int) -> Integers | None:
    """Return the ends of the `groups` runs with the least sum of costs; None if nothing fits."""
    costs_by_end = np.ascontiguousarray(costs.T)
    total = np.full(len(costs), inf)
    total[0] = 0
    starts = []
    for _ in range(groups):
        sums = costs_by_end + total
        starts.append(sums.argmin(axis=1))
        total = np.take_along_axis(sums, starts[-1][:, None], axis=1)[:, 0]
    if not np.isfinite(total[-1]):
        return None

    ends = [len(total) - 1]
    for start in reversed(starts[1:]):
        ends.append(start[ends[-1]])
    return np.array(ends[::-1])


def _halve_longest(ends: list[int], groups: int) -> list[int]:
    """Return the ends of `groups` runs, after runs with the most rows have been halved."""
    while len(ends) < groups:
        runs = sorted(pairwise([0, *ends]), key=lambda run: run[0] - run[1])
        halves = [(start + end) // 2 for start, end in runs[: groups - len(ends)] if end - start > 1]
        ends = sorted([*ends, *halves])
    return ends


def _improve_ends(costs: RunCosts, ends: list[int], groups_per_run: float) -> list[int]:
    """Return better ends: all move together in ever smaller steps, and some to other groups, while that gains."""
    groups, rows = len(ends), len(costs.lengths)
    window = max(MIN_WINDOW, int((WINDOW_COSTS / groups) ** 0.5 / 2))
    step = ceil(rows / groups / (2 * window))
    best_total = inf
    while True:
        total, moved_ends = _best_ends_in_windows(costs, ends, step, window, groups_per_run)
        transferred_ends = _transfer_ends(costs, moved_ends, groups_per_run)
        if transferred_ends != moved_ends:
            in_windows = _best_ends_in_windows(costs, transferred_ends, step, window, groups_per_run)
            total, moved_ends = min((total, moved_ends), in_windows)
        has_gained = total < (1 - MIN_GAIN) * best_total
        if total < best_total:
            best_total, ends = total, moved_ends
        if not has_gained and step == 1:
            return ends
        if not has_gained:
            step = max(1, step // window)


def _transfer_ends(costs: RunCosts, ends: list[int], groups_per_run: float) -> list[int]:
    """Return ends of which some were taken away where that costs little, and as many added where that saves more."""
    if len(ends) < 3:
        return ends
    bounds = np.array([0, *ends])
    now = costs(bounds[:-1], bounds[1:], groups_per_run)
    merged = costs(bounds[:-2], bounds[2:], groups_per_run)
    losses = np.where(merged <= now.max(), merged - now[:-1] - now[1:], inf)

    middles = bounds[:-1, None] + (np.diff(bounds)[:, None] * np.arange(1, SPLITS_TRIED + 1)) // (SPLITS_TRIED + 1)
    halves = costs(bounds[:-1, None], middles, groups_per_run) + costs(middles, bounds[1:, None], groups_per_run)
    gains = now - halves.min(axis=1)

    removed, halved = losses.argsort(), (-gains).argsort()
    count = int((gains[halved[: len(removed)]] > losses[removed]).sum())
    added = middles[halved[:count], halves[halved[:count]].argmin(axis=1)]
    kept = np.delete(bounds[1:], removed[:count])
    return sorted([*kept.tolist(), *added.tolist()])


def _best_ends_in_windows(
    costs: RunCosts, ends: Sequence[int], step: int, window: int, groups_per_run: float
) -> tuple[float, list[int]]:
    """Return the best ends within `window` steps of `step` rows around `ends`, and their (sum + largest).

    The last end stays. Each bound on the largest cost has a search of its own; all run at once, as the rows of an array.
    """
    positions = np.array([0, *ends])[:, None] + step * np.arange(-window, window + 1)
    positions = np.clip(positions, 0, len(costs.lengths))
    positions[0], positions[-1] = 0, len(costs.lengths)
    run_costs = costs(positions[:-1, :, None], positions[1:, None, :], groups_per_run).transpose(0, 2, 1)  # group, end, start
    largest = run_costs[:, window, window].max()
    bounds = largest * np.array(LARGEST_COST_FACTORS) if np.isfinite(largest) else np.array([inf])

    total = np.full((len(bounds), 2 * window + 1), inf)
    total[:, window] = 0
    starts = []
    for costs_of_group in run_costs:
        bounded = np.where(costs_of_group <= bounds[:, None, None], costs_of_group, inf)
        sums = bounded + total[:, None, :]
        starts.append(sums.argmin(axis=2))
        total = np.take_along_axis(sums, starts[-1][:, :, None], axis=2)[:, :, 0]

    best = (inf, list(ends))
    for bound in np.flatnonzero(np.isfinite(total[:, window])):
        places = [window]
        for start in reversed(starts):
            places.append(start[bound, places[-1]])
        places.reverse()
        chosen = run_costs[np.arange(len(ends)), places[1:], places[:-1]]
        value = float(chosen.sum() + chosen.max())
        if value < best[0]:
            best = value, positions[np.arange(1, len(positions)), places[1:]].tolist()
    return best
