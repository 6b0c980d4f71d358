"""The examples run as their first lines say, under torchrun and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prompt import python

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_tutorials_program_prints_the_same_losses_cut_by_hand_under_torchrun_and_traced_alone():
    tutorial, few = EXAMPLES / "tutorial.py", ("--steps", "3", "--layers", "4")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    command = [*torchrun, str(tutorial), "--schedule", "1f1b", *few]
    by_hand = subprocess.run(command, capture_output=True, text=True, timeout=250)
    traced = python(tutorial, "--cut", "traced", "--schedule", "gpipe", *few)
    assert by_hand.returncode == traced.returncode == 0, by_hand.stderr + traced.stderr
    assert "1f1b over 4 stages" in by_hand.stdout
    assert "gpipe over 4 stages" in traced.stdout
    losses = [re.findall(r"step \d  loss ([\d.]+)", done.stdout) for done in (by_hand, traced)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert float(losses[0][0]) > float(losses[0][-1])
