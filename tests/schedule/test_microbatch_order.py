"""Microbatches of unequal costs: what the simulator says of them, and the order that is planned."""

import random

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Costs, build, names, simulate
from penstock.schedule.microbatch_order import plan_order


def _costs(seed: int, microbatches: int = 16) -> list[float]:
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(5, 1) for _ in range(4 * microbatches)]
    return [4 * max(lengths[start : start + 4]) for start in range(0, len(lengths), 4)]


def test_a_microbatch_costs_as_many_times_as_its_factor() -> None:
    """Two ranks, 1F1B, by hand: 0F0 takes 2, 0F1 6, 1F0 2, 1B0 4; then 1F1, and back."""
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Costs(microbatch_factors=[2, 6]))
    times = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert times == {
        "0F0": (0, 2), "0F1": (2, 8), "0B0": (8, 12), "0B1": (26, 38),
        "1F0": (2, 4), "1B0": (4, 8), "1F1": (8, 14), "1B1": (14, 26),
    }  # fmt: skip
    assert timeline.peak_memory == (8, 6)


def test_messages_have_as_many_times_the_bytes() -> None:
    costs = Costs(size=10, bandwidth=10, send=0.5, microbatch_factors=[3])
    timeline = simulate(build("1f1b", ranks=2, microbatches=1), costs)
    assert [event.start for event in timeline.rows[1]] == [3 + 3 + 0.5, 3 + 3 + 0.5 + 3]
    assert timeline.arrivals[timeline.rows[0][0].action, 1].time == 3 + 3 + 0.5


@pytest.mark.parametrize("name", names())
def test_equal_factors_change_nothing(name: str) -> None:
    table = build(name, ranks=4, microbatches=8)
    assert simulate(table, Costs(send=1, microbatch_factors=[1] * 8)).rows == simulate(table, Costs(send=1)).rows


@pytest.mark.parametrize("name", names())
def test_the_planned_order_is_never_slower_than_the_given_one(name: str) -> None:
    table = build(name, ranks=4, microbatches=16)
    for seed in range(4):
        costs = _costs(seed)
        order = plan_order(costs, table)
        planned = simulate(table, Costs(microbatch_factors=[costs[index] for index in order])).makespan
        assert planned <= simulate(table, Costs(microbatch_factors=costs)).makespan


def test_the_planned_order_takes_at_most_85_percent_of_arrival_order_in_1f1b() -> None:
    table, ratios = build("1f1b", ranks=4, microbatches=16), []
    for seed in range(12):
        costs = _costs(seed)
        planned = [costs[index] for index in plan_order(costs, table)]
        times = [simulate(table, Costs(microbatch_factors=factors)).makespan for factors in (planned, costs)]
        ratios.append(times[0] / times[1])
    assert sum(ratios) / len(ratios) < 0.85


def test_another_number_than_the_table_has_is_planned_too() -> None:
    table = build("1f1b", ranks=2, microbatches=4)
    assert sorted(plan_order([3, 1, 2], table)) == [0, 1, 2]
    assert plan_order([6, 5, 4, 3, 2, 1], table) == [5, 3, 1, 0, 2, 4]


@pytest.mark.parametrize("factors", [[1, 2, 3], [1, -1]])
def test_wrong_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(ScheduleError, match="microbatch_factors has"):
        simulate(build("1f1b", ranks=2, microbatches=2), Costs(microbatch_factors=factors))
