"""The simulator: times drawn by hand, and an independent evaluation of the same rules."""

import gc
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from executable_model import Value, makes, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_steps import table
from random_tables import named_tables, some_skips, valid_tables, whole_numbers

from penstock.schedule import Action, Costs, Kind, Schedule, ScheduleError, build, from_rows, names, simulate
from penstock.schedule.memory import peaks_in_flight

SIZES = [(ranks, microbatches) for ranks in (2, 3, 4, 5, 8) for microbatches in (*range(1, 10), 24)]


@pytest.mark.parametrize("name", names())
def test_one_rank_has_no_bubble(name):
    schedule = build(name, 1, 7)
    timeline = simulate(schedule, Costs(2, 3, 4, send=100, size=100, bandwidth=1))
    assert (timeline.makespan, timeline.bubble, timeline.bubble_by_span) == (63 * schedule.stages, 0, 0)


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


def test_every_border_has_its_own_send():
    costs = Costs(1, 1, 1, send=[10, 100])
    assert starts(table("0F0 0B0\n1F0 1B0\n2F0 2B0"), costs) == ["0F0@0 0B0@227", "1F0@11 1B0@215", "2F0@112 2B0@113"]


def test_messages_of_a_channel_queue_and_latency_does_not_occupy_it():
    costs = Costs(1, send=3, size=4, bandwidth=2)  # on the channel from 1, 3, 5 to 3, 5, 7; there at 6, 8, 10
    assert starts(table("0F0 0F1 0F2\n1F0 1F1 1F2"), costs) == ["0F0@0 0F1@1 0F2@2", "1F0@6 1F1@8 1F2@10"]


def test_a_message_waits_for_no_message_of_the_other_direction():
    costs = Costs(1, 1, 1, size=5, bandwidth=1)
    assert starts(table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), costs) == [
        "0F0@0 0F1@1 0B0@14 0B1@19",  # 1B0 sends from 9 to 14, 1B1 from 14 to 19; 0F1's message is there at 11
        "1F0@6 1B0@7 1F1@11 1B1@12",
    ]


def test_outputs_and_gradients_from_rank_to_rank_share_a_channel_in_the_order_of_the_senders_table():
    costs = Costs(1, 1, 1, size=5, bandwidth=1)
    assert starts(table("0F0 3F0 3B0 0F1 3F1 0B0 3B1 0B1\n1F0 2F0 2B0 1F1 2F1 1B0 2B1 1B1", "V"), costs) == [
        "0F0@0 3F0@13 3B0@14 0F1@16 3F1@33 0B0@38 3B1@40 0B1@56",  # 3B0 sends from 16 to 21, 0F1 from 21 to 26
        "1F0@6 2F0@7 2B0@21 1F1@26 2F1@27 1B0@28 2B1@47 1B1@49",
    ]


def test_size_and_bandwidth_are_of_a_border_and_free_inside_a_rank():
    costs = Costs(1, 1, 1, size=[4, 9, 5], bandwidth=[2, 1, 1])
    assert starts(table("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", "V"), costs) == [
        "0F0@0 3F0@10 3B0@11 0B0@24",
        "1F0@3 2F0@4 2B0@18 1B0@20",
    ]


PAIRED = "0F0 {0F1 0B0} 0B1\n1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(("overlap", "end"), [(0, 9), (0.5, 8.5), (1, 8)])
def test_a_pair_waits_for_both_and_ends_at_once_less_the_hidden_share_of_the_shorter(overlap, end):
    timeline = simulate(table(PAIRED), Costs(1, 1, 2, overlap=overlap))
    assert [event[1:4] for event in timeline.rows[0][1:3]] == [
        (Action(Kind.F, 0, 1), 5, end),  # could start at 1, but 1B0 ends at 5
        (Action(Kind.B, 0, 0), 5, end),
    ]
    assert timeline.rows[1][2].start == end
    assert timeline.busy == (1 + (end - 5) + 3, 8)


def test_a_pair_sends_in_the_order_of_the_table():
    costs = Costs(1, 1, 1, size=5, bandwidth=1)
    drawn = "0F0 3F0 {%s} 3F1 0B0 3B1 0B1\n1F0 2F0 2B0 1F1 2F1 1B0 2B1 1B1"
    assert "2B0@22 1F1@27" in starts(table(drawn % "3B0 0F1", "V"), costs)[1]
    assert "2B0@27 1F1@29" in starts(table(drawn % "0F1 3B0", "V"), costs)[1]


