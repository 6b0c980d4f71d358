"""Which rows share a microbatch: every row once, little padding, the limit kept, the same everywhere."""

import io
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

import penstock as ps
from penstock.plan import group_rows, grouping


def _lengths(rows: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [max(1, int(rng.lognormvariate(5, 1))) for _ in range(rows)]


def _tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    return [len(group) * max(lengths[row] for row in group) for group in groups]


def _step_time(tokens: Sequence[float], ranks: int = 4) -> float:
    """Of 1F1B over ranks that take as long as a microbatch has tokens: its recurrence, written out."""
    rows = [list(row) for row in ps.schedule.build("1f1b", ranks=ranks, microbatches=len(tokens)).actions]
    ended: dict[tuple[str, int, int], float] = {}
    free, done = [0.0] * ranks, [0] * ranks
    while any(done[rank] < len(rows[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while done[rank] < len(rows[rank]):
                action = rows[rank][done[rank]]
                kind, microbatch = action.kind.value, action.microbatch
                if kind == "F":
                    needs = (kind, rank - 1, microbatch) if rank else None
                else:
                    needs = (kind, rank + 1, microbatch) if rank < ranks - 1 else ("F", rank, microbatch)
                if needs is not None and needs not in ended:
                    break
                start = max(free[rank], ended[needs] if needs else 0.0)
                free[rank] = ended[kind, rank, microbatch] = start + tokens[microbatch] * (1 if kind == "F" else 2)
                done[rank] += 1
    return max(free)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_group(seed: int) -> None:
    lengths = _lengths(37, seed)
    groups = group_rows(lengths, 9)
    assert sorted(row for group in groups for row in group) == list(range(37))
    assert len(groups) == 9
    assert all(groups)


@pytest.mark.parametrize("seed", range(5))
def test_no_grouping_of_few_rows_is_cheaper(seed: int) -> None:
    """Over all ways to share seven rows out over three groups, contiguous in length or not."""
    lengths = _lengths(7, seed)
    found = _tokens(lengths, group_rows(lengths, 3))
    cheapest = min(
        sum(tokens) + max(tokens)
        for choice in itertools.product(range(3), repeat=7)
        if len(set(choice)) == 3
        for tokens in [_tokens(lengths, [[row for row in range(7) if choice[row] == group] for group in range(3)])]
    )
    assert sum(found) + max(found) == cheapest


def test_groups_are_faster_than_rows_as_they_arrive() -> None:
    """At most 0.40 of groups of four in arrival order and 0.25 of padding all to the longest, in the mean over twelve draws."""
    arrival, padded = [], []
    for seed in range(12):
        lengths = _lengths(64, seed)
        planned = _step_time(_tokens(lengths, group_rows(lengths, 16)))
        arrival.append(planned / _step_time(_tokens(lengths, [range(start, start + 4) for start in range(0, 64, 4)])))
        padded.append(planned / _step_time([4 * max(lengths)] * 16))
    assert sum(arrival) / 12 < 0.40
    assert sum(padded) / 12 < 0.25


def test_a_limit_is_kept() -> None:
    lengths = _lengths(40)
    limit = 2 * max(lengths)
    assert max(_tokens(lengths, group_rows(lengths, 16, limit=limit))) <= limit


def test_a_cost_decides() -> None:
    """Where a group costs by its number of rows alone, groups are even, however long the rows are."""
    groups = group_rows([1, 1, 1, 1000, 1000, 1000], 3, cost=lambda rows, longest: rows**2)
    assert [len(group) for group in groups] == [2, 2, 2]


def test_short_groups_come_first_and_last() -> None:
    tokens = _tokens(lengths := _lengths(64), group_rows(lengths, 16))
    top = tokens.index(max(tokens))
    assert tokens[: top + 1] == sorted(tokens[: top + 1])
    assert tokens[top:] == sorted(tokens[top:], reverse=True)


@pytest.mark.parametrize(
    ("lengths", "microbatches", "limit", "message"),
    [
        ([3, 4], 3, None, "2 rows cannot be shared out over 3 microbatches"),
        ([3, 4], 0, None, "2 rows cannot be shared out over 0 microbatches"),
        ([3, 0], 2, None, "row 1 has length 0"),
        ([3, 9], 1, 8, "row 1 of length 9 takes 9 padded tokens alone, more than the limit of 8"),
        ([5, 5, 5, 5], 2, 5, "give 4 microbatches or more"),
        ([5, 5], 2, "much", "limit='much': give padded tokens, as 4096, or bytes, as '2GB'"),
    ],
)
def test_what_cannot_be_grouped_is_refused(
    lengths: list[int], microbatches: int, limit: float | str | None, message: str
) -> None:
    with pytest.raises(ps.MismatchError, match=message):
        group_rows(lengths, microbatches, limit=limit)


def _run_costs(lengths: Sequence[int], cost: Callable[[int, int], float]) -> npt.NDArray[np.float64]:
    """The cost of the sorted rows start .. end, as [start, end]; inf for no row."""
    ordered, rows = sorted(lengths), range(len(lengths))
    return np.array([[cost(end - start + 1, ordered[end]) if end >= start else math.inf for end in rows] for start in rows])


def _exact_total(costs: npt.NDArray[np.float64], groups: int, largest: float) -> float:
    """(Sum + largest) of the runs with the least sum under a bound on the largest cost: over all boundaries."""
    costs = np.where(costs <= largest, costs, math.inf)
    totals, starts = costs[0], []
    for _ in range(groups - 1):
        sums = totals[:-1, None] + costs[1:]
        starts.append(1 + sums.argmin(axis=0))
        totals = sums.min(axis=0)
    ends = [len(costs) - 1]
    for start in reversed(starts):
        ends.append(start[ends[-1]] - 1)
    run_costs = [costs[start + 1, end] for start, end in itertools.pairwise([-1, *reversed(ends)])]
    return float(sum(run_costs) + max(run_costs))


def _seconds(rows: int, longest: int) -> float:
    return 1e-3 + rows * longest * (1e-6 + 1e-9 * longest)


@pytest.mark.parametrize(
    ("groups", "cost"),
    [
        (3, lambda rows, longest: rows * longest),
        pytest.param(64, _seconds, marks=pytest.mark.slow),
        pytest.param(150, lambda rows, longest: rows * longest, marks=pytest.mark.slow),
        pytest.param(150, _seconds, marks=pytest.mark.slow),
    ],
)
def test_groups_of_many_rows_cost_at_most_a_hundredth_more_than_the_best(
    groups: int, cost: Callable[[int, int], float]
) -> None:
    rng = random.Random(groups)
    draws = [rng.lognormvariate(5, 1) for _ in range(600)], [rng.choice([30, 500, rng.uniform(1, 2048)]) for _ in range(600)]
    for draw in draws:
        lengths = [int(length) + 1 for length in draw]
        found = [cost(len(group), max(lengths[row] for row in group)) for group in group_rows(lengths, groups, cost)]
        costs = _run_costs(lengths, cost)
        bounds = [math.inf, *(max(found) * share / 10 for share in range(7, 11))]
        exact = min(_exact_total(costs, groups, bound) for bound in bounds)
        assert sum(found) + max(found) <= 1.01 * exact


@pytest.mark.costly
def test_twenty_thousand_rows_need_few_costs() -> None:
    calls = 0

    def cost(rows: int, longest: int) -> float:
        nonlocal calls
        calls += 1
        return rows * longest

    groups = group_rows(_lengths(20_000), 64, cost)
    assert sorted(row for group in groups for row in group) == list(range(20_000))
    assert len(groups) == 64
    assert calls < 1_000_000  # of 200 million runs


@pytest.mark.costly
def test_many_rows_within_a_limit_are_refused_only_where_they_do_not_fit() -> None:
    lengths = _lengths(3000)
    limit = max(lengths)
    with pytest.raises(ps.MismatchError, match=r"give \d+ microbatches or more") as refusal:
        group_rows(lengths, 2, limit=limit)
    fewest = int(re.findall(r"give (\d+)", str(refusal.value))[0])
    assert max(_tokens(lengths, group_rows(lengths, fewest, limit=limit))) <= limit


def test_a_cost_of_nan_is_told() -> None:
    with pytest.raises(ps.MismatchError, match=r"cost\(rows=2, longest=7\) is NaN"):
        group_rows([3, 7, 9], 2, cost=lambda rows, longest: math.nan if (rows, longest) == (2, 7) else rows)


def test_a_bar_is_on_the_terminal_of_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "MIN_BAR_ROWS", 10)
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", output)
    monkeypatch.setenv("RANK", "1")
    group_rows(_lengths(20), 3)
    assert output.getvalue() == ""
    monkeypatch.setenv("RANK", "0")
    group_rows(_lengths(20), 3)
    assert "grouping 20 rows" in output.getvalue()
