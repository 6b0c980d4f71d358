"""SFTTrainer and DPOTrainer of trl, over two ranks and with their head replaced, log and save what plain ones do."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.neighbours,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="no trl: make neighbours"),
]
ROOT = Path(__file__).parents[2]


def trained(kind: str, folder: Path, case: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What it logged, and its weights."""
    start = [] if kind == "plain" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *start, str(ROOT / "tests" / "neighbours" / "trl_training.py"), kind, str(folder), case]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    logged = json.loads((folder / "log.json").read_text())
    untimed = [
        {name: value for name, value in row.items() if not name.endswith(("_runtime", "_per_second", "_flos"))}
        for row in logged
    ]
    return untimed, safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "metric"),
    [("sft", "entropy"), ("dpo precomputed", "rewards/margins"), ("dpo reference", "rewards/margins")],
)
def test_a_trainer_of_trl_has_the_numbers_of_one_process(case, metric, tmp_path):
    (plain_log, plain), (log, weights) = (trained(kind, tmp_path / kind, case) for kind in ("plain", "ranks"))
    assert len(log) == 4 + 2 + 1  # steps, evaluations, the end
    assert metric in log[0]
    assert "eval_loss" in log[2]
    assert log == plain_log
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
