"""The trace for Perfetto: its tracks, counters and arrows."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from timelines import COSTS, measured, two_ranks

from penstock.render.perfetto import ACTIONS, TRACKS, trace
from penstock.render.record import Record
from penstock.schedule import Costs, Size, build, simulate


def events(record, phase):
    return [event for event in json.loads(trace(record))["traceEvents"] if event["ph"] == phase]


def busy(slices):
    """The time for which at least one of `slices` runs."""
    total = free = 0.0
    for each in sorted(slices, key=lambda each: each["ts"]):
        end = each["ts"] + each["dur"]
        total += max(0.0, end - max(each["ts"], free))
        free = max(free, end)
    return total


def test_a_small_trace_event_by_event():
    record = Record((two_ranks(),))
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events(record, "X")]
    assert slices[:9] == [
        (1001, "0F0", 0, 1000),
        (1001, "0F1", 1000, 1000),
        (1001, "0B0", 6000, 2000),
        (1001, "0B1", 9000, 2000),
        (1002, "idle by fill", 2000, 3000),
        (1002, "idle by communication", 5000, 1000),
        (1002, "idle by communication", 8000, 1000),
        (1003, "1B0 from rank 1", 5000, 1000),
        (1003, "1B1 from rank 1", 8000, 1000),
    ]
    counters = [(e["pid"], e["ts"], e["args"]["activations"]) for e in events(record, "C")]
    assert counters[:4] == [(1, 0, 1), (1, 1000, 2), (1, 8000, 1), (1, 11000, 0)]
    names = [e["args"]["name"] for e in events(record, "M") if e["name"] in ("process_name", "thread_name")]
    assert names == ["rank 0", "actions", "idle", "messages", "rank 1", "actions", "idle", "messages"]


def test_a_measured_trace_counts_bytes_and_shows_the_time_before_each_step():
    one = two_ranks()
    step = replace(one, sizes=(Size(1000, 800),) * 2, memory_unit="bytes", between=(2, 3))
    record = Record((step, step), unit="s")
    counters = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events(record, "C")]
    assert counters[:4] == [(1, 3e6, 1000), (1, 4e6, 2000), (1, 11e6, 1000), (1, 14e6, 0)]
    slices = [(e["tid"], e["ts"], e["dur"]) for e in events(record, "X") if e["name"] == "between steps"]
    second = (3 + 1.1 * 11 + 3) * 1e6
    assert slices == [(1002, 1e6, 2e6), (2002, 0, 3e6), (1002, second - 2e6, 2e6), (2002, second - 3e6, 3e6)]
    assert next(e["args"]["bytes held"] for e in events(record, "X")) == 1000


def records():
    schedule = build("1f1b", ranks=4, microbatches=8)
    steps = tuple(measured(schedule, seed, slow=2) for seed in range(3))
    simulated = []
    for name in ("zb-v", "dualpipe-v", "interleaved-1f1b", "gpipe"):
        simulated.append(Record((simulate(build(name, ranks=4, microbatches=8), Costs(send=0.3, size=1, bandwidth=2)),)))
    return [Record(steps, simulate(schedule, COSTS), "s"), *simulated]


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_every_track_is_as_busy_as_the_timeline_and_its_slices_do_not_cut_each_other(record):
    scale = 1e6 if record.unit else 1e3
    slices = events(record, "X")
    for rank in range(4):
        track = [each for each in slices if each["tid"] == TRACKS * (1 + rank) + ACTIONS]
        assert busy(track) == pytest.approx(scale * sum(step.busy[rank] for step in record.steps), rel=1e-6)
    for tid in {each["tid"] for each in slices}:
        track = sorted((each["ts"], -each["dur"]) for each in slices if each["tid"] == tid)
        open_until = []
        for start, negative in track:
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1] + 1e-6
            open_until.append(start - negative)


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_arrows_come_in_pairs_and_lead_from_the_slice_that_sends_to_the_one_that_receives(record):
    starts, ends = events(record, "s"), events(record, "f")
    assert starts
    assert Counter(each["id"] for each in starts) == Counter(each["id"] for each in ends) == Counter({e["id"]: 1 for e in ends})
    finish = {each["id"]: each for each in ends}
    slices = {(each["tid"], each["name"], each["ts"]): each for each in events(record, "X")}
    for each in starts:
        assert each["ts"] <= finish[each["id"]]["ts"]
        assert any(
            tid == each["tid"] and name == each["name"] and ts <= each["ts"] <= ts + slices[tid, name, ts]["dur"]
            for tid, name, ts in slices
        )
        assert any(tid == finish[each["id"]]["tid"] and ts == finish[each["id"]]["ts"] for tid, _, ts in slices)


def test_the_same_record_makes_the_same_text():
    assert len({trace(record) for record in [records()[0] for _ in range(2)]}) == 1
