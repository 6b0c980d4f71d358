"""Microbatches of unequal costs: what the simulator says of them, and the order that is planned."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.plan.microbatch_order import UNIT_COSTS, OrderTimer, peak_in_flight, plan_order
from penstock.schedule import Costs, build, names, search, simulate, with_teacher
from penstock.schedule.memory import TeacherOutputs


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


def _step_time(name: str, costs: list[float], stage_costs: Costs = UNIT_COSTS) -> float:
    table = build(name, ranks=2, microbatches=len(costs))
    return simulate(table, replace(stage_costs, microbatch_factors=costs)).makespan


@pytest.mark.costly
@pytest.mark.parametrize("name", names())
def test_no_order_of_few_microbatches_is_faster(name: str) -> None:
    """Of all 120 orders, each simulated, at stages that cost unlike."""
    costs = _costs(5, 5)
    stages = build(name, ranks=2, microbatches=5).num_stages
    stage_costs = Costs(*([1 + 0.3 * stage + kind for stage in range(stages)] for kind in range(3)))
    planned = plan_order(costs, build(name, ranks=2, microbatches=5), stage_costs)
    times = [_step_time(name, list(order), stage_costs) for order in itertools.permutations(costs)]
    assert _step_time(name, [costs[index] for index in planned], stage_costs) == pytest.approx(min(times), rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_stage_may_have_costs_for_each_microbatch(name: str) -> None:
    """A step takes as long as its parts; and of all 120 orders, each simulated, none is faster than the planned one."""
    table, rng = build(name, ranks=2, microbatches=5), random.Random(3)
    kinds = [[[rng.uniform(1, 9) for _ in range(5)] for _ in range(table.num_stages)] for _ in range(3)]

    def step_time(order: tuple[int, ...]) -> float:
        ordered = [[[row[index] for index in order] for row in rows] for rows in kinds]
        return simulate(table, Costs(*ordered)).makespan

    in_one_piece = simulate(build("naive", ranks=1, microbatches=5), Costs([kinds[0][0]], [kinds[1][0]], 2.0))
    assert in_one_piece.makespan == pytest.approx(sum(kinds[0][0]) + sum(kinds[1][0]) + 5 * 2)
    planned = plan_order(_costs(5, 5), table, Costs(*kinds))
    assert step_time(tuple(planned)) == pytest.approx(min(map(step_time, itertools.permutations(range(5)))), rel=1e-12)
    with pytest.raises(ScheduleError, match="F of stage 0 has 5 costs for 4 microbatches: give one for each"):
        simulate(build(name, ranks=2, microbatches=4), Costs(kinds[0]))


@pytest.mark.slow
def test_a_table_is_searched_for_microbatches_of_unequal_costs() -> None:
    factors = [1.0, 5.0, 2.0, 1.0]
    costs = Costs(act=2, microbatch_factors=factors)
    found = search(costs, placement=(0, 1), microbatches=4, limit=14, effort="quick")
    timeline = simulate(found.schedule, costs)
    assert found.makespan == timeline.makespan
    assert max(timeline.peak_memory) <= 14
    assert found.bound <= found.makespan < simulate(build("1f1b", ranks=2, microbatches=4), costs).makespan
    by_stage = Costs(*[[factors, factors]] * 3, microbatch_factors=factors, act=2)
    assert search(by_stage, placement=(0, 1), microbatches=4, limit=14, effort="quick") == found
    with pytest.raises(ScheduleError, match="no table keeps the limit"):
        search(costs, placement=(0, 1), microbatches=4, limit=9)
    with pytest.raises(ScheduleError, match="'optimal' knows no microbatches that cost unlike"):
        search(costs, placement=(0, 1), microbatches=4, effort="optimal")


@pytest.mark.parametrize("microbatches", [6, 16])
def test_the_search_for_an_order_is_bounded_by_a_share_of_the_step(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the work that is counted: of steps from a tenth of a millisecond to ten seconds."""
    table, timed = build("1f1b", ranks=4, microbatches=microbatches), list[float]()
    time_orders = OrderTimer.step_times

    def count(timer: OrderTimer, orders: np.ndarray) -> np.ndarray:
        timed.append(timer.seconds_to_time(orders.shape[1]))
        return time_orders(timer, orders)

    monkeypatch.setattr(OrderTimer, "step_times", count)
    costs, step_times, num_timed = _costs(1, microbatches), list[float](), list[int]()
    for exponent in range(-4, 2):
        timed.clear()
        scaled = [10**exponent * cost / sum(costs) / 3 for cost in costs]
        order = plan_order(scaled, table, in_seconds=True)
        assert sum(timed) <= 0.02 * 10**exponent
        assert len(timed) <= 5
        step_times.append(simulate(table, Costs(microbatch_factors=[costs[index] for index in order])).makespan)
        num_timed.append(len(timed))
    assert num_timed[0] == 0
    assert step_times[-1] == min(step_times) < step_times[0] < simulate(table, Costs(microbatch_factors=costs)).makespan


def test_fewer_microbatches_than_the_table_has_are_planned_too() -> None:
    table = build("1f1b", ranks=2, microbatches=16)
    assert plan_order([3, 1, 2], table) == plan_order([3, 1, 2], build("1f1b", ranks=2, microbatches=3))


@pytest.mark.parametrize("microbatches", [6, 16])
def test_a_limit_on_what_is_in_flight_is_kept(microbatches: int) -> None:
    """Nine tenths of what the fastest order has in flight."""
    costs, table = _costs(1, microbatches), build("1f1b", ranks=4, microbatches=microbatches)
    fastest = plan_order(costs, table)
    limit = 0.9 * max(peak_in_flight([costs[index] for index in fastest], table))
    order = plan_order(costs, table, UNIT_COSTS, costs, limit)
    assert sorted(order) == list(range(microbatches))
    assert max(peak_in_flight([costs[index] for index in order], table)) <= limit


def test_what_is_in_flight_is_counted_by_hand() -> None:
    """1F1B: rank 0 of two has two microbatches in flight, rank 1 one; with two stages a rank, each holds a half of one."""
    assert peak_in_flight([5, 1, 4], build("1f1b", ranks=2, microbatches=4)) == [6, 5]
    assert peak_in_flight([6], build("interleaved-1f1b", ranks=2, microbatches=2)) == [6, 6]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.costly] * (name != "1f1b")) for name in names()])
def test_a_teachers_outputs_that_wait_are_held_as_the_simulator_says(name: str) -> None:
    table = build(name, ranks=2, microbatches=4)
    both, per_rank = with_teacher(table, ahead=False), len(table.stages_of(0))
    assert len(table.stages_of(1)) == per_rank
    simulated = simulate(both, Costs(act=1 / per_rank, teacher_output=3)).peak_memory
    assert peak_in_flight([1] * 4, table, TeacherOutputs(both, [3] * 4)) == pytest.approx(simulated)


@pytest.mark.parametrize("factors", [[1, 2, 3], [1, -1]])
def test_wrong_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(ScheduleError, match="microbatch_factors has"):
        simulate(build("1f1b", ranks=2, microbatches=2), Costs(microbatch_factors=factors))
