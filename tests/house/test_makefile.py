"""What the Makefile names is there."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGETS = ["quick", "test", "slow", "kernels", "gpu", "nccl", "neighbours", "docs", "bench", "rooms", "dist", "matrix"]


def test_each_file_that_a_target_runs_exists():
    commands = subprocess.run(["make", "-n", *TARGETS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = re.findall(r"\b(?:tests|tools|benchmarks|examples)/[\w/]+\.py\b", commands)
    assert "tests/mesh/test_mesh.py" in files
    assert [name for name in files if not (ROOT / name).exists()] == []
