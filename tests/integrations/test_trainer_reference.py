"""`Trainer(.., ref_model=)`: distillation has the bits of a Trainer that runs the whole reference in its `compute_loss`."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from error_text import outcome as error_text
from torch import Tensor, nn
from trainer_cases import Perceptron, arguments, assert_same, collate, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]
pytest.importorskip("accelerate", reason="no accelerate: make neighbours")

from penstock.integrations.transformers import Trainer, TrainingArguments  # noqa: E402

BATCHES_IN_STEP = 3  # by default of `arguments`


def perceptron(seed: int) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron()


def distil(outputs: Any, labels: Tensor, reference: Any, num_items_in_batch: Any = None) -> Tensor:
    logits, soft = outputs["logits"], reference["logits"].detach().softmax(-1)
    return nn.functional.cross_entropy(logits, labels) + nn.functional.kl_div(
        logits.log_softmax(-1), soft, reduction="batchmean"
    )


def distil_scaled(*values: Any, num_items_in_batch: Any = None) -> Tensor:
    """What Trainer does not divide itself, because it may count items."""
    return distil(*values) / BATCHES_IN_STEP


class CallsReference:
    """A script's own loss, which calls the reference."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            reference = self.ref_model(**inputs)  # type: ignore[attr-defined]
        loss = distil(outputs, inputs["labels"], reference)
        return (loss, outputs) if return_outputs else loss


class Plain(CallsReference, transformers.Trainer): ...


class Ours(CallsReference, Trainer): ...


class ReferenceFirst(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        reference = self.ref_model(**inputs)
        return distil(model(**inputs), inputs["labels"], reference)


class OtherInputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs, values = model(**inputs), inputs["pixel_values"]
        return distil(outputs, inputs["labels"], self.ref_model(pixel_values=values * 2))


def train(make: Any, kind: Any, folder: Path, **options: Any) -> dict[str, Any]:
    reference, args = perceptron(9).eval(), arguments(folder, kind, eval_strategy="epoch")
    data = {"train_dataset": rows("perceptron"), "eval_dataset": rows("perceptron", 5, 2), "data_collator": collate}
    trainer = make(perceptron(7), args, **data, **options)
    if kind is transformers.TrainingArguments:
        trainer.ref_model = reference
    trainer.train()
    found = outcome(trainer, folder / "model")
    for row in found["history"]:
        row.pop("eval_loss", None) if options.get("compute_loss_func") else None  # divided by the batches of a step
    return found


def rank_trainings(folder: Path) -> dict[str, Any]:
    kind, reference = TrainingArguments, {"ref_model": perceptron(9)}
    found: dict[str, Any] = {
        "compute_loss": train(Ours, kind, folder / "override", **reference),
        "compute_loss_func": train(Trainer, kind, folder / "func", compute_loss_func=distil_scaled, **reference),
    }

    def error_of(make: Any, **options: Any) -> str:
        return error_text(lambda: train(make, kind, folder / "wrong", **reference, **options))

    found["no loss"] = error_of(Trainer)
    found["two arguments"] = error_of(Trainer, compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs["loss"])
    found["reference first"] = error_of(ReferenceFirst)
    found["other inputs"] = error_of(OtherInputs)
    outside = Ours(perceptron(7), arguments(folder, kind), **reference)
    found["outside"] = error_text(lambda: outside.ref_model(pixel_values=torch.zeros(2, 3, 8, 8)))
    return found


@cache
def ranks(folder: Path) -> list[dict[str, Any]]:
    return ps.launch(rank_trainings, 2, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("way", ["compute_loss", "compute_loss_func"])
def test_it_has_the_bits_of_plain_trainer(way: str, trained: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = train(Plain, transformers.TrainingArguments, tmp_path)
    if way == "compute_loss_func":
        for row in expected["history"]:
            row.pop("eval_loss", None)
    for found in trained:
        assert_same(found[way], expected)


WRONG = {
    "no loss": "ref_model= has outputs for a loss, and the model's own does not take them: give compute_loss_func=",
    "two arguments": "compute_loss_func does not take the outputs of ref_model= (",
    "reference first": "compute_loss calls ref_model before the model",
    "other inputs": "compute_loss calls ref_model with pixel_values, and the model with",
    "outside": "ref_model is cut over the ranks, and runs in the pipeline's steps",
}


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_use_is_one_sentence(use: str, trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert WRONG[use] in found[use]
        assert "\n" not in found[use]