# ---- skips


def test_a_skip_goes_at_the_latency_and_bandwidth_of_the_border_where_it_starts_down_and_back():
    costs = Costs(1, 1, 1, send=[2, 3], bandwidth=[4, 1], skips={(0, 2): 40})
    assert starts(table("0F0 0B0\n1F0 1B0\n2F0 2B0"), costs) == [
        "0F0@0 0B0@28",  # 2B0 ends at 16: its gradient is there at 16 + 40 / 4 + 2, the chain's through 1B0 at 23
        "1F0@3 1B0@19",
        "2F0@13 2B0@14",  # 0F0 ends at 1: its output is there at 1 + 40 / 4 + 2, the chain's through 1F0 at 7
    ]


def test_a_skip_that_is_there_in_time_delays_nothing():
    rows, chain = table("0F0 0B0\n1F0 1B0\n2F0 2B0"), Costs(1, 1, 1, send=2, bandwidth=4)
    assert starts(rows, replace(chain, skips={(0, 2): 4 * 3})) == starts(rows, chain)
    assert starts(rows, replace(chain, skips={(0, 2): 4 * 5})) != starts(rows, chain)


def test_a_skip_whose_ends_are_on_one_rank_costs_nothing():
    rows, chain = table("0F0 2F0 2B0 0B0\n1F0 1B0", (0, 1, 0)), Costs(1, 1, 1, send=2, size=1, bandwidth=1)
    assert starts(rows, replace(chain, skips={(0, 2): 1000})) == starts(rows, chain)


def test_what_an_action_sends_to_one_rank_goes_one_after_the_other_in_the_order_of_the_stages_that_take_it():
    costs = Costs(1, 1, 1, size=5, bandwidth=1, skips={(0, 3): 7})
    assert starts(table("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0"), costs) == [
        "0F0@0 2F0@12 2B0@33 0B0@47",  # 0F0 sends to 1 from 1 to 6, to 3 until 13; 2F0 from 13 to 18
        "1F0@6 3F0@18 3B0@19 1B0@40",  # 3B0 sends to 0 from 21 to 28, to 2 until 33
    ]


def test_the_halves_of_a_backward_send_the_gradient_of_a_skip_after_the_first_half():
    costs = Costs(1, 2, 3, skips={(0, 2): 10}, bandwidth=1)
    assert starts(table("0F0 0I0 0W0\n1F0 1I0 1W0\n2F0 2I0 2W0"), costs) == [
        "0F0@0 0I0@24 0W0@26",
        "1F0@1 1I0@14 1W0@16",
        "2F0@11 2I0@12 2W0@14",
    ]


def test_the_critical_path_goes_over_a_skip_that_was_waited_for():
    costs = Costs(1, 1, 1, send=[2, 3], bandwidth=[4, 1], skips={(0, 2): 40})
    timeline = simulate(table("0F0 0B0\n1F0 1B0\n2F0 2B0"), costs)
    assert [str(event.action) for event in timeline.critical_path] == ["0F0", "2F0", "2B0", "0B0"]


def test_a_message_that_queued_behind_a_skip_leads_the_critical_path_to_what_sent_the_skip():
    costs = Costs(1, 1, 1, size=1, bandwidth=1, skips={(0, 3): 20})
    timeline = simulate(table("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0"), costs)  # 2F0 ends at 5 and sends after 0F0's, at 22
    assert [str(event.action) for event in timeline.critical_path] == ["0F0", "3F0", "3B0", "2B0", "1B0", "0B0"]


def test_makespan_is_over_all_ranks_and_span_over_one():
    timeline = simulate(table("0F0 0I0 0W0\n1F0 1I0 1W0"), Costs(1, 1, [1, 5]))
    assert (timeline.makespan, timeline.span) == (8, 7)  # rank 0: 0 to 5, rank 1: 1 to 8
    assert (timeline.bubble, timeline.bubble_by_span) == (1 / 8, 0)


def test_a_forward_only_table_is_timed():
    forwards = build("1f1b", 3, 4).filter_actions(lambda action: action.kind is Kind.F)
    assert simulate(forwards, Costs(forward=5)).makespan == (4 + 3 - 1) * 5


# ---- memory


