"""The simulator: published figures, closed formulas, and an independent evaluation of the same rules."""

from functools import cache
from itertools import pairwise

import pytest
from executable_model import makes, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import named_tables, valid_tables, whole_numbers

from penstock.schedule import Action, Costs, Kind, Schedule, ScheduleError, build, from_rows, names, simulate

SIZES = [(ranks, microbatches) for ranks in range(2, 9) for microbatches in range(1, 25)]
COSTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 5, 2), (1, 7, 0), (9, 1, 4)]  # F, I, W


def table(text: str, placement="loop") -> Schedule:
    return from_rows("drawn", [map(Action.parse, line.split()) for line in text.strip().splitlines()], placement)


# ---- published figures

PUBLISHED = [
    # P   M    F       I       W      send   bubble of 1f1b, arXiv 2401.10241
    (8,  24,  18.522, 18.086, 9.337, 0.601, 0.2431),
    (8,  64,  18.546, 18.097, 9.321, 0.762, 0.1240),
    (16, 48,  11.347, 11.248, 8.132, 0.377, 0.2552),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches", "forward", "inputs", "weights", "send", "bubble"), PUBLISHED)
def test_1f1b_meets_the_published_bubble(ranks, microbatches, forward, inputs, weights, send, bubble):
    timeline = simulate(build("1f1b", ranks, microbatches), Costs(forward, inputs, weights, send))
    assert round(timeline.bubble_by_span, 4) == bubble


def test_gpipe_and_1f1b_differ_when_stages_are_uneven():
    stages = [15, 6, 6, 6]
    costs = Costs(forward=stages, backward_input=stages, backward_weight=stages)
    assert simulate(build("gpipe", 4, 4), costs).makespan == 234
    assert simulate(build("1f1b", 4, 4), costs).makespan == 189


# ---- closed formulas; all numbers are small whole ones, so floating point is exact

MAKESPANS = {
    "naive": lambda P, M, T: M * P * T,
    "gpipe": lambda P, M, T: (M + P - 1) * T,
    "1f1b": lambda P, M, T: (M + P - 1) * T,
}
IN_FLIGHT = {
    "naive": lambda P, M, r: 1,
    "gpipe": lambda P, M, r: M,
    "1f1b": lambda P, M, r: min(P - r, M),
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", MAKESPANS)
def test_makespan_span_and_bubble_follow_the_formula(name, costs):
    cost = sum(costs)
    for ranks, microbatches in SIZES:
        timeline = simulate(build(name, ranks, microbatches), Costs(*costs))
        makespan = MAKESPANS[name](ranks, microbatches, cost)
        assert (timeline.makespan, timeline.span) == (makespan, makespan)
        assert timeline.busy == (microbatches * cost,) * ranks
        assert timeline.bubble == timeline.bubble_by_span == (makespan - microbatches * cost) / makespan


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_activations_in_flight_follow_the_formula(name):
    for ranks, microbatches in [(1, 1), (1, 5), *SIZES]:
        peaks = tuple(IN_FLIGHT[name](ranks, microbatches, rank) for rank in range(ranks))
        assert simulate(build(name, ranks, microbatches)).peak_in_flight == peaks


@pytest.mark.parametrize("name", names())
def test_one_rank_has_no_bubble(name):
    timeline = simulate(build(name, 1, 7), Costs(2, 3, 4, send=100))
    assert (timeline.makespan, timeline.bubble, timeline.bubble_by_span) == (63, 0, 0)


def test_naive_takes_the_sum_of_all_stages_and_sends():
    for ranks, microbatches in SIZES:
        stages = [1 + 3 * stage % 5 for stage in range(ranks)]
        timeline = simulate(build("naive", ranks, microbatches), Costs(stages, stages, 2, send=4))
        assert timeline.makespan == microbatches * (2 * sum(stages) + 2 * ranks + 2 * (ranks - 1) * 4)


def test_gpipe_pays_every_send_once_down_and_once_up():
    for ranks, microbatches in SIZES:
        timeline = simulate(build("gpipe", ranks, microbatches), Costs(2, 1, 1, send=3))
        assert timeline.makespan == (microbatches + ranks - 1) * 4 + 2 * (ranks - 1) * 3


def test_gpipe_of_uneven_stages_waits_for_the_slowest_only_once_a_microbatch():
    for ranks, microbatches in SIZES:
        stages = [1 + (5 * stage) % 7 for stage in range(ranks)]
        timeline = simulate(build("gpipe", ranks, microbatches), Costs(stages, stages, stages))
        assert timeline.makespan == 3 * (sum(stages) + (microbatches - 1) * max(stages))


# ---- the times of a table, drawn


def starts(schedule: Schedule, costs: Costs) -> list[str]:
    return [" ".join(f"{event.action}@{event.start:g}" for event in row) for row in simulate(schedule, costs).rows]


def test_an_edge_between_ranks_costs_the_send_and_one_inside_a_rank_nothing():
    assert starts(table("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", "V"), Costs(2, 1, 2, send=10)) == [
        "0F0@0 3F0@26 3B0@28 0B0@57",
        "1F0@12 2F0@14 2B0@41 1B0@44",
    ]


def test_a_full_backward_costs_both_halves_and_its_halves_can_be_apart():
    costs = Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6])
    assert starts(table("0F0 0B0\n1F0 1B0"), costs) == ["0F0@0 0B0@13", "1F0@1 1B0@3"]
    assert starts(table("0F0 0I0 0W0\n1F0 1I0 1W0"), costs) == ["0F0@0 0I0@7 0W0@10", "1F0@1 1I0@3 1W0@7"]


