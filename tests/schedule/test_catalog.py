"""Schedules by name: what can be built, and what is told when it cannot."""

import pytest

from penstock.schedule import ScheduleError, build, names
from penstock.schedule.catalog import FAMILIES


def test_the_names_are_those_that_can_be_built():
    assert {"naive", "gpipe", "1f1b"} <= set(names())
    for name in names():
        schedule = build(name, ranks=4, microbatches=8)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 4, 8)


def test_one_stage_on_each_rank_can_be_said_or_left_out():
    for name in ("naive", "gpipe", "1f1b"):
        assert build(name, 3, 4, stages_per_rank=1) == build(name, 3, 4) == build(name, 3, 4, stages_per_rank=None)
        assert build(name, 3, 4).placement == (0, 1, 2)


def test_every_family_is_described_in_words():
    for name, family in FAMILIES.items():
        assert family.summary, name
        assert "`" not in family.summary, name
        assert "\n" not in family.summary, name
        assert all((family.needs, family.bubble, family.in_flight)), name


NEAR = [
    ("1F1B",   "1f1b"),
    ("1fb1",   "1f1b"),
    ("1f1b1",  "1f1b"),
    ("GPipe",  "gpipe"),
    ("g_pipe", "gpipe"),
    ("gpip",   "gpipe"),
    ("niave",  "naive"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "near"), NEAR)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(name, near):
    with pytest.raises(ScheduleError) as caught:
        build(name, 2, 2)
    assert str(caught.value) == f"unknown schedule {name!r} (did you mean {near}?): choose from {', '.join(names())}"


@pytest.mark.parametrize("name", ["", "xyzzy"])
def test_a_name_near_to_none_is_answered_with_all(name):
    with pytest.raises(ScheduleError) as caught:
        build(name, 2, 2)
    assert str(caught.value) == f"unknown schedule {name!r}: choose from {', '.join(names())}"


WRONG = [
    # P    M     V     what is told
    (0,    4,    None, "1f1b cannot be built with ranks=0: use a whole number of 1 or more"),
    (-2,   4,    None, "1f1b cannot be built with ranks=-2: use a whole number of 1 or more"),
    (2.0,  4,    None, "1f1b cannot be built with ranks=2.0: use a whole number of 1 or more"),
    ("2",  4,    None, "1f1b cannot be built with ranks='2': use a whole number of 1 or more"),
    (2,    0,    None, "1f1b cannot be built with microbatches=0: use a whole number of 1 or more"),
    (2,    None, None, "1f1b cannot be built with microbatches=None: use a whole number of 1 or more"),
    (2,    4,    2,    "1f1b has one stage on each rank, not stages_per_rank=2: leave it out"),
    (2,    4,    0,    "1f1b has one stage on each rank, not stages_per_rank=0: leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches", "stages_per_rank", "told"), WRONG)
def test_a_wrong_number_is_told(ranks, microbatches, stages_per_rank, told):
    with pytest.raises(ScheduleError) as caught:
        build("1f1b", ranks, microbatches, stages_per_rank)
    assert str(caught.value) == told


def test_an_option_that_a_schedule_does_not_have_is_refused():
    with pytest.raises(ScheduleError, match="gpipe has no option depth, groups"):
        build("gpipe", 2, 2, groups=2, depth=1)


def test_a_schedule_error_is_a_value_error():
    with pytest.raises(ValueError, match="unknown schedule"):
        build("spam", 2, 2)
