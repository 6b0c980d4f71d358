"""What a Trainer over ranks cannot do is a sentence before anything is trained."""

from typing import Any

import pytest
import torch
from trainer_cases import arguments, collate, model, rows

import penstock as ps

pytestmark = pytest.mark.neighbours
pytest.importorskip("accelerate", reason="no accelerate: make neighbours")

from penstock.integrations.transformers import Trainer, TrainingArguments  # noqa: E402
from penstock.integrations.transformers.training_arguments import check_release  # noqa: E402

REFUSED: dict[str, dict[str, Any]] = {
    "torch_compile=": {"torch_compile": True},
    "auto_find_batch_size=": {"auto_find_batch_size": True},
    "full_eval": {"bf16_full_eval": True},
    "neftune_noise_alpha=": {"neftune_noise_alpha": 0.1},
    "debug=": {"debug": "underflow_overflow"},
    "save_on_each_node=": {"save_on_each_node": True},
    "enable_jit_checkpoint=": {"enable_jit_checkpoint": True},
    "optim=": {"optim": "lomo"},
    "activation_checkpointing_kwargs=": {"activation_checkpointing_kwargs": {"every_n_layers": 2}},
}


def trainer(folder: Any, kind: type = Trainer, **options: Any) -> Any:
    args = arguments(folder, TrainingArguments, max_steps=1, **options)
    return kind(model("bert"), args, train_dataset=rows("bert"), data_collator=collate)


@pytest.mark.parametrize("said", REFUSED)
def test_an_argument_that_cannot_be(said, tmp_path):
    with pytest.raises(ps.MismatchError, match=said):
        trainer(tmp_path, **REFUSED[said])


def test_a_release_of_transformers_that_is_too_old_or_not_tested():
    with pytest.raises(ps.MismatchError, match="is too old for a Trainer over ranks"):
        check_release("5.22.1")
    with pytest.warns(UserWarning, match="and this is 6"):
        check_release("6.0.0")


def test_plain_arguments(tmp_path):
    with pytest.raises(ps.MismatchError, match=r"args is a TrainingArguments: make it with penstock.integrations"):
        Trainer(model("bert"), arguments(tmp_path))


def test_replicas_that_do_not_divide_the_ranks(tmp_path):
    with pytest.raises(ps.MismatchError, match="divides the 1 ranks"):
        trainer(tmp_path, replicas=3)


class TwoForwardsTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return (model(**inputs)["loss"] + model(**inputs)["loss"]) / 2


class Positional(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return model(inputs["input_ids"])["logits"].sum()


class Without(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("kind", "said"),
    [(TwoForwardsTrainer, "calls the model twice"), (Positional, "by position"), (Without, "does not call the model")],
)
def test_a_loss_that_runs_the_model_otherwise(kind, said, tmp_path):
    with pytest.raises(ps.PenstockError, match=said):
        trainer(tmp_path, kind).train()


class Weighted(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_the_users_own_runs_in_one_process_too(tmp_path):
    import transformers

    class Plain(transformers.Trainer):
        compute_loss = Weighted.compute_loss

    ours, theirs = (
        trainer(tmp_path, Weighted),
        Plain(model("bert"), arguments(tmp_path, max_steps=1), train_dataset=rows("bert"), data_collator=collate),
    )
    losses = []
    for each in (ours, theirs):
        each.train()
        losses.append(
            [each.state.log_history[0][name] for name in ("loss", "grad_norm")] + [each.evaluate(rows("bert", 5))["eval_loss"]]
        )
    assert losses[0] == losses[1]


def test_each_training_of_model_init_has_a_new_model(tmp_path):
    seen = []

    class Mode(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            seen.append(self.model.training)
            return super().compute_loss(model, inputs, *more, **options)

    args = arguments(tmp_path, TrainingArguments, max_steps=2, eval_strategy="steps", eval_steps=1)
    data = {"train_dataset": rows("bert"), "eval_dataset": rows("bert", 5)}
    ours = Mode(args=args, model_init=lambda: model("bert"), data_collator=collate, **data)
    weights, logs = [], []
    for _ in range(2):
        ours.train()
        weights.append(ours.model.state_dict())
        logs.append([entry["loss"] for entry in ours.state.log_history if "loss" in entry])

    assert logs[0] == logs[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not torch.equal(weights[0]["classifier.weight"], model("bert").state_dict()["classifier.weight"])
    assert sorted({*seen}) == [False, True]  # evaluation comes between the two steps
    assert seen[-1] is False
