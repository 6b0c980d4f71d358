"""The examples run as their first lines say, under torchrun and alone."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorials_program_prints_the_same_losses_cut_by_hand_under_torchrun_and_traced_alone():
    tutorial = str(EXAMPLES / "tutorial.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    few = ("--steps", "3", "--layers", "4")
    commands = [(*torchrun, tutorial, "--schedule", "1f1b", *few), (tutorial, "--cut", "traced", "--schedule", "gpipe", *few)]
    with ThreadPoolExecutor() as at_once:
        by_hand, traced = at_once.map(lambda command: run(*command), commands)
    assert "1f1b over 4 stages" in by_hand
    assert "gpipe over 4 stages" in traced
    losses = [re.findall(r"step \d  loss ([\d.]+)", printed) for printed in (by_hand, traced)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert float(losses[0][0]) > float(losses[0][-1])
