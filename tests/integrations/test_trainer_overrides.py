"""A script's methods are called as in plain Trainer, or refused by name; what its loss collects is on all ranks."""

import inspect
import os
from collections import Counter, defaultdict, deque
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from prompt import torchrun
from torch import nn
from trainer_cases import arguments, collate, model, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]
pytest.importorskip("accelerate", reason="no accelerate: make neighbours")

from penstock.integrations.transformers import PipelineTrainerMixin, Trainer, TrainingArguments  # noqa: E402
from penstock.integrations.transformers.overrides import REFUSED_OVERRIDES  # noqa: E402

FORMS = ["plain", "ours subclassed", "the mixin before a class", "the mixin behind a class"]
NOT_CALLED_HERE = {
    "called only by a script": {
        "create_optimizer_and_scheduler", "end", "hyperparameter_search", "init_hf_repo", "create_model_card", "push_to_hub",
        "pop_callback", "remove_callback", "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group",
        "log_metrics", "metrics_format", "save_metrics", "save_state",
    },
    "of arguments that are refused: fsdp, auto_find_batch_size, a search": {
        "_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters", "_update_auto_batch_size",
        "_tune_save_checkpoint",
    },
    "of arguments that this training has not: a hub, datasets.Dataset, model_init": {
        "_push_from_checkpoint", "_remove_unused_columns", "call_model_init",
    },
}  # fmt: skip
CALLED_MORE_OFTEN = {  # around the stages too, and by ranks that write no files
    "compute_loss_context_manager", "autocast_smart_context_manager", "_get_output_dir",
}  # fmt: skip
Call = tuple[str, int, tuple[str, ...]]  # a method, its arguments by position and by name


def methods() -> set[str]:
    attributes = vars(transformers.Trainer)
    return {
        name for name, value in attributes.items() if inspect.isroutine(inspect.unwrap(getattr(value, "__func__", value)))
    } - {"__init__"}


def trainer_class(form: str, overrides: type) -> Any:
    """Return a class with these methods above plain Trainer, or ours."""
    if form == "ours subclassed":
        return type("Mine", (overrides, Trainer), {})
    mine = type("Mine", (overrides, transformers.Trainer), {})
    bases = {"the mixin before a class": (PipelineTrainerMixin, mine), "the mixin behind a class": (mine, PipelineTrainerMixin)}
    return mine if form == "plain" else type("Both", bases[form], {})


def make_trainer(form: str, overrides: type, folder: Path, **options: Any) -> Any:
    kind = transformers.TrainingArguments if form == "plain" else TrainingArguments
    args = arguments(folder / f"{overrides.__name__} {form}", kind, **options)
    data = {"train_dataset": rows("perceptron"), "eval_dataset": rows("perceptron", 9, 2), "data_collator": collate}
    return trainer_class(form, overrides)(model("perceptron"), args, **data)


def recorder(calls: list[Call]) -> type:
    """Return a class whose methods all record how they are called."""

    def override(name: str, is_static: bool) -> Any:
        def method(*given: Any, **options: Any) -> Any:
            calls.append((name, len(given), tuple(sorted(options))))
            if is_static:
                return getattr(transformers.Trainer, name)(*given, **options)
            return getattr(super(made, given[0]), name)(*given[1:], **options)

        return staticmethod(method) if is_static else method

    overridden = methods() - {*REFUSED_OVERRIDES}
    are_static = {name: isinstance(vars(transformers.Trainer)[name], staticmethod) for name in overridden}
    made: type = type("Recorder", (), {name: override(name, is_static) for name, is_static in are_static.items()})
    return made


def recorded_calls(form: str, folder: Path) -> Counter[Call]:
    """Return the calls of a training that evaluates, saves, is resumed and loads its best model; then of predictions."""
    calls: list[Call] = []
    steps = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    for epochs in (1, 2):
        trainer = make_trainer(form, recorder(calls), folder, num_train_epochs=epochs, **steps)
        trainer.train(resume_from_checkpoint=epochs > 1)
    trainer.predict(rows("perceptron", 5, 3))
    trainer.save_model()
    return Counter(calls)


