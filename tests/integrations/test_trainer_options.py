"""Arguments that change the loss, the data or the files are plain Trainer's over two ranks; rank 0 alone writes and shows."""

import io
from concurrent.futures import Future
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from trainer_cases import arguments, assert_same, collate, model, outcome, rows

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

LOADING = {"dataloader_num_workers": 2, "dataloader_drop_last": True}
WRITING = {
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "save_only_model": True, "report_to": ["tensorboard"],
    "push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True, "disable_tqdm": False,
}  # fmt: skip


def squared_error(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    errors = outputs["logits"].softmax(-1) - torch.nn.functional.one_hot(labels, 3)
    return errors.square().sum() / num_items_in_batch


class FakeHub:
    """Records the names of what is uploaded."""

    def __init__(self) -> None:
        self.uploads: list[str] = []

    def create_repo(self, name: str, **_: Any) -> SimpleNamespace:
        self.uploads.append("a new repository")
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, path_in_repo: str = "model", **_: Any) -> Future[str]:
        self.uploads.append(path_in_repo)
        done: Future[str] = Future()
        done.set_result("https://hub/commit")
        return done


def train(package: Any, folder: Path, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The outcome of a training; what it uploaded and printed on this process."""
    hub, printed = FakeHub(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(printed):
        patch.setattr("transformers.trainer.hf_api", lambda: hub)
        args = arguments(folder, package.TrainingArguments, num_train_epochs=1, **options)
        trainer = package.Trainer(model("perceptron"), args, train_dataset=rows("perceptron"), data_collator=collate, **more)
        trainer.train()
        return {**outcome(trainer, folder), "uploads": hub.uploads, "printed": printed.getvalue()}


def rank_trainings(folder: Path) -> list[dict[str, Any]]:
    import penstock.integrations.transformers as ours

    loading = train(ours, folder / "loading", LOADING, compute_loss_func=squared_error)
    return [loading, train(ours, folder / "writing", WRITING)]


def test_a_loss_function_workers_that_load_and_batches_that_are_dropped(folder, ranks):
    expected = train(transformers, folder / "plain loading", LOADING, compute_loss_func=squared_error)
    for loading, _ in ranks:
        assert_same(loading, expected)
    assert [entry["epoch"] for entry in expected["history"]] == [0.6, 1.0, 1.0]  # five batches of six


def test_rank_0_alone_writes_uploads_and_shows_progress_with_the_idle_share(folder, ranks):
    expected = train(transformers, folder / "plain writing", WRITING)
    for _, writing in ranks:
        assert_same(writing, expected)

    names = [sorted(path.name for path in (folder / name).rglob("*")) for name in ("writing", "plain writing")]
    ours, theirs = ([name for name in found if not name.startswith("events.out")] for found in names)
    assert [name.partition(".")[0] for name in ours if "_" not in name] == [
        name.partition(".")[0] for name in theirs if "_" not in name
    ]
    assert len(names[0]) - len(ours) == 1  # TensorBoard's file

    (_, first), (_, second) = ranks
    assert first["uploads"] == expected["uploads"]
    assert second["uploads"] == []
    assert "2/2" in first["printed"]
    assert "idle " in first["printed"]
    assert "it/s" not in second["printed"]
