"""What a run records of its steps."""

import json
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import data, make

import penstock as ps
from penstock.commands.train.job import crowding
from penstock.commands.train.metrics import Metrics, read_records
from penstock.commands.train.progress import print_result
from penstock.commands.train.training_result import TrainResult
from penstock.errors import MismatchError, PenstockError

PAUSE = 0.05  # seconds between two steps


def rank_metrics():
    model, loss_fn = make("gpt")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 4)
    inputs, target = data("gpt", 8)
    pipe.step(inputs, target=target)
    assert pipe.report.between == (0, 0)
    time.sleep(PAUSE)
    pipe.step(inputs, target=target)
    return pipe.metrics(), pipe.timeline(), pipe.report


@pytest.mark.ranks
def test_a_step_tells_its_waits_by_cause_and_every_ranks_memory_the_same_on_all_ranks():
    everyone = ps.launch(rank_metrics, 2)
    found, timeline, report = everyone[0]
    assert all(result[0] == found for result in everyone)
    assert sum(timeline.explain().shares.values()) == pytest.approx(1, abs=1e-6)
    waits = {name: value for name, value in found.items() if name.startswith("wait/")}
    assert waits == {f"wait/{cause}": share for cause, share in timeline.causes.items()}
    assert waits["wait/sending"] > 0
    busy = sum(found[f"busy_seconds/rank{rank}"] for rank in range(2)) / (2 * found["makespan_seconds"])
    assert busy + sum(waits.values()) == pytest.approx(1, abs=1e-6)
    assert [found[f"peak_memory_bytes/rank{rank}"] for rank in range(2)] == list(report.peak_memory)
    assert (
        [found[f"between_steps_seconds/rank{rank}"] for rank in range(2)]
        == list(report.between)
        == list(timeline.between_steps)
    )
    assert all(between >= PAUSE for between in report.between)
    assert (found["bubble"], found["idle_share"]) == (report.bubble, report.idle_share)
    assert found["idle_share"] == pytest.approx(timeline.idle_share, abs=1e-6)
    assert json.loads(json.dumps(found)) == found


def test_metrics_are_lines_of_json_and_go_on_without_doubled_steps(tmp_path):
    with Metrics(tmp_path / "run", 0) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 1 / step})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # as a kill leaves it
    with Metrics(tmp_path / "run", 2) as metrics:
        metrics.write({"step": 3, "loss": 0.25})
    assert read_records(tmp_path / "run", 9) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25}]


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(PenstockError, match=r"metrics.jsonl cannot be written: No space left on device"):
            metrics.write({"step": 1})


@pytest.mark.parametrize("line", ["not JSON", '{"loss": 1}', "[1]", "\0\0"])
def test_a_damaged_line_of_them_is_told(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(MismatchError, match=r"metrics.jsonl is damaged, it has a line that is no record of a step: put"):
        read_records(tmp_path, 9)


@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_gets_them_where_it_is_installed(tmp_path, monkeypatch, installed):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    if installed:
        module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    with Metrics(tmp_path, 4) as metrics:
        metrics.write({"step": 5, "loss": 2.0})
    expected = [(str(tmp_path / "tensorboard"), 5), ("loss", 2.0, 5), "closed"]
    assert written == (expected if installed else [])


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path, 0) as metrics:
        metrics.write({"step": 1, "loss": 2.0, "wait/fill": 0.5})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["loss", "wait/fill"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 2.0)]


def test_ranks_that_share_cores_are_told_so():
    assert crowding(2, 2) == ""
    assert crowding(4, 2) == "4 ranks share 2 cores: an action's time includes waiting for a core"


def test_what_a_run_came_to_is_told_where_its_records_are_lost_and_its_folder_has_any_name(tmp_path, capsys):
    alone = TrainResult(1, losses=[3.0, 2.0], seconds=[1.0, 1.0], idle_shares=[0.0, 0.0], validation_loss=2.0)
    print_result(TrainResult(2, validation_loss=2.0), alone, tmp_path / "runs [v2] [/x]")
    output = capsys.readouterr().out
    assert output.startswith("\nloss on the held-out part 2.0000\n")
    assert "are in " + str(tmp_path / "runs [v2] [/x]") in output
    run = TrainResult(2, losses=[2.0], seconds=[1.0], idle_shares=[0.0], validation_loss=2.0)
    print_result(run, alone, tmp_path)
    assert "The same 1 steps" in (output := capsys.readouterr().out)
    assert "equal to the last bit, all steps" in output


def test_the_result_of_a_run_fits_a_screen(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "gpt-interleaved-1f1b-4x8-20260101-120000")
    folder.mkdir(parents=True)
    (folder / "report.txt").touch()
    alone = TrainResult(1, losses=[5.0, 2.0], seconds=[1.0, 1.0], idle_shares=[0.0, 0.0], validation_loss=2.0)
    run = replace(
        alone,
        ranks=4,
        planned="a step of the table: planned 100.5 ms, measured 111.5 ms (+10.9%)\n" + "a rank\n" * 4,
        explanation="rank 0 is slow: 359 ms, 57.7 % of the step; another cut: -16.9 %; zb-v: -10.1 %, predicted\n"
        + "more\n" * 12,
        crowding=crowding(4, 2),
        prompt="line\n" * 3 + "def",
        sample="    return self.value\n" * 40,
    )
    print_result(run, alone, folder)
    lines = capsys.readouterr().out.splitlines()
    assert sum(-(-max(1, len(line)) // 80) for line in lines) <= 24