def test_the_memory_curve_counts_an_activation_from_the_start_of_its_forward_and_frees_at_the_ends():
    timeline = simulate(table("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1"), Costs(1, 2, 3, act=[10, 7], keep=[9, 2]))
    assert timeline.memory(0) == [(0, 10), (1, 20), (9, 10), (14, 0)]
    assert timeline.memory(1) == [(1, 7), (4, 2), (4, 9), (7, 4), (10, 2), (13, 0)]
    assert timeline.peak_memory == (20, 9)
    assert timeline.peak_in_flight == (2, 2)


def test_without_a_number_w_keeps_all_of_the_activation():
    timeline = simulate(table("0F0 0I0 0W0"), Costs(act=5))
    assert timeline.memory(0) == [(0, 5), (3, 0)]


@pytest.mark.parametrize("pair", ["0F1 0B0", "0B0 0F1"])
def test_the_forward_of_a_pair_is_in_flight_before_the_backward_ends(pair):
    timeline = simulate(table(PAIRED.replace("0F1 0B0", pair)), Costs(1, 1, 2))
    assert timeline.memory(0) == [(0, 1), (5, 2), (9, 1), (16, 0)]
    assert timeline.peak_in_flight == timeline.peak_memory == (2, 1)


# ---- against a plain recursion over what each action waits for


class Circle(Exception):
    pass


Times = dict[Action, tuple[float, float]]  # when it starts and ends


def times_by_recursion(schedule: Schedule, costs: Costs) -> Callable[[Action | None], Times]:
    """Start and end of every action, the longest path that leads there, if one action takes 1 longer. Costs are lists."""
    rows = [[cell if isinstance(cell[0], Action) else (cell,) for cell in schedule.cells(r)] for r in range(schedule.ranks)]
    before = {cell: previous for row in rows for previous, cell in pairwise(row)}
    cell_of = {action: cell for row in rows for cell in row for action in cell}
    made = [
        (value, action) for row in schedule.actions for action in row for value in makes(action, schedule.stages, costs.skips)
    ]
    maker, home = dict(made), schedule.placement
    taken = {cell: [v for action in cell for v in takes(action, schedule.stages, costs.skips)] for row in rows for cell in row}
    queues = defaultdict(list)
    for value, action in made:
        queues[home[action.stage], home[value.stage]].append(value)
    ahead = {value: first for ends, queue in queues.items() if ends[0] != ends[1] for first, value in pairwise(queue)}
    kinds = {"F": [costs.forward], "I": [costs.backward_input], "W": [costs.backward_weight]}
    kinds["B"] = kinds["I"] + kinds["W"]

    def price(cell: tuple[Action, ...]) -> float:
        prices = [sum(part[action.stage] for part in kinds[action.kind.value]) for action in cell]
        return sum(prices) - (costs.overlap * min(prices) if len(cell) == 2 else 0)

    def times(late: Action | None = None) -> Times:
        open_cells = set()

        @cache
        def begin(cell: tuple[Action, ...]) -> float:
            if cell in open_cells:
                raise Circle
            open_cells.add(cell)
            arrivals = list(map(arrival, taken[cell]))
            open_cells.remove(cell)
            return max([*arrivals, end(before[cell]) if cell in before else 0])

        @cache
        def end(cell: tuple[Action, ...]) -> float:
            return begin(cell) + price(cell) + (late in cell)

        @cache
        def gone(value: Value) -> float:
            """When the value has left its channel."""
            free = gone(ahead[value]) if value in ahead else 0
            ends = sorted((value.stage, maker[value].stage))
            size = costs.size[ends[0]] if value.past is None else costs.skips[tuple(ends)]
            return max(free, end(cell_of[maker[value]])) + size / costs.bandwidth[ends[0]]

        def arrival(value: Value) -> float:
            if home[value.stage] == home[maker[value].stage]:
                return end(cell_of[maker[value]])
            return gone(value) + costs.send[min(value.stage, maker[value].stage)]

        return {action: (begin(cell), end(cell)) for action, cell in cell_of.items()}

    return times


def runs(schedule: Schedule) -> bool:
    free = [0] * schedule.stages
    try:
        times_by_recursion(schedule, Costs(free, free, free, free, free, [1] * schedule.stages))()
    except Circle:
        return False
    return True


@st.composite
def paired_tables(draw: st.DrawFn, stopping: bool) -> Schedule:
    """Tables in which some actions that stand next to each other are pairs; with `stopping`, also such as cannot run."""
    schedule = draw(valid_tables() | named_tables())
    dice, share = random.Random(draw(whole_numbers(0, 2**32 - 1))), draw(st.sampled_from([0, 0.1, 0.4]))
    for pair in [pair for row in schedule.actions for pair in pairwise(row)]:
        taken = {action for other in schedule.overlaps for action in other}
        if dice.random() < share and taken.isdisjoint(pair):
            paired = replace(schedule, overlaps=schedule.overlaps | {pair})
            schedule = paired if stopping or runs(paired) else schedule
    return schedule


