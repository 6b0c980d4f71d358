"""The recipes of docs/howto/trainer.md have the numbers of plain Trainer, in both with the same script."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trainer_cases import arguments, collate, model, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]
pytest.importorskip("accelerate", reason="no accelerate: make neighbours")


class AverageWeights(transformers.TrainerCallback):
    """An exponential moving average of the weights that this rank trains."""

    def __init__(self, decay: float) -> None:
        self.decay, self.average = decay, dict[str, Tensor]()

    def named_parameters(self) -> Any:
        pipeline = getattr(self.trainer, "pipeline", None)
        return (self.trainer.model if pipeline is None else pipeline).named_parameters()

    @torch.no_grad()
    def on_step_end(self, *_: Any, **__: Any) -> None:
        for name, parameter in self.named_parameters():
            self.average.setdefault(name, parameter.clone()).lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average: before and after an evaluation, or saving."""
        for name, parameter in self.named_parameters():
            weight = parameter.clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(weight)


class SampleText(transformers.TrainerCallback):
    """Greedy text after a prompt, at each evaluation; on every rank."""

    def __init__(self, prompt: Tensor) -> None:
        self.prompt, self.texts = prompt, list[list[int]]()

    @torch.no_grad()
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        tokens = self.prompt
        for _ in range(4):
            logits = self.trainer.model_wrapped(input_ids=tokens)["logits"]
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        self.texts.append(tokens[0].tolist())


class RDropTrainer:
    """R-drop: each row twice in one call of the model, and how far the two answers are from each other in the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**{name: torch.cat([value, value]) for name, value in inputs.items()})
        first, second = (half.log_softmax(-1) for half in outputs["logits"].chunk(2))
        distance = ((first.exp() - second.exp()) * (first - second)).sum(-1).mean()
        loss = nn.functional.nll_loss(torch.cat([first, second]), torch.cat([labels, labels])) + distance
        return (loss, outputs) if return_outputs else loss


class OwnPredictionStep:
    """A prediction step that calls the model itself."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs["loss"] * 2, outputs["logits"].abs(), inputs["labels"]


def evaluate_by_hand(trainer: Any) -> list[float]:
    """Return the mean loss and the share of right answers: an own evaluation loop."""
    losses, right, count = [], 0, 0
    for batch in trainer.get_eval_dataloader():
        loss, logits, labels = trainer.prediction_step(trainer.model_wrapped, batch, prediction_loss_only=False)
        losses.append(loss.item())
        right, count = right + int((logits.argmax(-1) == labels).sum()), count + len(labels)
    return [sum(losses) / len(losses), right / count]


def train(package: Any, folder: Path, name: str, overrides: Any = object, callback: Any = None, **options: Any) -> Any:
    """Return a trainer that has trained two steps."""
    kind = type("Trainer", (package.Trainer,) if overrides is object else (overrides, package.Trainer), {})
    args = arguments(folder, package.TrainingArguments, max_steps=2, **options)
    data = {"train_dataset": rows(name), "eval_dataset": rows(name, 5, 2), "data_collator": collate}
    trainer = kind(model(name), args, callbacks=[callback] if callback else [], **data)
    if callback is not None:
        callback.trainer = trainer
    trainer.train()
    return trainer


def run_recipes(package: Any, folder: Path) -> dict[str, Any]:
    """Return the numbers of each recipe."""
    average = AverageWeights(0.5)
    trainer = train(package, folder, "perceptron", callback=average)
    found: dict[str, Any] = {"an own evaluation loop": evaluate_by_hand(trainer)}
    average.swap()
    found["averaged weights"] = trainer.evaluate()["eval_loss"]
    average.swap()
    found["the weights again"] = trainer.evaluate()["eval_loss"]

    text = SampleText(torch.tensor([[3, 4, 5]]))
    train(package, folder, "llama", callback=text, eval_strategy="steps", eval_steps=1)
    found["text sampled in a callback"] = text.texts
    own = train(package, folder, "perceptron", OwnPredictionStep)
    found["an own prediction step"] = [own.evaluate()["eval_loss"], own.predict(rows("perceptron", 5, 3)).predictions.tolist()]
    rdrop = train(package, folder, "perceptron", RDropTrainer)
    return found | {"rows twice in compute_loss": [entry.get("loss") for entry in rdrop.state.log_history]}


def rank_trainings(folder: Path) -> dict[str, Any]:
    import penstock.integrations.transformers as ours

    return run_recipes(ours, folder / f"{ps.comms.current_topology().world_size}")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return run_recipes(transformers, folder / "plain")


@pytest.mark.parametrize(
    "recipe",
    [
        "averaged weights", "the weights again", "text sampled in a callback", "an own evaluation loop",
        "an own prediction step",
        "rows twice in compute_loss",
    ],
)  # fmt: skip
def test_a_recipe_has_the_numbers_of_plain_trainer(recipe, ranks, expected):
    for rank in ranks:
        assert rank[recipe] == expected[recipe]
