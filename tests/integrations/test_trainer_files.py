"""Saving, resuming, evaluating and stopping early: Trainer over two ranks beside plain Trainer, to the bit."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from trainer_cases import arguments, assert_same, collate, model, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

SETTINGS = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy", "greater_is_better": True, "num_train_epochs": 3,
}  # fmt: skip


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def without_labels(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in collate(batch).items() if name != "labels"}


def train(package: Any, folder: Path, resume: str | bool | None = None) -> dict[str, Any]:
    """A training that evaluates, saves and goes on until its best is three steps old; then predictions."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    class SaveRecorder(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            calls.append((state.global_step, state.best_metric))

    calls: list[Any] = []
    trainer = package.Trainer(
        model("bert"),
        arguments(folder, package.TrainingArguments, **SETTINGS),
        train_dataset=rows("bert"),
        eval_dataset=rows("bert", 10, 5),
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(3), SaveRecorder()],
    )
    trainer.train(resume_from_checkpoint=resume)
    found = outcome(trainer, folder / "model")
    found["callbacks"] = trainer.state.stateful_callbacks
    found["calls"], found["best"] = calls, Path(trainer.state.best_model_checkpoint).name
    found["predictions"] = trainer.predict(rows("bert", 7, 9)).predictions
    trainer.data_collator = without_labels
    found["unlabelled"] = trainer.predict(rows("bert", 5, 9)).predictions
    return found


def train_until(package: Any, folder: Path, step: int | None, **options: Any) -> dict[str, Any]:
    """The outcome of a training of eight steps, resumed from the newest checkpoint, and of its evaluation; until `step`."""

    class Pause(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = state.global_step == step

    args = arguments(folder, package.TrainingArguments, num_train_epochs=4, **options)
    data = {"train_dataset": rows("perceptron"), "eval_dataset": rows("perceptron", 10, 5), "data_collator": collate}
    trainer = package.Trainer(model("perceptron"), args, callbacks=[Pause()], **data)
    trainer.train(resume_from_checkpoint=(folder.exists() and any(folder.iterdir())) or None)
    trainer.evaluate()
    found = outcome(trainer, folder)
    for entry in found["history"]:
        entry.pop("train_loss", None)  # Trainer's mean over the steps of one call
    return found


def rank_training(folder: Path, step: int, schedule: str) -> None:
    import penstock.integrations.transformers as ours

    train_until(ours, folder, step, schedule=schedule)


def rank_trainings(folder: Path, checkpoint: str) -> list[dict[str, Any]]:
    import penstock.integrations.transformers as ours

    starts: dict[str, Any] = {"straight": None, "resumed": checkpoint, "newest": True}
    return [train(ours, folder / name, resume) for name, resume in starts.items()]


@pytest.fixture(scope="module")
def trainings(folder: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Those of plain Trainer, straight and resumed from its checkpoint, and each rank's: these, and from the newest."""
    checkpoint = folder / "plain" / "checkpoint-3"
    expected = [train(transformers, folder / "plain"), train(transformers, folder / "plain resumed", str(checkpoint))]
    shutil.copytree(checkpoint, folder / "newest" / "checkpoint-3")
    (folder / "newest" / "checkpoint-4").mkdir()  # as a rank leaves it that is killed
    return expected, ps.launch(rank_trainings, 2, folder, str(checkpoint))


def assert_alike(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same(ours, expected)
    assert ours["callbacks"] == expected["callbacks"]
    assert ours["best"] == expected["best"]
    assert numpy.array_equal(ours["predictions"], expected["predictions"])
    assert numpy.array_equal(ours["unlabelled"], expected["unlabelled"])


def test_evaluation_predictions_best_model_and_early_stopping_are_those_of_plain_trainer(trainings):
    (expected, _), ranks = trainings
    for straight, *_ in ranks:
        assert_alike(straight, expected)
        assert straight["calls"] == expected["calls"]
    assert len(expected["calls"]) == int(expected["best"].rpartition("-")[2]) + 2  # the last is not saved


def test_it_goes_on_from_plain_trainers_checkpoint_in_the_middle_of_an_epoch(trainings):
    (_, expected), ranks = trainings
    for _, *resumed in ranks:
        for result in resumed:
            assert_alike(result, expected)


def test_plain_trainer_goes_on_from_a_checkpoint_of_two_ranks(folder, trainings):
    (_, expected), _ = trainings
    assert_alike(train(transformers, folder / "back", str(folder / "straight" / "checkpoint-3")), expected)


def test_a_checkpoint_has_the_files_of_plain_trainers(folder, trainings):
    ours, theirs = (sorted(os.listdir(folder / name / "checkpoint-3")) for name in ("straight", "plain"))
    assert ours == theirs


def test_a_training_of_four_ranks_goes_on_with_two_of_another_schedule_and_then_with_one(tmp_path):
    import penstock.integrations.transformers as ours

    ps.launch(rank_training, 4, tmp_path / "ours", 3, "1f1b")
    ps.launch(rank_training, 2, tmp_path / "ours", 5, "zb-v")
    expected = train_until(transformers, tmp_path / "plain", None)
    found = train_until(ours, tmp_path / "ours", None)
    assert [entry.get("step") for entry in expected["history"]] == [*range(1, 9), 8, 8]
    assert found["history"] == expected["history"]
    assert all(torch.equal(value, found["weights"][name]) for name, value in expected["weights"].items())