@st.composite
def timed_tables(draw: st.DrawFn, stopping: bool = False) -> tuple[Schedule, Costs]:
    schedule = draw(paired_tables(stopping))
    prices = st.lists(whole_numbers(0, 5), min_size=schedule.stages, max_size=schedule.stages)
    borders = {"min_size": schedule.stages - 1, "max_size": schedule.stages - 1}
    send, size = (draw(st.lists(whole_numbers(0, 3), **borders)) for _ in range(2))
    bandwidth = draw(st.lists(st.sampled_from([0.5, 1, 2, float("inf")]), **borders))
    overlap = draw(st.sampled_from([0, 0.5, 1]))
    skips = {skip: draw(whole_numbers(0, 6)) for skip in sorted(draw(some_skips(schedule.stages)))}
    return schedule, Costs(draw(prices), draw(prices), draw(prices), send, size, bandwidth, overlap=overlap, skips=skips)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(timed_tables() | timed_tables(stopping=True))
def test_every_action_starts_and_ends_where_the_longest_path_to_it_does(timed):
    schedule, costs = timed
    try:
        expected = times_by_recursion(schedule, costs)()
    except Circle:
        with pytest.raises(ScheduleError, match="waits for ever"):
            simulate(schedule, costs)
        return
    timeline = simulate(schedule, costs)
    assert tuple(tuple(event.action for event in row) for row in timeline.rows) == schedule.actions
    assert {event.action: (event.start, event.end) for event in timeline.events} == expected


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(timed_tables())
def test_whatever_is_late_on_the_critical_path_makes_the_step_as_much_longer(timed):
    schedule, costs = timed
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    assert (path[0].start, path[-1].end) == (0, timeline.makespan)
    for event, following in pairwise(path):
        assert event.end <= following.start
    times = times_by_recursion(schedule, costs)
    for event in path:
        assert max(end for _, end in times(event.action).values()) == timeline.makespan + 1


def test_a_message_that_queued_leads_the_critical_path_to_where_the_queue_began():
    timeline = simulate(table("0F0 0F1 0F2\n1F0 1F1 1F2"), Costs(1, send=3, size=4, bandwidth=2))
    assert [str(event.action) for event in timeline.critical_path] == ["0F0", "1F2"]  # 0F1 and 0F2 could be later


def test_a_backward_to_the_weights_sends_nothing_that_could_queue():
    halves = table("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1F1 1I0 1W0 1I1 1W1")
    timeline = simulate(halves, Costs(1, [5, 1], 1, size=4, bandwidth=1))  # 1I1's gradient is there at 19, 0I0 ends at 20
    path = " ".join(str(event.action) for event in timeline.critical_path)
    assert path == "0F0 1F1 1I0 0I0 0I1 0W0 0W1"


@pytest.mark.costly
@settings(max_examples=100, deadline=None)
@given(timed_tables())
def test_the_memory_curve_begins_and_ends_with_nothing_and_its_peak_is_counted(timed):
    schedule, costs = timed
    timeline = simulate(schedule, costs)
    assert timeline.peak_in_flight == timeline.peak_memory
    assert timeline.peak_in_flight == peaks_in_flight(map(schedule.cells, range(schedule.ranks)))
    for rank in range(schedule.ranks):
        times, held = zip(*timeline.memory(rank), strict=True) if timeline.rows[rank] else ([], [0])
        assert list(times) == sorted(times)
        assert (min(held), held[-1]) == (0, 0)


# ---- what cannot be timed

