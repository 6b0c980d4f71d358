"""When gradients are averaged: against what follows by hand."""

import pytest

import penstock as ps
from penstock.schedule import Costs, averaging_end_time, build, simulate

# Two ranks, two microbatches, F = 1, B = 2: rank 1 ends its last backward at 7, rank 0 at 9.
TWO = simulate(build("1f1b", ranks=2, microbatches=2), Costs())


def test_what_leaves_early_is_hidden():
    assert TWO.makespan == 9
    assert averaging_end_time(TWO, 1) == 10  # rank 0's, as rank 1's have long been averaged
    assert averaging_end_time(TWO, [1, 5]) == 12
    assert averaging_end_time(TWO, [0, 1]) == 9


def test_on_one_link_they_wait_for_each_other():
    assert averaging_end_time(TWO, 5, shared=True) == 7 + 5 + 5
    assert averaging_end_time(TWO, 1, shared=True) == 10


def test_without_overlap_all_leave_at_the_end():
    assert averaging_end_time(TWO, [1, 5], overlapped=False) == 9 + 5
    assert averaging_end_time(TWO, [1, 5], overlapped=False, shared=True) == 9 + 6


def test_stages_of_a_rank_leave_one_after_the_other():
    table = simulate(build("interleaved-1f1b", ranks=2, microbatches=2), Costs())
    ends = {e.action.stage: e.end for e in table.events if e.action.kind.value == "B" and e.action.microbatch == 1}
    assert ends[2] < ends[0]
    assert averaging_end_time(table, [3, 0, 3, 0]) == max(ends[2] + 3, ends[0]) + 3


def test_with_split_backwards_they_leave_after_the_last_w():
    table = simulate(build("zb-h1", ranks=2, microbatches=4), Costs())
    last = {e.action.stage: e.end for e in table.events if e.action.kind.value == "W"}
    assert averaging_end_time(table, 2) == max(table.makespan, *(end + 2 for end in last.values()))


def test_what_cannot_be_averaged_is_refused():
    forwards = simulate(build("gpipe", ranks=1, microbatches=1).filter_actions(lambda action: action.kind.value == "F"))
    with pytest.raises(ps.ScheduleError, match="has no backward: there are no gradients to average"):
        averaging_end_time(forwards, 1)
    with pytest.raises(ps.ScheduleError, match="3 costs for 2 stages"):
        averaging_end_time(TWO, [1, 2, 3])