def test_makespan_is_over_all_ranks_and_span_over_one():
    timeline = simulate(table("0F0 0I0 0W0\n1F0 1I0 1W0"), Costs(1, 1, [1, 5]))
    assert (timeline.makespan, timeline.span) == (8, 7)  # rank 0: 0 to 5, rank 1: 1 to 8
    assert (timeline.bubble, timeline.bubble_by_span) == (1 / 8, 0)


def test_a_forward_only_table_is_timed():
    forwards = build("1f1b", 3, 4).keep(lambda action: action.kind is Kind.F)
    assert simulate(forwards, Costs(forward=5)).makespan == (4 + 3 - 1) * 5


# ---- against a plain recursion over what each action waits for


def ends_by_recursion(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The end of every action: the longest path that leads there."""
    makers = {value: action for row in schedule.actions for action in row for value in makes(action, schedule.stages)}
    before = {later: action for row in schedule.actions for action, later in pairwise(row)}
    cost = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    cost["B"] = [i + w for i, w in zip(cost["I"], cost["W"], strict=True)]

    @cache
    def end(action: Action) -> float:
        sources = [makers[value] for value in takes(action, schedule.stages)]
        far = {source: schedule.placement[source.stage] != schedule.placement[action.stage] for source in sources}
        arrivals = [end(source) + (costs.send if far[source] else 0) for source in sources]
        free = [end(before[action])] if action in before else []
        return max([*arrivals, *free], default=0) + cost[action.kind.value][action.stage]

    return {action: end(action) for row in schedule.actions for action in row}


@st.composite
def timed_tables(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = draw(valid_tables() | named_tables())
    prices = st.lists(whole_numbers(0, 5), min_size=schedule.stages, max_size=schedule.stages)
    return schedule, Costs(draw(prices), draw(prices), draw(prices), draw(whole_numbers(0, 3)))


@settings(max_examples=200, deadline=None)
@given(timed_tables())
def test_every_action_ends_where_the_longest_path_to_it_does(timed):
    schedule, costs = timed
    timeline = simulate(schedule, costs)
    assert tuple(tuple(event.action for event in row) for row in timeline.rows) == schedule.actions
    assert {event.action: event.end for event in timeline.events} == ends_by_recursion(schedule, costs)
    price = costs.table(schedule.stages)
    assert all(event.end - event.start == price[event.action.kind][event.action.stage] for event in timeline.events)


@settings(max_examples=200, deadline=None)
@given(timed_tables())
def test_the_critical_path_is_a_chain_of_causes_as_long_as_the_makespan(timed):
    schedule, costs = timed
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for event, following in pairwise(path):
        crossing = event.rank != following.rank
        assert following.start == event.end + (costs.send if crossing else 0)
        row = schedule.actions[event.rank]
        follows = not crossing and row.index(following.action) == row.index(event.action) + 1
        feeds = set(makes(event.action, schedule.stages)) & set(takes(following.action, schedule.stages))
        assert follows or feeds
    crossings = sum(event.rank != following.rank for event, following in pairwise(path))
    assert sum(event.end - event.start for event in path) + crossings * costs.send == timeline.makespan


# ---- what cannot be timed

WRONG_COSTS = [
    (Costs(forward=[1, 2]),                  "forward has 2 costs for 3 stages: give one number, or one for each stage"),
    (Costs(backward_input=[1, 2, 3, 4]),     "backward_input has 4 costs for 3 stages: give one number, or one for each stage"),
    (Costs(backward_weight=[1, -2, 3]),      "backward_weight has the cost -2.0: a cost is a time, 0 or more"),
    (Costs(forward=-1),                      "forward has the cost -1.0: a cost is a time, 0 or more"),
    (Costs(forward=float("nan")),            "forward has the cost nan: a cost is a time, 0 or more"),
    (Costs(send=-1),                         "send has the cost -1.0: a cost is a time, 0 or more"),
    (Costs(send=float("nan")),               "send has the cost nan: a cost is a time, 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("costs", "told"), WRONG_COSTS)
def test_a_cost_that_is_no_time_is_refused(costs, told):
    with pytest.raises(ScheduleError) as caught:
        simulate(build("1f1b", 3, 4), costs)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0B0 0F0", "drawn stops: rank 0 waits for ever before 0B0"),
        ("0F0 0B0\n1B0", "drawn stops: rank 0 waits for ever before 0B0"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "drawn stops: rank 0 waits for ever before 0B0"),
    ],
)
def test_a_table_that_stops_is_not_timed(text, told):
    with pytest.raises(ScheduleError, match=told):
        simulate(table(text))


def test_the_order_of_ranks_does_not_matter():
    down, up = build("1f1b", 3, 4), build("1f1b", 3, 4)
    up = Schedule("up", tuple(reversed(up.placement)), 4, tuple(reversed(up.actions)))
    costs = Costs([1, 4, 2], 2, 1, send=1)
    assert simulate(up, costs).makespan == simulate(down, costs).makespan
    assert [row[0].start for row in simulate(up, costs).rows] == [row[0].start for row in reversed(simulate(down, costs).rows)]
