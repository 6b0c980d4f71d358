"""Trainer over two ranks has the logs and the weights of plain Trainer in one process, to the bit."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import arguments, assert_same, collate, model, outcome, rows

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


def train(kind: type, arguments_kind: type, name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    trainer = kind(model(name), arguments(folder, arguments_kind, **options), train_dataset=rows(name), data_collator=collate)
    trainer.train()
    return outcome(trainer, folder / "model")


def stop_on_rank_0(folder: Path) -> int:
    """Return the steps of a training that a callback of rank 0 ends while the second step is logged."""
    from transformers import TrainerCallback

    from penstock.integrations.transformers import Trainer, TrainingArguments

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= ps.comms.current_topology().rank == 0 and state.global_step == 2

    args = arguments(folder / "stopped", TrainingArguments)
    trainer = Trainer(model("llama"), args, train_dataset=rows("llama"), data_collator=collate, callbacks=[Clock()])
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
    from penstock.integrations.transformers import Trainer, TrainingArguments

    found = {
        case: train(Trainer, TrainingArguments, name, folder / case, options | own)
        for case, (name, options, own) in CASES.items()
    }
    return found | {"prepared": read_after_rank_0(folder), "steps": stop_on_rank_0(folder)}


@cache
def everyone(folder: Path) -> list[dict[str, Any]]:
    return ps.launch(rank_trainings, 2, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.mark.parametrize("case", CASES)
def test_logs_norms_and_weights_are_those_of_plain_trainer(case, folder):
    from transformers import Trainer, TrainingArguments

    name, options, _ = CASES[case]
    expected = train(Trainer, TrainingArguments, name, folder / f"plain {case}", options)
    for rank in everyone(folder):
        assert_same(rank[case], expected)


def test_a_callback_of_rank_0_ends_the_training_on_all_ranks(folder):
    assert [rank["steps"] for rank in everyone(folder)] == [2, 2]


def test_rank_0_prepares_data_before_the_other_ranks_read_it(folder):
    assert [rank["prepared"] for rank in everyone(folder)] == ["rows", "rows"]
