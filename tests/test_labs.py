"""Every lab runs, says what it measured, and notices when something is off."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock import labs, schedule
from penstock.labs import lab1_monolith, lab3_ping_pong, lab5_gpipe, lab6_1f1b, story
from penstock.labs.emulated import EmulatedLayer
from penstock.schedule import Costs

ROOT = Path(__file__).parents[1]


def ends_with_a_measurement(output: str) -> bool:
    last = output.rstrip().splitlines()[-1]
    return last.startswith("Measured: ") and any(map(str.isdigit, last))


def run_python(*args: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


AS_A_SCRIPT, UNDER_TORCHRUN = 6, 3  # the others run in this process, as `penstock lab` runs them


@pytest.mark.parametrize("number", [number for number in labs.LABS if number not in (AS_A_SCRIPT, UNDER_TORCHRUN)])
def test_a_lab_passes_its_checks_and_ends_with_a_measurement(number, capsys):
    labs.run(number)
    output = capsys.readouterr().out
    assert "checked: " in output
    assert ends_with_a_measurement(output), output


def test_a_lab_runs_as_a_script_with_its_output_in_a_pipe():
    output = run_python("-m", labs.LABS[AS_A_SCRIPT].module)
    assert "checked: " in output
    assert ends_with_a_measurement(output), output
    assert "\033" not in output


def test_a_lab_runs_under_torchrun_and_tells_its_story_once():
    output = run_python("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", labs.LABS[UNDER_TORCHRUN].module)
    assert "checked: " in output
    assert ends_with_a_measurement(output), output
    assert output.count("Measured: ") == 1


def test_labs_are_numbered_from_one_and_have_files_of_their_names():
    assert list(labs.LABS) == list(range(1, len(labs.LABS) + 1))
    for number, lab in labs.LABS.items():
        assert lab.number == number
        assert lab.module.startswith(f"penstock.labs.lab{number}_")
        assert (ROOT / (lab.module.replace(".", "/") + ".py")).exists()


def test_an_unknown_lab_is_refused_with_the_numbers_there_are():
    with pytest.raises(ps.PenstockError, match=r"no lab 99: choose one of 1, 2, 3"):
        labs.run(99)


def test_lab_1_fails_when_the_model_learns_nothing(monkeypatch):
    def noise(centres, rows):
        return torch.randn(rows, centres.shape[1]), torch.randint(len(centres), (rows,))

    monkeypatch.setattr(lab1_monolith, "batch", noise)
    with pytest.raises(SystemExit, match="the model learns nothing"):
        lab1_monolith.main()


def test_lab_5_fails_when_the_bubble_is_another_schedules(monkeypatch):
    def naive_step(ranks, microbatches):
        return schedule.simulate(schedule.build("naive", ranks=ranks, microbatches=microbatches))

    monkeypatch.setattr(lab5_gpipe, "measured_step", naive_step)
    with pytest.raises(SystemExit, match=r"with 2 microbatches the bubble should be 60.0 %: .* measured 75.0 %"):
        lab5_gpipe.main()


def test_lab_6_fails_when_an_activation_outlives_its_backward(monkeypatch):
    def leaking(function, ranks, name):
        timeline = schedule.simulate(schedule.build(name, ranks=ranks, microbatches=lab6_1f1b.MICROBATCHES), Costs())
        return [(timeline, 8)] * ranks

    monkeypatch.setattr(lab6_1f1b, "on_ranks", leaking)
    with pytest.raises(SystemExit, match=r"1f1b kept \(8, 8, 8, 8\) .* the table says \(4, 3, 2, 1\)"):
        lab6_1f1b.main()


def test_a_lab_for_two_ranks_says_so_when_torchrun_started_three(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="runs on 2 ranks, torchrun started 3: use --nproc-per-node 2"):
        story.on_ranks(lab3_ping_pong.ping_pong, 2)


def test_only_rank_0_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    story.say("hello")
    assert capsys.readouterr().out == ""


def test_an_emulated_layer_takes_its_time_and_multiplies():
    layer = EmulatedLayer(3, forward_seconds=0.02, backward_seconds=0.04)
    hidden = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    start = time.perf_counter()
    output = layer(hidden)
    middle = time.perf_counter()
    output.sum().backward()
    assert middle - start >= 0.02
    assert time.perf_counter() - middle >= 0.04
    assert torch.equal(output, hidden)
    assert torch.equal(layer.weight.grad, torch.tensor([5.0, 7.0, 9.0]))
    assert torch.equal(hidden.grad, torch.ones(2, 3))
