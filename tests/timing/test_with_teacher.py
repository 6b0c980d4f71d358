"""The forwards of a second model in the idle time of a table."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from slow_cases import slow_except

from penstock.schedule import Costs, Schedule, ScheduleError, build, from_rows, names, simulate, verify, with_teacher
from penstock.timing import teacher_tables
from penstock.timing.teacher_stages import costs_with_teacher, teacher_ranks, with_even_teacher, with_passed_inputs


def without_teacher(table: Schedule) -> tuple[tuple[object, ...], ...]:
    """Return the model's own actions, I and W of the last microbatch as one B."""
    return tuple(
        tuple(
            action._replace(kind=type(action.kind).B) if action.kind.value == "I" else action
            for action in row
            if action.stage < table.num_trained_stages and action.kind.value != "W"
        )
        for row in table.actions
    )


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "ahead"), slow_except([("1f1b", False), *((name, True) for name in names())], product(names(), [True, False]))
)
def test_every_family_has_a_proved_table_with_a_teacher(name: str, ahead: bool) -> None:
    for ranks, microbatches in ((1, 2), (3, 4)):
        own = build(name, ranks, microbatches)
        table = with_teacher(own, ahead=ahead)
        proof = verify(table, max_in_flight=verify(own).peak_in_flight)
        assert proof.num_stages == 2 * own.stages
        assert without_teacher(table) == without_teacher(own)  # in its order, so that gradients have their bits
        assert table == with_teacher(own, ahead=ahead)  # the same on every rank


@pytest.mark.parametrize(
    ("name", "ahead", "makespan", "own"),
    [
        ("1f1b", True, 35, 33),  # at least: 3 until the last rank's first input, 4 x 8 work
        ("1f1b", False, 38, 33),
        ("gpipe", True, 35, 33),
        ("interleaved-1f1b", True, 67, 57),
        ("zb-h1", True, 35, 27),
        ("zb-h1", False, 35, 27),
        ("zb-v", True, 67, 51),
        ("zb-v", False, 67, 51),
    ],
)
def test_the_step_grows_by_little_of_what_the_teacher_takes(name: str, ahead: bool, makespan: float, own: float) -> None:
    table = build(name, ranks=4, microbatches=8)
    assert simulate(table).makespan == own
    assert simulate(with_teacher(table, ahead=ahead)).makespan == makespan


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "size", "ahead", "now", "own"),
    [
        ("1f1b", 1, 33, 35, 33),  # no longer than the model's own; 1.06
        pytest.param("interleaved-1f1b", 1, 65, 67, 57, marks=pytest.mark.slow),  # 1.14, and 1.12 for the work alone
        ("zb-h1", 1, 33, 33, 27),  # 1.22, and 1.19
        ("zb-v", 1, 65, 65, 51),  # 1.27, and 1.25
        pytest.param("1f1b", 2, 41, 43, 33, marks=pytest.mark.slow),  # 1.24, and 1.21
        pytest.param("zb-h1", 2, 41, 41, 27, marks=pytest.mark.slow),  # 1.52, and 1.48
    ],
)
def test_a_teacher_in_a_v_works_from_the_beginning(name: str, size: float, ahead: float, now: float, own: float) -> None:
    table = build(name, ranks=4, microbatches=8)
    placement = teacher_ranks(table, forward_ratio=size)
    assert placement == ((3, 2, 1, 0, 3, 2, 1, 0) if name == "zb-v" else (3, 2, 1, 0, 0, 1, 2, 3))
    costs = costs_with_teacher(Costs(), table.stages, len(placement), size)
    assert simulate(table).makespan == own
    assert simulate(with_teacher(table, placement, True, costs), costs).makespan == ahead
    assert simulate(with_teacher(table, placement, False, costs), costs).makespan == now


@pytest.mark.costly
def test_a_v_needs_layers_and_messages_that_are_fast() -> None:
    table = build("zb-h1", ranks=4, microbatches=8)
    assert with_teacher(table, "V").placement[4:] == (3, 2, 1, 0, 0, 1, 2, 3)
    assert teacher_ranks(table, max_stages=7) == table.placement
    assert teacher_ranks(table, Costs(send=1)) == table.placement
    assert teacher_ranks(build("1f1b", 1, 4)) == (0,)


