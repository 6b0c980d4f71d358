"""The forwards of a second model in the idle time of a table."""

from itertools import product

import pytest
from slow_cases import slow_except

from penstock.schedule import Costs, Schedule, ScheduleError, build, from_rows, names, simulate, verify, with_teacher


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
        ("1f1b", False, 39, 33),
        ("gpipe", True, 35, 33),
        ("interleaved-1f1b", True, 68, 57),
        ("zb-h1", True, 35, 27),
        ("zb-v", True, 67, 51),
        ("zb-v", False, 67, 51),
    ],
)
def test_the_step_grows_by_little_of_what_the_teacher_takes(name: str, ahead: bool, makespan: float, own: float) -> None:
    table = build(name, ranks=4, microbatches=8)
    assert simulate(table).makespan == own
    assert simulate(with_teacher(table, ahead=ahead)).makespan == makespan


def test_costs_decide_where_the_forwards_are() -> None:
    own = build("1f1b", ranks=2, microbatches=4)
    costs = Costs(forward=[1, 1, 5, 0.5], send=0.5)
    assert simulate(with_teacher(own, costs=costs), costs).makespan < simulate(with_teacher(own), costs).makespan


@pytest.mark.costly
def test_forwards_that_take_no_time_are_placed_too() -> None:
    costs = Costs([1, 1, 1, 5, 5, 0], [0, 0, 0, 1, 1, 1], [1, 1, 5, 5, 1, 1], 0.3, overlap=0.5)
    table = with_teacher(build("zb-h2", ranks=3, microbatches=1), ahead=False, costs=costs)
    assert verify(table).actions == 12  # this table once came back without them


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
