"""The plain form of a timeline, and its file."""

import json
from dataclasses import replace

import pytest
from timelines import COSTS, measured, two_ranks

from penstock.errors import PenstockError
from penstock.schedule import ActivationSize, Costs, build, simulate
from penstock.view.data.timeline_data import timeline_data
from penstock.view.reading import load
from penstock.view.record import Record, save


def test_a_timeline_as_plain_data_says_when_why_and_what_was_held():
    data = timeline_data(two_ranks())
    assert (data["makespan"], data["busy"], data["peak_in_flight"]) == (11, (6.0, 6.0), (2, 1))
    assert data["critical_path"] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert data["ranks"][0] == {
        "events": [
            {"action": "0F0", "start": 0, "end": 1, "held": 1},
            {"action": "0F1", "start": 1, "end": 2, "held": 2},
            {
                "action": "0B0",
                "start": 6,
                "end": 8,
                "held": 1,
                "waited": 4,
                "waited_for": "1B0",
                "receives": [{"action": "1B0", "rank": 1, "arrived": 6}],
            },
            {
                "action": "0B1",
                "start": 9,
                "end": 11,
                "held": 0,
                "waited": 1,
                "waited_for": "1B1",
                "receives": [{"action": "1B1", "rank": 1, "arrived": 9}],
            },
        ],
        "idle": [[2, 5, "fill"], [5, 6, "communication"], [8, 9, "communication"]],
        "memory": [[0, 1], [1, 2], [8, 1], [11, 0]],
    }
    third = data["ranks"][1]["events"][2]
    assert third == {
        "action": "1F1",
        "start": 5,
        "end": 6,
        "held": 1,
        "receives": [{"action": "0F1", "rank": 0, "arrived": 3}],  # it came early: nothing was waited for
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("zb-v", {}), ("interleaved-1f1b", {"stages_per_rank": 3}), ("dualpipe-v", {}), ("gpipe", {})],
)
def test_what_is_saved_is_loaded_again_with_all_that_follows_from_it(tmp_path, name, options):
    schedule = build(name, ranks=3, microbatches=5, **options)
    costs = Costs(forward=1, send=0.5, size=3, bandwidth=2, act=4, keep=1, overlap=0.5)
    predicted = simulate(schedule, costs)
    steps = [measured(schedule, 1), measured(schedule, 2)]
    path = tmp_path / "timeline.json"
    save(steps, predicted, path, ["step 10", "step 20"])
    again = load(tmp_path)
    assert (again.name, again.unit, again.label) == (steps[0].name, "s", "step 20")
    for step, before in zip(again.steps, steps, strict=True):  # measured times are kept to the nanosecond
        assert [event.action for event in step.events] == [event.action for event in before.events]
        assert [event.start for event in step.events] == pytest.approx(
            [e.start - before.start for e in before.events], abs=1e-9
        )
        assert [event.action for event in step.critical_path] == [event.action for event in before.critical_path]
        assert step.causes == pytest.approx(before.causes, abs=1e-7)
    save(again.steps, again.predicted, tmp_path / "again.json", again.labels)
    assert load(tmp_path / "again.json") == again
    assert again.predicted is not None
    assert again.predicted.events == predicted.events
    assert again.predicted.causes == predicted.causes
    assert again.predicted.peak_memory == predicted.peak_memory
    assert again.predicted.critical_path == predicted.critical_path
    assert again.predicted.message_costs == predicted.message_costs


def test_a_file_of_0_2_in_which_the_predicted_step_is_called_planned_is_read(tmp_path):
    schedule = build("1f1b", ranks=2, microbatches=4)
    save(measured(schedule, 1), simulate(schedule, Costs()), path := tmp_path / "timeline.json")
    saved, data = load(path), json.loads(path.read_text())
    data["planned"] = data.pop("predicted")
    path.write_text(json.dumps(data))
    assert load(path) == saved


def test_what_was_measured_besides_is_loaded_again_and_older_files_without_it_too(tmp_path):
    bare = measured(build("zb-h1", ranks=3, microbatches=5), 1)
    rows = tuple(tuple(event._replace(sent=event.end + 1e-6) for event in row) for row in bare.rows)
    sizes = tuple(ActivationSize(1000 + stage, 1500) for stage in range(3))
    step = replace(
        bare, rows=rows, activation_sizes=sizes, memory_unit="bytes", between_steps=(0.25, 0.5, 0.125), averaging=(0.5, 0, 0)
    )
    save(step, None, tmp_path / "timeline.json")
    again = load(tmp_path).steps[0]
    assert (again.activation_sizes, again.memory_unit) == (step.activation_sizes, "bytes")
    assert again.between_steps == step.between_steps
    assert (again.peak_memory, again.causes) == (step.peak_memory, pytest.approx(step.causes, abs=1e-7))
    assert again.causes["sending"] > 0

    def as_before(data):
        timeline = _timeline(data)
        for name in ("memory_unit", "between"):
            del timeline[name]
        timeline.update(sizes=[])
        for event in (event for row in timeline["ranks"] for event in row["events"]):
            del event["held"], event["sent"]

    _changed(tmp_path / "timeline.json", as_before)
    old = load(tmp_path).steps[0]
    assert (old.memory_unit, old.between_steps, old.peak_memory) == ("", (), tuple(map(float, bare.peak_in_flight)))
    assert old.causes == pytest.approx(bare.causes, abs=1e-7)


