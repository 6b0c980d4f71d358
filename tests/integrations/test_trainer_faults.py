"""A data set that fails, Ctrl-C, a killed rank: one sentence on all ranks, and the last checkpoint is whole."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import arguments, collate, model, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}


class RowsWithGap(torch.utils.data.Dataset):
    """Of which rank 1 cannot read one, in its third step."""

    reads = 0

    def __len__(self) -> int:
        return len(rows("perceptron"))

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        if self.reads == 30 and ps.comms.current_topology().rank == 1:
            raise OSError("a row cannot be read")
        return rows("perceptron")[number]


class Interruption(transformers.TrainerCallback):
    """Ctrl-C on rank 0, after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and ps.comms.current_topology().rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)


class Death(transformers.TrainerCallback):
    """The end of rank 1 while rank 0 writes the third checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and ps.comms.current_topology().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def rank_trainings(folder: Path) -> None:
    """Write the errors of this rank into the folder."""
    from penstock.integrations.transformers import Trainer, TrainingArguments

    data = rows("perceptron")
    cases: dict[str, tuple[Any, list[Any]]] = {
        "gap": (RowsWithGap(), []),
        "interrupted": (data, [Interruption()]),
        "killed": (data, [Death()]),
    }
    for name, (dataset, callbacks) in cases.items():
        args = arguments(folder / name, TrainingArguments, **SAVING)
        trainer = Trainer(model("perceptron"), args, train_dataset=dataset, data_collator=collate, callbacks=callbacks)
        with pytest.raises(BaseException) as raised:
            trainer.train()
        (folder / f"{name} {ps.comms.current_topology().rank}").write_text(str(raised.value) or repr(raised.value))


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[str, str]:
    """The text of the error by case and rank."""
    with pytest.raises(ps.PenstockError, match="rank 1"):
        ps.launch(rank_trainings, 2, folder)
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_what_one_rank_raises_in_a_data_set_or_by_ctrl_c_is_a_sentence_on_the_other(errors):
    assert errors["gap 0"] == "rank 1: OSError: a row cannot be read"
    assert errors["gap 1"] == "a row cannot be read"
    assert errors["interrupted 0"] == "KeyboardInterrupt()"
    assert errors["interrupted 1"] == "rank 0: KeyboardInterrupt"
    assert errors["killed 0"].startswith("rank 1 ")
    assert "\n" not in errors["killed 0"]


@pytest.mark.parametrize("case", ["gap", "interrupted", "killed"])
def test_plain_trainer_goes_on_from_the_last_checkpoint_to_the_bits_of_a_training_without_a_fault(case, folder, errors):
    outcomes = []
    for path in (None, str(folder / case / "checkpoint-2")):
        args = arguments(folder / f"plain {case}", **SAVING | {"save_strategy": "no"})
        trainer = transformers.Trainer(model("perceptron"), args, train_dataset=rows("perceptron"), data_collator=collate)
        trainer.train(path)
        outcomes.append(outcome(trainer, folder / f"plain {case}"))
    straight, resumed = outcomes
    assert not list((folder / case).glob("checkpoint-[34]/trainer_state.json"))
    straight["history"].pop()  # whose mean loss is that of the steps of this call
    resumed["history"].pop()
    assert resumed["history"] == straight["history"]
    assert all(torch.equal(value, straight["weights"][name]) for name, value in resumed["weights"].items())