def test_pipelines_with_equal_tables_place_a_teacher_that_is_cut_evenly_once() -> None:
    tables = [with_even_teacher(build("1f1b", 2, 4), (0, 1), True, 0.5) for _ in range(2)]
    assert tables[0] is tables[1]
    assert tables[0] == with_teacher(build("1f1b", 2, 4), (0, 1), True, costs_with_teacher(Costs(), 2, 2, 0.5))


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "zb-h1")) for name in names()])
def test_inputs_are_passed_on_before_they_are_needed(name: str, ahead: bool) -> None:
    for ranks, microbatches in ((2, 4), (3, 3)):
        own = build(name, ranks, microbatches)
        stages, costs = own.stages, costs_with_teacher(Costs(), own.stages, 2 * ranks)
        table = with_teacher(own, "V", ahead, costs)
        passing = with_passed_inputs(table, costs)
        if table.placement[stages] == own.placement[0]:
            assert passing is table
            continue
        assert passing.placement == (*own.placement, 0, *table.placement[stages:])
        assert verify(passing).actions == verify(table).actions + microbatches
        backwards = [1] * stages + [0] * (2 * ranks + 1)
        forwards = [*[1] * stages, 0, *[stages / (2 * ranks)] * (2 * ranks)]
        assert simulate(passing, Costs(forwards, backwards, backwards)).makespan == simulate(table, costs).makespan


@pytest.mark.costly
def test_costs_of_a_teacher_follow_the_models() -> None:
    costs = costs_with_teacher(Costs([1, 3], 1, 2, send=[0.5], act=[1, 2], keep=1, backward=[4, 5]), 2, 4, forward_ratio=2)
    assert costs.forward == [1, 3, 2, 2, 2, 2]
    assert costs.backward == [4, 5, 0, 0, 0, 0]
    assert costs.send == [0.5] * 5
    assert costs.act == [1, 2, 0, 0, 0, 0]
    costs = replace(costs, backward=None)
    table = with_teacher(build("1f1b", 2, 2), "V", costs=costs)
    assert simulate(table, costs).makespan >= 2 * (3 + 3 + 4)


@pytest.mark.costly
def test_costs_decide_where_the_forwards_are() -> None:
    own = build("1f1b", ranks=2, microbatches=4)
    costs = Costs(forward=[1, 1, 5, 0.5], send=0.5)
    assert simulate(with_teacher(own, costs=costs), costs).makespan < simulate(with_teacher(own), costs).makespan


def test_places_are_justified_until_no_rank_could_end_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, justify = [], teacher_tables._Graph.justify
    monkeypatch.setattr(teacher_tables._Graph, "justify", lambda *arguments: (rounds.append(1), justify(*arguments))[1])
    table = with_teacher(build("zb-h1", ranks=4, microbatches=8), ahead=False)
    assert (simulate(table).makespan, len(rounds)) == (35, 0)
    slow = with_teacher(build("zb-h1", ranks=4, microbatches=8), "V", costs=costs_with_teacher(Costs(), 4, 8, 3))
    assert slow.teacher == 4
    assert 0 < len(rounds) <= 300


def test_halves_behind_a_ranks_last_forward_fill_waits_in_the_order_of_their_stage() -> None:
    own = build("1f1b", ranks=4, microbatches=8)
    table = with_teacher(own, "V", costs=costs_with_teacher(Costs(), 4, 8))
    for rank, row in enumerate(table.actions):
        last_forward = max(number for number, action in enumerate(row) if action.kind.value == "F" and action.stage < 4)
        halves = [(number, action) for number, action in enumerate(row) if action.kind.value == "W"]
        assert all(number > last_forward for number, _ in halves)
        assert [action.microbatch for _, action in halves] == sorted(action.microbatch for _, action in halves)
        assert bool(halves) == (rank > 0)  # stage 0 sends no gradient that another rank waits for


def test_sums_of_a_stages_weight_gradients_keep_their_order() -> None:
    """The first W, free to fill a wait, once went before the sums of the microbatches before it."""
    rows = [["0F0", "0F1", "0F2", "0I0", "0I1", "0W0", "0F3", "0W1", "0B2", "0I3", "0W3"]]
    own = from_rows("mixed", rows)
    for size in (0.5, 1, 3):
        table = with_teacher(own, costs=costs_with_teacher(Costs(1, 1, [3]), 1, 1, size))
        sums = [action.microbatch for action in table.actions[0] if action.kind.value in "BW"]
        assert sums == [0, 1, 2, 3]