def test_unequal_microbatches_are_loaded_with_their_messages_and_memory(tmp_path):
    costs = Costs(send=0.5, size=8, bandwidth=16, act=100, keep=40, microbatch_factors=[2, 0.5, 1, 3])
    step = simulate(build("zb-h1", ranks=3, microbatches=4), costs)
    Record((step,), unit="s").save(tmp_path / "timeline.json")
    again = load(tmp_path).steps[0]
    assert again.microbatch_factors == (2, 0.5, 1, 3)
    assert (again.arrivals, again.peak_memory, again.causes) == (step.arrivals, step.peak_memory, step.causes)


def test_one_timeline_is_a_record_of_one_step(tmp_path):
    save(
        measured(build("1f1b", ranks=2, microbatches=2), 0),
        simulate(build("1f1b", ranks=2, microbatches=2), COSTS),
        tmp_path / "a.json",
    )
    record = load(tmp_path / "a.json")
    assert (len(record.steps), record.label, record.unit) == (1, "step 1", "s")


def _changed(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def _timeline(data):
    return data["steps"][0]["timeline"]


def _events(data, rank=0):
    return _timeline(data)["ranks"][rank]["events"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="penstock timeline 9"), "its format is 'penstock timeline 9'"),
        (lambda data: data.update(steps=[]), "it has no steps"),
        (lambda data: data.pop("unit"), "KeyError('unit')"),
        (lambda data: _events(data)[0].update(action="<b>"), "cannot read '<b>' as an action"),
        (lambda data: _events(data)[0].update(end=-1), "0F0 runs from 0.0 to -1.0"),
        (lambda data: _events(data)[0].update(sent=-1), "0F0 ends at 1.0 and was sent at -1.0"),
        (lambda data: _timeline(data).update(memory_unit="<b>"), "its memory is in '<b>', not in bytes"),
        (lambda data: _timeline(data).update(between=[1]), "the times between steps are [1.0] on 2 ranks"),
        (lambda data: _timeline(data).update(averaging=[-1, 0]), "the times of averaging are [-1.0, 0.0] on 2 ranks"),
        (lambda data: _timeline(data).update(microbatch_factors=[1]), "the factors of 2 microbatches are [1.0]"),
        (lambda data: _timeline(data).update(microbatch_factors=[1, -1]), "the factors of 2 microbatches are [1.0, -1.0]"),
        (lambda data: _events(data)[0].update(start="now"), "could not convert string to float"),
        (lambda data: _events(data)[1].update(start=30, end=31), "rank 0 has 0B0 out of order"),
        (lambda data: _events(data)[1].update(action="0F0"), "0F0 occurs twice"),
        (lambda data: _timeline(data).update(overlaps=[["0F0", "0B0"]]), "0F0 and 0B0 are no pair, they do not follow"),
        (lambda data: _timeline(data).update(borders=[]) or _timeline(data).update(sizes=[[1, 1]]), "1 sizes for 2 stages"),
        (lambda data: _timeline(data).update(borders=[[0, 0]] * 3), "there are 3 borders between 2 stages"),
        (lambda data: _timeline(data).update(skips=[[0, 9, 0, 0]]), "a skip is not between two of the 2 stages"),
        (lambda data: _events(data)[1].update(action="1F7"), "stage 1 is on rank 0 and on rank 1"),
        (
            lambda data: [event.update(start=0, end=0) for event in _events(data)[::3]] and _events(data).reverse(),
            "out of order",
        ),
        (
            lambda data: (
                [event.update(start=0, end=0) for event in _events(data)],
                _events(data).reverse(),
            ),
            "its actions would have to run 0B1 before 0B0",
        ),
    ],
)
def test_what_is_no_timeline_is_refused_in_one_sentence(tmp_path, change, message):
    path = tmp_path / "timeline.json"
    save(two_ranks(), None, path)
    _changed(path, change)
    with pytest.raises(PenstockError, match="is not a timeline that Penstock wrote") as caught:
        load(path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_or_not_json_is_told(tmp_path):
    with pytest.raises(PenstockError, match=r"has no timeline: there is no file .*timeline\.json"):
        load(tmp_path)
    (tmp_path / "run.json").write_text('{"config": {}}')
    with pytest.raises(PenstockError, match=r"which is written after the run's last step: penstock train --resume "):
        load(tmp_path)
    (tmp_path / "run.json").write_text('{"config": {}, "losses": []}')
    with pytest.raises(
        PenstockError, match=r"since no step was measured: the run had one rank, .* resumed with no step left; "
    ):
        load(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(PenstockError, match=r"x\.json is not a timeline that Penstock wrote"):
        load(tmp_path / "x.json")


@pytest.mark.costly
def test_the_verdict_in_the_file_is_that_of_the_explanation_and_is_worked_out_again(tmp_path):
    schedule = build("1f1b", ranks=4, microbatches=8)
    save([measured(schedule, seed, slow=1) for seed in range(3)], None, tmp_path / "timeline.json", layers=[1, 1, 1, 1])
    record = load(tmp_path)
    verdict = record.data()["verdict"]
    assert record.explanation
    assert verdict["text"] == record.explanation.verdict_text
    assert verdict["text"].startswith("rank 1 is slow: ")
    assert verdict["basis"] == "at the medians of 3 steps"
    assert "; ".join(finding["text"] for finding in verdict["findings"]) + f" ({verdict['basis']})" == verdict["text"]
    assert verdict["findings"][0]["rank"] == 1
    assert verdict["findings"][0]["timeline"]["makespan"] < record.explanation.predicted_step
    assert load(tmp_path).data() == record.data()


def test_what_was_not_measured_has_no_verdict():
    assert Record((two_ranks(),)).data()["verdict"] is None


def test_a_trace_for_perfetto_is_told_to_be_one(tmp_path):
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(PenstockError, match=r"it is a trace, for ui\.perfetto\.dev"):
        load(tmp_path / "trace.json")
