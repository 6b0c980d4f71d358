"""The trace for Perfetto: its tracks, counters and arrows."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from timelines import COSTS, measured, two_ranks
from trace_processor import opened

from penstock.schedule import ActivationSize, Costs, build, simulate
from penstock.view.perfetto import trace
from penstock.view.record import Record


def events(record, phase):
    return [event for event in json.loads(trace(record))["traceEvents"] if event["ph"] == phase]


def test_a_small_trace_event_by_event():
    record = Record((two_ranks(),))
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events(record, "X")]
    assert slices[:9] == [
        (1001, "0F0", 0, 1000),
        (1001, "0F1", 1000, 1000),
        (1001, "0B0", 6000, 2000),
        (1001, "0B1", 9000, 2000),
        (1003, "idle by fill", 2000, 3000),
        (1003, "idle by communication", 5000, 1000),
        (1003, "idle by communication", 8000, 1000),
        (1004, "1B0 from rank 1", 5000, 1000),
        (1004, "1B1 from rank 1", 8000, 1000),
    ]
    counters = [(e["pid"], e["ts"], e["args"]["activations"]) for e in events(record, "C")]
    assert counters[:4] == [(1, 0, 1), (1, 1000, 2), (1, 8000, 1), (1, 11000, 0)]
    names = [e["args"]["name"] for e in events(record, "M") if e["name"] in ("process_name", "thread_name")]
    assert names == ["rank 0", "actions", "idle", "messages", "rank 1", "actions", "idle", "messages"]


def test_a_measured_trace_counts_bytes_and_shows_the_time_before_each_step():
    one = two_ranks()
    step = replace(one, activation_sizes=(ActivationSize(1000, 800),) * 2, memory_unit="bytes", between_steps=(2, 3))
    record = Record((step, step), unit="s")
    counters = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events(record, "C")]
    assert counters[:4] == [(1, 3e6, 1000), (1, 4e6, 2000), (1, 11e6, 1000), (1, 14e6, 0)]
    slices = [(e["tid"], e["ts"], e["dur"]) for e in events(record, "X") if e["name"] == "between steps"]
    second = (3 + 1.1 * 11 + 3) * 1e6
    assert slices == [(1003, 1e6, 2e6), (2003, 0, 3e6), (1003, second - 2e6, 2e6), (2003, second - 3e6, 3e6)]
    assert next(e["args"]["bytes held"] for e in events(record, "X")) == 1000


def records():
    schedule = build("1f1b", ranks=4, microbatches=8)
    steps = tuple(measured(schedule, seed, slow=2) for seed in range(3))
    simulated = []
    for name in ("zb-v", "dualpipe-v", "interleaved-1f1b", "gpipe"):
        simulated.append(Record((simulate(build(name, ranks=4, microbatches=8), Costs(send=0.3, size=1, bandwidth=2)),)))
    return [Record(steps, simulate(schedule, COSTS), "s"), *simulated]


@pytest.fixture(params=records(), ids=lambda record: record.name)
def record(request):
    return request.param


@pytest.fixture
def processor(record):
    """Perfetto's trace processor with the trace of `record` in it."""
    with opened(trace(record)) as processor:
        yield processor


ON_A_TRACK = "slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"


@pytest.mark.slow
def test_perfetto_opens_the_trace_without_a_complaint(processor):
    complaints = processor.query("SELECT name, value FROM stats WHERE severity != 'info' AND value != 0")
    assert [(row.name, row.value) for row in complaints] == []


@pytest.mark.slow
def test_perfetto_finds_every_rank_as_busy_as_the_timeline_and_as_long_idle(record, processor):
    slices: dict = {}
    for row in processor.query(f"SELECT process.name AS process, thread.name AS track, ts, dur, depth FROM {ON_A_TRACK}"):
        assert row.depth == 0  # no slice lies on another
        slices.setdefault((row.process, row.track.split(",")[0]), []).append((row.ts, row.ts + row.dur))
    scale = 1e9 if record.unit else 1e6  # to nanoseconds
    for name, steps in [("rank", record.steps), *([("predicted, rank", [record.predicted])] if record.predicted else [])]:
        for rank in range(steps[0].ranks):
            rounding = 2 * sum(len(step.rows[rank]) for step in steps)
            busy = scale * sum(step.busy[rank] for step in steps)
            assert covered(slices[f"{name} {rank}", "actions"]) == pytest.approx(busy, abs=rounding)
            idle = scale * sum(step.makespan for step in steps) - busy
            assert covered(slices.get((f"{name} {rank}", "idle"), [])) == pytest.approx(idle, abs=rounding)


def covered(spans):
    """The time for which at least one of `spans` runs."""
    total = free = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, free))
        free = max(free, end)
    return total


@pytest.mark.slow
def test_perfetto_draws_an_arrow_for_every_message(record, processor):
    ends = f"(SELECT slice.id AS id, slice.name AS name, process.name AS rank FROM {ON_A_TRACK})"
    columns = "made.rank AS sender, made.name AS made, needed.rank AS receiver, needed.name AS needed"
    query = (
        f"SELECT {columns} FROM flow JOIN {ends} AS made ON slice_out = made.id JOIN {ends} AS needed ON slice_in = needed.id"
    )
    arrows = processor.query(query)
    expected: Counter = Counter()
    data = record.data()
    timelines = [(step["timeline"], "rank") for step in data["steps"]]
    for timeline, name in [*timelines, *([(data["predicted"], "predicted, rank")] if data["predicted"] else [])]:
        for rank, row in enumerate(timeline["ranks"]):
            for event in row["events"]:
                for message in event.get("receives", ()):
                    sender = f"{name} {message['rank']}"
                    expected[sender, message["action"], f"{name} {rank}", event["action"]] += 1
    assert expected
    assert Counter((row.sender, row.made, row.receiver, row.needed) for row in arrows) == expected


@pytest.mark.slow
def test_perfetto_counts_what_every_rank_holds(record, processor):
    query = "SELECT process.name AS process, max(value) AS most FROM counter JOIN process_counter_track AS track"
    found = processor.query(f"{query} ON track_id = track.id JOIN process USING (upid) GROUP BY track_id")
    most = {row.process: row.most for row in found}
    for rank in range(record.steps[0].ranks):
        assert most[f"rank {rank}"] == max(step.peak_memory[rank] for step in record.steps)


def test_the_same_record_makes_the_same_text():
    assert len({trace(record) for record in [records()[0] for _ in range(2)]}) == 1