WRONG_COSTS = [
    (Costs(forward=[1, 2]),                  "forward has 2 costs for 3 stages: give one number, or one for each stage"),
    (Costs(backward_input=[1, 2, 3, 4]),     "backward_input has 4 costs for 3 stages: give one number, or one for each stage"),
    (Costs(backward_weight=[1, -2, 3]),      "backward_weight has the cost -2.0: a cost is a time, 0 or more"),
    (Costs(forward=-1),                      "forward has the cost -1.0: a cost is a time, 0 or more"),
    (Costs(forward=float("nan")),            "forward has the cost nan: a cost is a time, 0 or more"),
    (Costs(send=-1),                         "send has the cost -1.0: a cost is a time, 0 or more"),
    (Costs(send=float("nan")),               "send has the cost nan: a cost is a time, 0 or more"),
    (Costs(send=[1, 2, 3]),                  "send has 3 costs for 2 borders: give one number, or one for each border"),
    (Costs(size=[1]),                        "size has 1 costs for 2 borders: give one number, or one for each border"),
    (Costs(size=-8),                         "size has the cost -8.0: a cost is a number of bytes, 0 or more"),
    (Costs(bandwidth=[1, 2, 3]),             "bandwidth has 3 costs for 2 borders: give one number, or one for each border"),
    (Costs(bandwidth=0),                     "bandwidth has 0.0: give bytes per unit of time, more than 0"),
    (Costs(bandwidth=float("nan")),          "bandwidth has nan: give bytes per unit of time, more than 0"),
    (Costs(act=[1, 2]),                      "act has 2 costs for 3 stages: give one number, or one for each stage"),
    (Costs(act=-1),                          "act has the cost -1.0: a cost is an amount of memory, 0 or more"),
    (Costs(keep=-1),                         "keep has the cost -1.0: a cost is an amount of memory, 0 or more"),
    (Costs(overlap=1.5),                     "overlap is 1.5: give the share of the shorter action that is hidden, 0 to 1"),
    (Costs(overlap=-0.5),                    "overlap is -0.5: give the share of the shorter action that is hidden, 0 to 1"),
    (Costs(skips={(0, 1): 8}),               "no skip goes from stage 0 to stage 1 of 3: it passes at least one by"),
    (Costs(skips={(2, 0): 8}),               "no skip goes from stage 2 to stage 0 of 3: it passes at least one by"),
    (Costs(skips={(1, 3): 8}),               "no skip goes from stage 1 to stage 3 of 3: it passes at least one by"),
    (Costs(skips={(-1, 1): 8}),              "no skip goes from stage -1 to stage 1 of 3: it passes at least one by"),
    (Costs(skips={(0, 2): -8}),              "skips has the cost -8.0: a cost is a number of bytes, 0 or more"),
    (Costs(skips={(0, 2): float("nan")}),    "skips has the cost nan: a cost is a number of bytes, 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("costs", "message"), WRONG_COSTS)
def test_a_cost_that_is_no_time_is_refused(costs, message):
    with pytest.raises(ScheduleError) as caught:
        simulate(build("1f1b", 3, 4), costs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0 0F0", "drawn stops: rank 0 waits for ever before 0B0"),
        ("0F0 0W0 0I0", "drawn stops: rank 0 waits for ever before 0W0"),
        ("0F0 0B0\n1B0", "drawn stops: rank 0 waits for ever before 0B0"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "drawn stops: rank 0 waits for ever before 0B0"),
        ("{0F0 0B0}\n1F0 1B0", "drawn stops: rank 0 waits for ever before 0F0"),  # a pair is one: it waits for 1B0, and so on
    ],
)
def test_a_table_that_stops_is_not_timed(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(table(text))


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (Schedule("odd", (0, 1), 1, ([Action(Kind.F, 1, 0)], [])), "odd cannot be timed: rank 0 has 1F0 (see verify)"),
        (Schedule("odd", (0,), 1, ([Action(Kind.F, 2, 0)],)), "odd cannot be timed: rank 0 has 2F0 (see verify)"),
        (Schedule("odd", (0,), 1, ([Action(Kind.F, 0, 1)],)), "odd cannot be timed: rank 0 has 0F1 (see verify)"),
    ],
)
def test_an_action_that_is_not_its_ranks_is_not_timed(drawn, message):
    with pytest.raises(ScheduleError) as caught:
        simulate(drawn)
    assert str(caught.value) == message


def test_a_table_without_actions_takes_no_time():
    assert simulate(from_rows("none", [[], []], "loop")).makespan == 0


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects):
    gc.enable() if collects else gc.disable()
    try:
        simulate(build("1f1b", 2, 2))
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_the_order_of_ranks_does_not_matter():
    down, up = build("1f1b", 3, 4), build("1f1b", 3, 4)
    up = Schedule("up", tuple(reversed(up.placement)), 4, tuple(reversed(up.actions)))
    costs = Costs([1, 4, 2], 2, 1, send=1)
    assert simulate(up, costs).makespan == simulate(down, costs).makespan
    assert [row[0].start for row in simulate(up, costs).rows] == [row[0].start for row in reversed(simulate(down, costs).rows)]
