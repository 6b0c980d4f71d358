"""Ranks' clocks: one on a machine, compared between machines, and never a message that arrives before it is sent."""

import time
import types
from itertools import pairwise

import pytest
import torch
from reference import data, make

import penstock as ps
from penstock.engine import clock
from penstock.guards import pipeline_comparison
from penstock.schedule.table import dependencies

AHEAD = 1000.0  # seconds by which each rank's clock is ahead of the one before


def rank_on_its_own_machine(apart):
    rank = ps.comms.init_distributed().rank
    if apart:
        pipeline_comparison.clock_id = lambda: f"machine {rank // 2}"  # two ranks on each
        clock.time = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + AHEAD * (rank // 2))
        clock.ActionClock.now = staticmethod(clock.time.perf_counter)
    model, loss_fn = make("gpt", depth=6)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 6)
    inputs, target = data("gpt", 12)
    for _ in range(3):
        pipe.step(inputs, target=target)
    timeline = pipe.timeline()
    assert pipe.clock_error >= pipe._engine.clock_skew.error
    return timeline, pipe._engine.clock_skew, pipe.report.makespan, pipe.clock_error


@pytest.mark.ranks
@pytest.mark.parametrize("apart", [False, True])
def test_no_message_arrives_before_it_is_sent(apart):
    everyone = ps.launch(rank_on_its_own_machine, 4, apart)
    timeline, _, makespan, error = everyone[0]
    assert (len(timeline.microbatch_sizes), len({*timeline.microbatch_sizes})) == (6, 1)
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
    assert makespan > 0
    assert timeline.makespan == pytest.approx(makespan, abs=2 * error + 1e-9)


@pytest.mark.ranks
def test_clocks_of_other_machines_are_compared_with_rank_0s():
    skews = [skew for _, skew, *_ in ps.launch(rank_on_its_own_machine, 4, True)]
    assert skews[0] == skews[1] == clock.ClockSkew()
    for skew in skews[2:]:
        assert skew.error > 0
        assert skew.offset == pytest.approx(-AHEAD, abs=skew.error)
    assert [skew for _, skew, *_ in ps.launch(rank_on_its_own_machine, 4, False)] == [clock.ClockSkew()] * 4


@pytest.mark.ranks
def test_processes_of_one_machine_share_its_clock():
    assert ps.launch(clock.clock_id, 2) == [clock.clock_id()] * 2


# ---- a GPU's clock, told by a device that counts for itself


class DelayedDevice:
    """A stream that does what it is told 10 s after it was told so; times in seconds, waits of the host counted."""

    def __init__(self):
        self.now, self.waits, device = 50.0, 0, self

        class DelayedEvent:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                device.now += 1
                self.at = device.now + 10

            def synchronize(self):
                device.waits += 1
                device.now = max(device.now, self.at)

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        self.Event = DelayedEvent

    def perf_counter(self):
        return self.now


def test_a_gpus_clock_counts_from_the_end_of_the_step_before_and_waits_for_nothing_in_between(monkeypatch):
    device = DelayedDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(clock, "time", device)
    first = clock.make_clock(torch.device("cuda"))
    assert device.waits == 1  # once in a program: the two clocks meet
    first.marks += first.now(), first.now(), first.now()
    first.mark_averaged()
    assert device.waits == 1
    begin, end, *totals = first.totals()
    assert (end - begin, totals, device.waits) == (1, [1, 0, 1], 2)
    before = device.waits
    second = clock.make_clock(torch.device("cuda"), 5.0, first.mark_end())
    second.marks += second.now(), second.now(), second.now()
    second.mark_averaged()
    assert device.waits == before + 1  # at the end of the step, when there is nothing to wait for
    assert second.totals()[3:] == (11, 1)  # it was idle for 10, until it was told of the step
    [(start, *_)] = second.intervals()
    assert start - 5 - begin > end - begin
