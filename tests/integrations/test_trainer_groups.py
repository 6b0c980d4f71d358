"""`group="planned"`: the rows of a step, in batches of like lengths, train as plain Trainer's of the same batches."""

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import arguments, assert_same, collate, model, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

SHORT = {"max_steps": 3}


def train(kind: type, arguments_kind: type, folder: Path, **options: Any) -> dict[str, Any]:
    args = arguments(folder, arguments_kind, **SHORT, **options)
    trainer = kind(model("llama"), args, train_dataset=rows("llama"), data_collator=collate)
    trainer.train()
    return outcome(trainer, folder / "model")


def rank_trainings(folder: Path) -> dict[str, Any]:
    from penstock.integrations.transformers import Trainer, TrainingArguments

    return train(Trainer, TrainingArguments, folder / "ours", group="planned")


@cache
def everyone(folder: Path) -> list[dict[str, Any]]:
    return ps.launch(rank_trainings, 2, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


def test_logs_and_weights_are_those_of_plain_trainer_with_these_batches(folder):
    from transformers import Trainer, TrainingArguments

    from penstock.integrations.transformers import GroupingCollator

    class Grouped(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches = list(islice(epoch_iterator, num_batches))
            grouped = GroupingCollator(collate, len(batches))([row for batch in batches for row in batch])
            return super().get_batch_samples(iter(grouped), num_batches, device)

        def get_train_dataloader(self) -> Any:
            self.data_collator = list
            return super().get_train_dataloader()

    expected = train(Grouped, TrainingArguments, folder / "plain")
    for rank in everyone(folder):
        assert_same(rank, expected)


def test_a_loss_that_is_each_batchs_own_mean_is_refused(folder):
    from penstock.integrations.transformers import Trainer, TrainingArguments

    with pytest.raises(ps.MismatchError, match="it needs a loss divided by the tokens of the whole step"):
        Trainer(model("bert"), arguments(folder, TrainingArguments, group="planned"), train_dataset=rows("bert"))
    with pytest.raises(ps.MismatchError, match="group= is None or 'planned'"):
        Trainer(model("llama"), arguments(folder, TrainingArguments, group="by length"), train_dataset=rows("llama"))


def test_groups_are_padded_less():
    from penstock.integrations.transformers import GroupingCollator

    batches = GroupingCollator(collate, 4)(rows("llama"))
    in_order = [collate(rows("llama")[start : start + 6]) for start in range(0, 22, 6)]
    assert sum(len(batch["input_ids"]) for batch in batches) == 22
    assert sum(batch["input_ids"].numel() for batch in batches) < sum(batch["input_ids"].numel() for batch in in_order)
    assert [len(batch) for batch in GroupingCollator(list, 4)([{"x": [1]}, {"y": torch.ones(3)}])] == [1, 1]