@pytest.mark.costly
def test_forwards_that_take_no_time_are_placed_too() -> None:
    costs = Costs([1, 1, 1, 5, 5, 0], [0, 0, 0, 1, 1, 1], [1, 1, 5, 5, 1, 1], 0.3, overlap=0.5)
    table = with_teacher(build("zb-h2", ranks=3, microbatches=1), ahead=False, costs=costs)
    assert verify(table).actions == 12  # this table once came back without them


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "stages", "ahead", "limit", "makespan"),
    slow_except(
        [("zb-h1", None, True, 8, 35), ("zb-v", None, False, 1, 67)],
        [
            ("zb-h1", None, True, 8, 35),
            ("zb-v", None, False, 1, 67),
            ("zb-v", None, True, 8, 67),
            ("1f1b", None, False, 1, 38),
            ("1f1b", "V", True, 8, 41),
            ("interleaved-1f1b", None, False, 1, 70),
            ("zb-h1", "V", False, 1, 41),
        ],
    ),
)
def test_at_most_so_many_of_a_teachers_outputs_wait(name: str, stages: Any, ahead: bool, limit: int, makespan: float) -> None:
    own = build(name, ranks=4, microbatches=8)
    table = with_teacher(own, stages, ahead, max_waiting_outputs=limit)
    assert verify(table).peak_waiting_outputs == limit
    assert simulate(table).makespan == makespan
    assert without_teacher(table) == without_teacher(own)


@pytest.mark.parametrize(("ahead", "waiting"), [(True, 8), (False, 1)])
def test_of_steps_that_take_as_long_the_one_is_made_in_which_fewer_outputs_wait(ahead: bool, waiting: int) -> None:
    table = with_teacher(build("zb-h1", ranks=4, microbatches=8), ahead=ahead)
    assert simulate(table).makespan == 35
    assert verify(table).peak_waiting_outputs == waiting  # once 16 and 8


@pytest.mark.parametrize(
    ("ahead", "limit", "says"),
    [
        (True, 3, "max_waiting_outputs=3: give 4 or more, since all 4 outputs of a batch wait between two steps"),
        (False, 0, "max_waiting_outputs=0: give 1 or more"),
        (False, "1GB", "max_waiting_outputs='1GB': give 1 or more"),
    ],
)
def test_a_limit_on_waiting_outputs_that_cannot_be_is_a_sentence(ahead: bool, limit: Any, says: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
        with_teacher(build("1f1b", 2, 4), ahead=ahead, max_waiting_outputs=limit)


def test_losses_in_another_order_than_the_teachers_outputs_need_a_higher_limit() -> None:
    own = from_rows("swapped", [["0F1", "0F0", "0B1", "0B0"]])
    assert verify(with_teacher(own, ahead=False, max_waiting_outputs=2)).peak_waiting_outputs == 2
    with pytest.raises(
        ScheduleError, match="no table of swapped with a teacher was found for max_waiting_outputs=1: give a higher"
    ):
        with_teacher(own, ahead=False, max_waiting_outputs=1)


def test_a_teacher_may_have_other_stages() -> None:
    own = build("1f1b", ranks=4, microbatches=4)
    assert with_teacher(own, stages=2).placement == (0, 1, 2, 3, 2, 3)
    assert with_teacher(own, stages=[0, 3]).placement == (0, 1, 2, 3, 0, 3)
    assert verify(with_teacher(own, stages=1)).num_stages == 5


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (0, "give 1 to 2, or a list with the rank of each"),
        (3, "give 1 to 2, or a list with the rank of each"),
        ([], "has a teacher from stage 2 on"),
        ([1, 0], "the teacher's last stage 3 is on rank 0, but the loss"),
        ([1, 2, 1], "the ranks are 0 to 1"),
        ("W", "has a teacher from stage 2 on"),
    ],
)
def test_a_teacher_that_cannot_be_is_a_sentence(stages: object, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        with_teacher(build("1f1b", 2, 4), stages=stages)  # type: ignore[arg-type]


def test_a_table_that_is_not_complete_or_has_a_teacher_gets_none() -> None:
    with pytest.raises(ScheduleError, match="lacks 0B0"):
        with_teacher(from_rows("half", [["0F0"]]))
    with pytest.raises(ScheduleError, match="has a teacher already, from stage 2 on"):
        with_teacher(with_teacher(build("1f1b", 2, 4)))
    with pytest.raises(ScheduleError, match="has 2 slices and a teacher"):
        with_teacher(build("1f1b", 2, 4, slices=2))
    with pytest.raises(ScheduleError, match="stuck with a teacher ahead stops: rank 0 waits for ever before 0B0"):
        with_teacher(from_rows("stuck", [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]))
