"""A signal that asks to save and leave: known to all ranks after the same step, and no step is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from prompt import penstock
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks


class Told(nn.Module):
    """Passes its input on; when it is told to, its rank gets a signal meanwhile."""

    signal = None

    def forward(self, hidden):
        if self.signal:
            os.kill(os.getpid(), self.signal)
        return hidden


def rank_is_told_in_its_third_step(where, number):
    ps.comms.catch_preemption()
    ps.comms.catch_preemption()
    torch.manual_seed(0)
    pipe = ps.Pipeline([nn.Sequential(nn.Linear(4, 4), Told()) for _ in range(3)], nn.functional.mse_loss, microbatches=2)
    (results,) = [m for stage in pipe.stages.values() for m in stage.modules() if isinstance(m, Told)]
    inputs, seen = torch.ones(4, 4), []
    for step in range(5):
        results.signal = number if step == 2 and pipe.topology.rank == where else None
        pipe.step(inputs, target=inputs)
        seen.append(pipe.preempted)
    return seen


@pytest.mark.parametrize(("where", "number"), [(0, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_on_one_rank_is_known_to_all_after_the_same_step(where, number):
    assert ps.launch(rank_is_told_in_its_third_step, 3, where, number) == [[False, False, True, True, True]] * 3


def program(text):
    """A Python program that says `ready`."""
    text = f"import os, signal, sys, time\nfrom penstock.comms import catch_preemption\n{text}\n"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


WAITING = "print('ready', flush=True)\nwhile True: time.sleep(1)"


def test_a_program_that_has_not_asked_for_it_dies_of_the_signal():
    with program(WAITING) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_what_waits_goes_on_and_a_second_sigterm_some_time_later_ends_the_program():
    with program(f"catch_preemption()\n{WAITING}") as process:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            process.send_signal(number)
            time.sleep(0.1)
        time.sleep(2.1)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        assert process.poll() is None
        while process.poll() is None:  # it counts from when it heard of the first one, which may have been late
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.returncode == -signal.SIGTERM


def test_a_program_that_is_leaving_already_does_so_with_its_own_exit_code():
    last = (
        "class Last:\n    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGTERM):\n        kill(me, number)\n"
    )
    with program(f"catch_preemption()\n{last}last = Last()\nprint('ready', flush=True)\nsys.exit(75)") as process:
        assert process.wait() == 75


def test_a_process_that_the_program_has_forked_dies_of_the_signal():
    forks = "catch_preemption()\nthere, here = os.pipe()\nchild = os.fork()\n"
    forks += "if not child:\n    os.write(here, b'.')\n    time.sleep(600)\nos.read(there, 1)\n"
    ends = "print('ready', flush=True)\nos.kill(child, signal.SIGTERM)\nsys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)"
    with program(forks + ends) as process:
        assert process.wait() == 100 - signal.SIGTERM


def test_it_must_be_called_in_the_main_thread():
    words = "catch_preemption() must be called in the main thread"
    text = f"""
import threading
def call():
    try:
        catch_preemption()
    except Exception as error:
        print('ready' if str(error).startswith({words!r}) else error)
threading.Thread(target=call).start()"""
    with program(text) as process:
        assert process.wait() == 0


SMALL = ["--steps", "120", "--batch", "8", "--width", "16", "--context", "16", "--layers", "2", "--ranks", "2"]
SMALL += ["--microbatches", "2"]


def preempted(folder):
    """`penstock train`, told to leave after its first step; its exit code and what it said."""
    command = [sys.executable, "-m", "penstock", "train", *SMALL, "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " step 1/" in line:
                process.send_signal(signal.SIGTERM)
    return process.returncode, "".join(lines)


@pytest.mark.slow
@pytest.mark.fresh
def test_a_training_that_is_preempted_saves_says_so_by_its_exit_code_and_goes_on_with_the_same_bits(tmp_path):
    code, output = preempted(tmp_path / "preempted")
    (folder,) = (tmp_path / "preempted").iterdir()
    assert code == os.EX_TEMPFAIL, output
    assert f"go on with penstock train --resume {folder}" in output
    done = losses(folder)
    assert 0 < len(done) < 120
    assert f"preempted after step {len(done)}, which is saved" in output
    for words in (["--resume", folder, "--out", tmp_path / "preempted"], [*SMALL, "--out", tmp_path / "undisturbed"]):
        done = penstock("train", *words)
        assert done.returncode == 0, done.stderr
    (undisturbed,) = (tmp_path / "undisturbed").iterdir()
    assert losses(folder) == losses(undisturbed)
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