# -- what a loss logs and collects ------------------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Collecting:
    """A loss with random masks, which logs and collects, before and after it calls the model."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.meter, self.recent, self.norms = Meter(), deque(maxlen=2), torch.zeros(2)
        self.calls = 0
        self.logged: list[Any] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        self.calls += 1
        keep = torch.rand(len(inputs["labels"])) > 0.3
        inputs["pixel_values"] = inputs["pixel_values"] * keep[:, None, None, None]
        self.log({"kept": float(keep.sum())})

        outputs = model(**inputs)
        losses = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="none")
        loss = (losses * keep).sum() / keep.sum().clamp(min=1)
        self.metrics["train" if self.model.training else "eval"]["loss"].append(loss.item())
        self.meter.total += loss.item()
        self.meter.count += 1
        self.recent.append(round(loss.item(), 3))
        self.norms += torch.stack([loss.detach(), loss.detach() ** 2])
        self.last = {"labels": inputs["labels"].tolist(), "loss": loss.detach()}
        self.log({"loss of a batch": loss.item()})
        if self.calls == 8:  # the last of the second step
            self.control.should_training_stop = True
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *more: Any) -> None:
        if "learning_rate" in logs:
            logs |= {name: sum(values) / len(values) for name, values in self.metrics["train"].items()}
            self.metrics["train"].clear()
        self.logged.append(dict(logs))
        super().log(logs, *more)  # type: ignore[misc]


def collected(form: str, folder: Path) -> dict[str, Any]:
    """Return what such a loss has left on the trainer."""
    trainer = make_trainer(form, Collecting, folder, num_train_epochs=5, eval_strategy="steps", eval_steps=1)
    trainer.train()
    timed = ("runtime", "per_second", "flos", "preparation_time")
    history, logged = (
        [{key: value for key, value in entry.items() if not any(part in key for part in timed)} for entry in entries]
        for entries in (trainer.state.log_history, trainer.logged)
    )
    return {
        "history": history, "logged": logged, "calls": trainer.calls, "meter": vars(trainer.meter), "recent": [*trainer.recent],
        "norms": trainer.norms.tolist(), "last labels": trainer.last["labels"], "last loss": trainer.last["loss"].item(),
        "metrics": {key: dict(value) for key, value in trainer.metrics.items()},
    }  # fmt: skip


def rank_trainings(folder: Path) -> dict[str, Any]:
    calls = {form: recorded_calls(form, folder) for form in FORMS[1:]}
    return {"calls": calls, "collected": {form: collected(form, folder) for form in FORMS[1:]}, "faults": faults(folder)}


@pytest.fixture(scope="module")
def plain_calls(folder: Path) -> Counter[Call]:
    return recorded_calls("plain", folder)


def test_every_method_of_this_release_of_trainer_is_called_here_or_refused_or_listed(plain_calls):
    called = {name for name, *_ in plain_calls}
    listed = set().union(*NOT_CALLED_HERE.values())
    assert methods() - called - {*REFUSED_OVERRIDES} == listed & methods()


@pytest.mark.parametrize("form", FORMS[1:])
def test_every_override_is_called_as_often_and_with_as_many_arguments_as_in_plain_trainer(form, ranks, plain_calls):
    for rank in ranks:
        calls = rank["calls"][form]
        differ = {call: (calls[call], plain_calls[call]) for call in {*calls, *plain_calls} if calls[call] != plain_calls[call]}
        assert {name for name, *_ in differ} <= CALLED_MORE_OFTEN, differ


@pytest.mark.parametrize("form", FORMS[1:])
def test_what_a_loss_logs_and_collects_is_on_all_ranks_as_in_plain_trainer(form, folder, ranks):
    expected = collected("plain", folder)
    assert expected["calls"] == 10
    for rank in ranks:
        assert rank["collected"][form] == expected


# -- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED_OVERRIDES)
@pytest.mark.parametrize("form", FORMS[1:])
def test_an_override_that_would_never_be_called_is_refused_by_name(form, name, tmp_path):
    overrides = type("Overrides", (), {name: lambda self, *_: None})
    with pytest.raises(
        ps.MismatchError, match=rf"^Overrides\.{name} would never be called, because a pipeline .+: (change|over)"
    ):
        make_trainer(form, overrides, tmp_path)


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_method_put_on_the_trainer_that_would_never_be_called_is_refused(call, tmp_path):
    trainer = make_trainer("ours subclassed", Collecting, tmp_path)
    trainer._wrap_model = lambda model, **_: model
    with pytest.raises(ps.MismatchError, match=r"^trainer\._wrap_model would never be called"):
        getattr(trainer, call)()


def test_methods_put_on_the_trainer_are_called(tmp_path):
    trainer, calls = make_trainer("ours subclassed", type("Overrides", (), {}), tmp_path, max_steps=2), []

    def record(name: str, method: Any, self: Any, *given: Any, **options: Any) -> Any:
        calls.append(name)
        return method(*given, **options)

    for name in ("training_step", "_clip_grad_norm", "compute_loss", "log", "prediction_step"):
        setattr(trainer, name, MethodType(partial(record, name, getattr(trainer, name)), trainer))
    trainer.train()
    trainer.evaluate()
    assert Counter(calls) == {"training_step": 6, "_clip_grad_norm": 2, "compute_loss": 8, "log": 4, "prediction_step": 2}


class ChangedBatch:
    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        return super().training_step(model, {**inputs, "pixel_values": inputs["pixel_values"] * 2}, *more)  # type: ignore[misc]


class ScaledBatch:
    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        inputs["pixel_values"].mul_(2)
        return super().training_step(model, inputs, *more)  # type: ignore[misc]


class OwnForward:
    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        loss = self.compute_loss(model, inputs)  # type: ignore[attr-defined]
        self.accelerator.backward(loss)  # type: ignore[attr-defined]
        return loss.detach()


class ObjectOnTrainer:
    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        outputs = model(**inputs)
        self.outputs = Meter()
        return outputs["loss"]


class GradientNorm(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        sum(parameter.grad.norm() for parameter in model.parameters())


def faults(folder: Path) -> dict[str, str]:
    """Return the text of errors and warnings."""
    found = {}
    for overrides in (ChangedBatch, ScaledBatch, OwnForward):
        with pytest.raises(ps.PenstockError) as raised:
            make_trainer("ours subclassed", overrides, folder).train()
        found[overrides.__name__] = str(raised.value)
    with pytest.warns(UserWarning, match="compute_loss sets") as warned:
        make_trainer("ours subclassed", ObjectOnTrainer, folder).train()
    found["ObjectOnTrainer"] = str([warning.message for warning in warned if "compute_loss" in str(warning.message)])
    trainer = make_trainer("ours subclassed", type("Overrides", (), {}), folder)
    trainer.add_callback(GradientNorm)
    with pytest.raises(ps.PenstockError) as raised:
        trainer.train()
    return found | {"GradientNorm": str(raised.value)}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ChangedBatch", "change batches in the collator, or in _prepare_inputs"),
        ("ScaledBatch", "change batches in the collator, or in _prepare_inputs"),
        ("OwnForward", "the model is cut over the ranks, and trains in super().training_step() only"),
        ("ObjectOnTrainer", "compute_loss sets trainer.outputs on the last stage's rank only"),
        ("GradientNorm", "is on another rank: pipe.named_parameters() has the parameters of this rank"),
    ],
)
def test_what_would_be_wrong_is_a_sentence_on_all_ranks(case, said, ranks):
    for rank in ranks:
        assert said in rank["faults"][case]
        assert rank["faults"][case].count("compute_loss sets") <= 1


SCRIPT = """
import sys, transformers
from penstock.integrations.transformers import PipelineTrainerMixin, TrainingArguments
from trainer_cases import arguments, collate, model, rows

calls = []

class Mine(transformers.Trainer):
    def training_step(self, *given, **options):
        calls.append(1)
        return super().training_step(*given, **options)

class Both(PipelineTrainerMixin, Mine):
    pass

args = arguments(sys.argv[1], TrainingArguments, max_steps=2)
trainer = Both(model("perceptron"), args, train_dataset=rows("perceptron"), data_collator=collate)
trainer.train()
print(f"rank {trainer.pipeline.topology.rank} calls {len(calls)}")
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_an_override_behind_the_mixin_is_called_in_ranks_that_torchrun_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = torchrun(2, script, tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} calls 6" in ended.stdout for rank in range(2))
