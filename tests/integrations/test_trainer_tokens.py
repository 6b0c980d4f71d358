"""`slices=` and `cp=` of TrainingArguments cut tokens; logs, weights and predictions are plain Trainer's but for rounding."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import MODELS, arguments, assert_same, collate, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

OPTIONS = {"optim": "sgd", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}


def model(attention: str = "penstock", **changes: Any) -> Any:
    torch.manual_seed(7)
    kind, _, config = MODELS["llama"]
    config = transformers.AutoConfig.for_model(kind, **config | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def train(package: Any, folder: Path, attention: str = "penstock", **options: Any) -> dict[str, Any]:
    """The outcome of a training with evaluations, and predictions with its weights."""
    args = arguments(folder, package.TrainingArguments, **OPTIONS, **options)
    data = {"train_dataset": rows("llama", 24), "eval_dataset": rows("llama", 5, seed=2), "data_collator": collate}
    trainer = package.Trainer(model(attention), args, **data)
    trainer.train()
    logits = trainer.predict(data["eval_dataset"]).predictions
    return {**outcome(trainer, folder / "model"), "logits": torch.as_tensor(logits)}


def train_ours(folder: Path, **options: Any) -> dict[str, Any]:
    import penstock.integrations.transformers as ours

    return train(ours, folder, **options)


def resume_on_cp(folder: Path) -> dict[str, Any]:
    """The outcome of a training along cp that goes on from its checkpoint."""
    import penstock.integrations.transformers as ours

    args = arguments(folder, ours.TrainingArguments, **OPTIONS, cp=2, save_strategy="steps", save_steps=2)
    data = {"train_dataset": rows("llama"), "eval_dataset": rows("llama", 5, seed=2), "data_collator": collate}
    outcomes = []
    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = ours.Trainer(model(), args, **data)
        trainer.train(checkpoint)
        outcomes.append(outcome(trainer, folder / "model"))
    return {"whole": outcomes[0], "resumed": outcomes[1]}


def rank_trainings(folder: Path) -> dict[str, Any]:
    slices = train_ours(folder / "slices", slices=2)
    return {"slices": slices, "cp": train_ours(folder / "cp", cp=2), "resume": resume_on_cp(folder / "resume")}


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The sums of float32 are in another order: 1e-4 of each number, which a lost or doubled token exceeds tenfold."""
    assert [entry.keys() for entry in ours["history"]] == [entry.keys() for entry in theirs["history"]]
    for entry, expected in zip(ours["history"], theirs["history"], strict=True):
        assert entry == pytest.approx(expected, rel=1e-4)
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours["logits"], theirs["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["slices", "cp"])
def test_logs_weights_and_predictions_are_those_of_plain_trainer(case, folder, ranks):
    expected = train(transformers, folder / "plain", "sdpa")
    for rank in ranks:
        assert_near(rank[case], expected)


def test_slices_have_the_bits_of_one_process_with_the_same_slices(folder, ranks):
    expected = train_ours(folder / "one process", slices=2)
    for rank in ranks:
        assert_same(rank["slices"], expected)


def test_a_training_along_cp_goes_on_from_its_checkpoint(ranks):
    for rank in ranks:
        for result in rank["resume"].values():  # a resumed history comes from JSON: its keys have another order
            result["history"] = [sorted(entry.items()) for entry in result["history"] if "train_loss" not in entry]
        assert_same(rank["resume"]["resumed"], rank["resume"]["whole"])


@pytest.mark.slow
def test_two_replicas_of_two_ranks_with_two_along_cp(folder):
    expected = train(transformers, folder / "plain of replicas", "sdpa", per_device_train_batch_size=8)
    for rank in ps.launch(partial(train_ours, folder / "replicas", replicas=2, cp=2), 4):
        assert_near(rank, expected)


class OwnLoss:
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs)["loss"]


def refused_trainer(folder: Path, network: Any = None, compute_loss: bool = False, loss: Any = None, **options: Any) -> Any:
    from penstock.integrations.transformers import Trainer, TrainingArguments

    kind = type("Own", (OwnLoss, Trainer), {}) if compute_loss else Trainer
    args = arguments(folder, TrainingArguments, **{"slices": 2} | options)
    return kind(network or model(), args, train_dataset=rows("llama"), data_collator=collate, compute_loss_func=loss)


def test_what_needs_all_tokens_is_refused_when_the_trainer_is_made(tmp_path):
    def message(**options: Any) -> str:
        with pytest.raises(ps.MismatchError) as caught:
            refused_trainer(tmp_path, **options)
        return str(caught.value)

    classifier = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model("llama", **MODELS["llama"][2])
    )
    assert message(cp=2) == "cp=2: give a number that divides the 1 ranks of a replica"
    assert "slices= is a number of slices" in message(slices=0)
    assert "slices= needs a schedule's name" in message(schedule="table.csv")
    assert "and compute_loss would see a part of them" in message(compute_loss=True)
    assert "and compute_loss_func= would see a part of them" in message(loss=lambda *_, **__: 0)
    assert "and label_smoothing_factor= would see a part of them" in message(label_smoothing_factor=0.1)
    assert "it needs a ..ForCausalLM model" in message(network=classifier)
    assert 'the model has attn_implementation="sdpa"' in message(network=model("sdpa"))
