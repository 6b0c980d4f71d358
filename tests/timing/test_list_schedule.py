"""Tables from a priority: complete, proved, within their limit, and what is refused."""

import ast
import inspect
import random
from itertools import pairwise

import pytest
from example_rules import RULES
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Action, Costs, Kind, RankProgress, ScheduleError, build, list_schedule, simulate, verify


def backward_first(action, progress):
    return action.kind is Kind.F


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (3, 1), (4, 8), (8, 16)])
def test_backward_first_in_one_activation_more_for_each_rank_below_is_1f1b(ranks: int, microbatches: int) -> None:
    limit = [ranks - rank for rank in range(ranks)]
    table = list_schedule("loop", backward_first, ranks=ranks, microbatches=microbatches, limit=limit)
    assert table.actions == build("1f1b", ranks, microbatches).actions
    assert table.name == "backward_first"


def test_forwards_first_without_a_limit_is_gpipe() -> None:
    table = list_schedule("loop", lambda action, progress: action.kind is Kind.B, ranks=3, microbatches=4)
    assert (table.actions, table.name) == (build("gpipe", 3, 4).actions, "list-schedule")


def test_of_equal_priorities_the_lowest_microbatch_goes_first_then_the_lowest_stage() -> None:
    table = list_schedule([0, 0, 0], lambda action, progress: 0, ranks=1, microbatches=2)
    assert table.csv_rows() == [["0F0", "1F0", "2F0", "2B0", "1B0", "0B0", "0F1", "1F1", "2F1", "2B1", "1B1", "0B1"]]


@pytest.mark.costly
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_priority_any_placement_and_any_limit_give_a_proved_table_within_the_limit(data) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    more = data.draw(st.lists(st.integers(0, ranks - 1), max_size=6))
    placement = data.draw(st.permutations([*range(ranks), *more]))
    limit = [placement.count(rank) + data.draw(st.integers(0, 3)) for rank in range(ranks)]
    draw = random.Random(data.draw(st.integers(0, 99)))
    costs = Costs(draw.random(), draw.random(), draw.random(), send=draw.choice([0, draw.random()]))
    table = list_schedule(
        placement, lambda action, progress: draw.random(), ranks=ranks, microbatches=microbatches, limit=limit, costs=costs,
        split_backwards=draw.random() < 0.5,
    )  # fmt: skip
    verify(table, max_in_flight=limit)
    assert table.placement == tuple(placement)
    for row in table.actions:  # the microbatches of a stage in their order, so that sums of gradients have the same bits
        for key in {action[:2] for action in row}:
            assert all(a < b for a, b in pairwise(action.microbatch for action in row if action[:2] == key))


def test_the_times_are_those_of_the_simulation() -> None:
    costs, times = Costs(forward=[1, 2, 3], backward_input=2, backward_weight=1, send=0.5, size=4, bandwidth=8), {}

    def note_time(action: Action, progress: RankProgress) -> int:
        times[action] = progress.time  # the last time is when it was chosen
        return action.microbatch

    table = list_schedule("loop", note_time, ranks=3, microbatches=4, costs=costs)
    assert {event.action: event.start for event in simulate(table, costs).events} == times


def test_a_priority_sees_what_its_rank_has_run() -> None:
    seen = {}

    def note(action: Action, progress: RankProgress) -> bool:
        seen[action] = progress
        return action.kind is Kind.F

    list_schedule("loop", note, ranks=1, microbatches=2)
    assert seen[Action.parse("0F0")] == RankProgress(0, 0.0, 0, None)
    assert seen[Action.parse("0B0")] == RankProgress(0, 1.0, 1, Action.parse("0F0"))
    assert seen[Action.parse("0B1")] == RankProgress(0, 4.0, 1, Action.parse("0F1"))


def test_backwards_in_halves_leave_the_weights_for_when_nothing_else_is_ready() -> None:
    def weights_last(action, progress):
        return "IFW".index(action.kind.value)

    table = list_schedule("loop", weights_last, ranks=4, microbatches=8, limit=4, split_backwards=True)
    assert verify(table, max_in_flight=4).actions == 4 * 8 * 3
    assert simulate(table).makespan < simulate(build("1f1b", 4, 8)).makespan == 33


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_three_of_the_gallery_are_proved_for_all_sizes(rule) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 5, 8):
            table = rule(ranks, microbatches)
            verify(table)
            assert (table.ranks, table.microbatches) == (ranks, microbatches)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_of_the_three_is_written_in_at_most_eight_lines(rule) -> None:
    function = ast.parse(inspect.getsource(rule)).body[0]
    function.body = function.body[1:]  # without the docstring
    assert len(ast.unparse(function).replace("\n\n", "\n").splitlines()) <= 8


def test_the_three_of_the_gallery_are_as_short_as_the_pages_say() -> None:
    def bubble(table):
        share = table.ranks / table.stages
        return round(simulate(table, Costs(share, share, share)).bubble, 3)

    assert [bubble(rule(4, 8)) for rule in RULES] == [0.273, 0.127, 0.172]
    eager, late = (
        simulate(table, Costs(send=0.5)).makespan for table in (RULES[0](4, 8), build("1f1b", ranks=4, microbatches=8))
    )
    assert eager < late


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 1}, "limit=1 is too small on rank 0, since one microbatch holds 2 activations on rank 0: use 2 or more"),
        ({"limit": [2, 1]}, "limit=1 is too small on rank 1"),
        ({"limit": [2, 2, 2]}, "limit has 3 numbers for 2 ranks"),
        ({"placement": "W"}, "unknown placement 'W': use loop or V"),
        ({"placement": [0, 0]}, r"the placement \[0, 0\] has no stage on rank 1 of 2: give each rank a stage"),
        ({"placement": [0, 1, 2]}, "the placement has stage 2 on rank 2: use ranks from 0 to 1"),
        ({"placement": [0, 1], "stages_per_rank": 2}, "the placement has the rank of every stage: leave out stages_per_rank"),
        ({"microbatches": 0}, "microbatches=0 of a list schedule: use a whole number of 1 or more"),
        ({"costs": Costs(forward=[1, 2])}, "forward has 2 costs for 4 stages"),
        ({"priority": lambda action, progress: None}, "the priorities None for .*, None for .* have no order: return numbers"),
    ],
)
def test_what_no_list_schedule_can_have_is_refused(arguments, message) -> None:
    usual = {"placement": "V", "priority": backward_first, "ranks": 2, "microbatches": 3}
    with pytest.raises(ScheduleError, match=message):
        list_schedule(**{**usual, **arguments})
