"""A short run of benchmarks/chaos.py: ranks are killed at random, and nothing is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.ranks
@pytest.mark.slow
def test_runs_that_are_disturbed_end_in_the_same_bits():
    command = [sys.executable, str(CHAOS), "--seconds", "1500", "--faults", "5", "--steps", "12", "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 faults in" in ended.stdout
    assert ", 0 wrong: " in ended.stdout
