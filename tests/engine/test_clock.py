"""Ranks' clocks: one on a machine, compared between machines, and never a message that arrives before it is sent."""

import time
import types
from itertools import pairwise

import pytest
from reference import data, make

import penstock as ps
from penstock.engine import clock, comparison
from penstock.schedule.table import dependencies

pytestmark = pytest.mark.ranks

AHEAD = 1000.0  # seconds by which each rank's clock is ahead of the one before


def rank_on_its_own_machine(apart):
    rank = ps.comms.init_distributed().rank
    if apart:
        comparison.machine = lambda: f"machine {rank // 2}"  # two ranks on each
        clock.time = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + AHEAD * (rank // 2))
    model, loss_fn = make("gpt", depth=6)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 6)
    inputs, target = data("gpt", 12)
    for _ in range(3):
        pipe.step(inputs, target=target)
    timeline = pipe.timeline()
    assert pipe.clock_error >= pipe.skew.error
    return timeline, pipe.skew, pipe.report.makespan, pipe.clock_error


@pytest.mark.parametrize("apart", [False, True])
def test_no_message_arrives_before_it_is_sent(apart):
    everyone = ps.launch(rank_on_its_own_machine, 4, apart)
    timeline, _, makespan, error = everyone[0]
    assert (error > 0) == apart
    error *= 2  # of both ends
    at = {event.action: event for event in timeline.events}
    received = 0
    for event in timeline.events:
        for options in dependencies(event.action, 4):
            for needed in [at[action] for action in options if action in at and at[action].rank != event.rank]:
                assert needed.end <= event.start + error
                received += 1
    assert received == 2 * 3 * 6
    for row in timeline.rows:
        assert row[0].sent == row[0].end or row[0].action.stage  # it had a head start: when it was sent is not known
        for event, after in pairwise(row):
            assert event.end <= event.sent <= after.start
        assert row[-1].sent >= row[-1].end
    assert 0 < makespan < 60
    assert timeline.makespan == pytest.approx(makespan, abs=2 * error + 1e-9)


def test_clocks_of_other_machines_are_compared_with_rank_0s():
    skews = [skew for _, skew, *_ in ps.launch(rank_on_its_own_machine, 4, True)]
    assert skews[0] == skews[1] == clock.Skew()
    for skew in skews[2:]:
        assert 0 < skew.error < 0.1
        assert skew.offset == pytest.approx(-AHEAD, abs=skew.error)
    assert [skew for _, skew, *_ in ps.launch(rank_on_its_own_machine, 4, False)] == [clock.Skew()] * 4


def test_processes_of_one_machine_share_its_clock():
    assert ps.launch(clock.machine, 2) == [clock.machine()] * 2
