"""What a training has earned is in its folder, whatever fails afterwards."""

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.commands.train import job
from penstock.commands.train.config import TrainConfig


def rank_trains_without_explanation(folder: Path) -> str:
    def fails(*args: object) -> str:
        assert (folder / "model.safetensors").exists()
        assert json.loads((folder / "run.json").read_text())["losses"]
        raise ValueError("a cost of -7.7e-06")

    patch = pytest.MonkeyPatch()
    patch.setattr(job, "_explanation", fails)
    try:
        config = TrainConfig(model="mlp", ranks=2, microbatches=2, steps=2, batch=8, layers=4, width=64, out=folder.parent)
        return job.train_rank(config, folder).explanation
    finally:
        patch.undo()


@pytest.mark.ranks
def test_an_explanation_that_fails_is_a_sentence_and_all_files_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    explanation = ps.launch(rank_trains_without_explanation, 2, folder)[0]
    assert explanation == (
        "no explanation (ValueError: a cost of -7.7e-06): the training is complete, its weights and losses are written"
    )
    assert explanation in (folder / "report.txt").read_text()
    assert len(json.loads((folder / "run.json").read_text())["losses"]) == 2
    assert ps.checkpoint.exists(folder)
