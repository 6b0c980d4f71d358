"""Trainer over two ranks has the logs and the weights of plain Trainer in one process, to the bit."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import arguments, assert_same, collate, model, outcome, rows, train

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

CUTS = ["model.layers.0", "model.layers.1", "model.layers.2"]

# model, arguments of both trainings, arguments of the pipeline's
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "tied weights": ("gpt2", {"logging_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.0}, {}),
    "a loss that is each batch's own mean": ("bert", {"optim": "sgd"}, {}),
    "bfloat16, and recomputation": ("llama", {"bf16": True, "max_steps": 2}, {"activation_checkpointing": True}),
    "label smoothing": ("gpt2", {"label_smoothing_factor": 0.1, "optim": "adafactor", "max_steps": 2}, {}),
    "a schedule in a V, cut by name": ("llama", {"max_steps": 2}, {"schedule": "zb-v", "cuts": CUTS}),
}


class Half(transformers.Trainer):
    """Float16 on the CPU, with the scaler that accelerate makes on GPUs alone; the first steps overflow."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)


def train_half(package: Any, trainer_class: type, folder: Path) -> list[Any]:
    """Return the outcome of a training in float16, that of one resumed in its middle, and the scaler's last state."""
    outcomes = []
    for resume in (None, str(folder / "checkpoint-4")):
        args = arguments(folder, package.TrainingArguments, fp16=True, max_steps=8, save_strategy="steps", save_steps=4)
        trainer = trainer_class(model("bert"), args, train_dataset=rows("bert"), data_collator=collate)
        trainer.train(resume)
        outcomes.append(outcome(trainer, folder / "model"))
    return [*outcomes, torch.load(folder / "checkpoint-8" / "scaler.pt")]


def stop_on_rank_0(folder: Path) -> int:
    """Return the steps of a training that a callback of rank 0 ends while the second step is logged."""
    from transformers import TrainerCallback

    from penstock.integrations.transformers import Trainer, TrainingArguments

    class StopOnRank0(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= ps.comms.current_topology().rank == 0 and state.global_step == 2

    args = arguments(folder / "stopped", TrainingArguments)
    trainer = Trainer(model("llama"), args, train_dataset=rows("llama"), data_collator=collate, callbacks=[StopOnRank0()])
    trainer.train()
    return int(trainer.state.global_step)


def read_after_rank_0(folder: Path) -> str:
    """Return what a block of `main_process_first` finds in a file that the block of rank 0 writes."""
    from penstock.integrations.transformers import TrainingArguments

    path = folder / "prepared"
    with arguments(folder, TrainingArguments).main_process_first(desc="prepare the data"):
        if ps.comms.current_topology().rank == 0:
            time.sleep(0.5)
            path.write_text("rows")
        return path.read_text()


def rank_trainings(folder: Path) -> dict[str, Any]:
    import penstock.integrations.transformers as ours

    class PipelineHalf(ours.PipelineTrainerMixin, Half):
        """The same over ranks."""

    found = {case: train(ours, name, folder / case, **options, **own) for case, (name, options, own) in CASES.items()}
    half = train_half(ours, PipelineHalf, folder / "half")
    return found | {"half": half, "prepared": read_after_rank_0(folder), "steps": stop_on_rank_0(folder)}


@pytest.mark.parametrize("case", CASES)
def test_logs_norms_and_weights_are_those_of_plain_trainer(case, folder, ranks):
    name, options, _ = CASES[case]
    expected = train(transformers, name, folder / f"plain {case}", **options)
    for rank in ranks:
        assert_same(rank[case], expected)


def test_in_float16_all_ranks_skip_the_steps_that_plain_trainer_skips(folder, ranks):
    *expected, scaler = train_half(transformers, Half, folder / "plain half")
    assert scaler["scale"] < 2.0**18
    for rank in ranks:
        *outcomes, shared = rank["half"]
        for ours, theirs in zip(outcomes, expected, strict=True):
            assert_same(ours, theirs)
        assert shared == scaler


def test_a_callback_of_rank_0_ends_the_training_on_all_ranks(ranks):
    assert [rank["steps"] for rank in ranks] == [2, 2]


def test_rank_0_prepares_data_before_the_other_ranks_read_it(ranks):
    assert [rank["prepared"] for rank in ranks] == ["rows", "rows"]
