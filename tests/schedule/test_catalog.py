"""Schedules by name: what can be built, and what is told when it cannot."""

import pytest

from penstock.schedule import ScheduleError, build, names
from penstock.schedule.catalog import FAMILIES

PLACED = {
    # V and the rank of every stage over 3 ranks
    "naive": (1, (0, 1, 2)),
    "gpipe": (1, (0, 1, 2)),
    "1f1b": (1, (0, 1, 2)),
    "interleaved-1f1b": (2, (0, 1, 2, 0, 1, 2)),
    "looped-bfs": (2, (0, 1, 2, 0, 1, 2)),
    "zb-h1": (1, (0, 1, 2)),
    "zb-h2": (1, (0, 1, 2)),
    "interleaved-zb": (2, (0, 1, 2, 0, 1, 2)),
    "zb-v": (2, (0, 1, 2, 2, 1, 0)),
    "v-half": (2, (0, 1, 2, 2, 1, 0)),
    "v-min": (2, (0, 1, 2, 2, 1, 0)),
    "dualpipe-v": (2, (0, 1, 2, 2, 1, 0)),
}


def test_the_names_are_those_that_can_be_built():
    assert set(names()) == PLACED.keys() == FAMILIES.keys()
    for name in names():
        schedule = build(name, ranks=4, microbatches=8)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 4, 8)


@pytest.mark.parametrize("name", PLACED)
def test_the_number_of_stages_on_each_rank_can_be_said_or_left_out(name):
    stages_per_rank, placement = PLACED[name]
    assert build(name, 3, 4).placement == placement
    assert build(name, 3, 4, stages_per_rank) == build(name, 3, 4) == build(name, 3, 4, stages_per_rank=None)


@pytest.mark.parametrize("name", PLACED)
def test_whole_microbatches_are_one_slice_of_every_family(name):
    assert build(name, 3, 4, slices=1) == build(name, 3, 4)
    for wrong in (True, 1.0, 0):
        with pytest.raises(ScheduleError, match=r"no option slices|use a whole number of 1 or more"):
            build(name, 3, 4, slices=wrong)


def test_an_option_of_none_is_the_familys_default():
    assert build("gpipe", 3, 4, slices=None) == build("gpipe", 3, 4)
    assert build("interleaved-1f1b", 3, 4, group_size=None) == build("interleaved-1f1b", 3, 4)


def test_every_family_is_described_in_words():
    for name, family in FAMILIES.items():
        assert family.summary, name
        assert "`" not in family.summary, name
        assert "\n" not in family.summary, name
        assert all((family.stages_per_rank_text, family.bubble, family.in_flight)), name


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
    (4, 10**12,  None, "1f1b of 4 ranks and 1000000000000 microbatches is too large: 100,000,000 in all at most"),
    (2,    4,    2,    "1f1b has one stage on each rank, not stages_per_rank=2: leave it out"),
    (2,    4,    0,    "1f1b cannot be built with stages_per_rank=0: use a whole number of 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches", "stages_per_rank", "message"), WRONG)
def test_a_wrong_number_is_told(ranks, microbatches, stages_per_rank, message):
    with pytest.raises(ScheduleError) as caught:
        build("1f1b", ranks, microbatches, stages_per_rank)
    assert str(caught.value) == message


OTHER_STAGES = [
    ("zb-v",             1, "zb-v has 2 stages on each rank, not stages_per_rank=1: leave it out"),
    ("dualpipe-v",       3, "dualpipe-v has 2 stages on each rank, not stages_per_rank=3: leave it out"),
    ("interleaved-1f1b", 1, "interleaved-1f1b needs stages_per_rank=2 or more, not 1"),
    ("looped-bfs",       1, None),
    ("interleaved-zb",   1, None),
    ("interleaved-1f1b", 3, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages_per_rank", "message"), OTHER_STAGES)
def test_another_number_of_stages_is_built_where_the_rule_is_for_it_else_told(name, stages_per_rank, message):
    if message is None:
        assert build(name, 3, 4, stages_per_rank).stages == 3 * stages_per_rank
        return
    with pytest.raises(ScheduleError) as caught:
        build(name, 3, 4, stages_per_rank)
    assert str(caught.value) == message


def test_an_option_that_a_schedule_does_not_have_is_refused():
    with pytest.raises(ScheduleError, match="gpipe has no option depth, groups"):
        build("gpipe", 2, 2, groups=2, depth=1)


def test_a_schedule_error_is_a_value_error():
    with pytest.raises(ValueError, match="unknown schedule"):
        build("spam", 2, 2)
