"""`group="planned"`: the rows of a step, in batches of like lengths, train as plain Trainer's of the same batches."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import arguments, assert_same, collate, model, rows, train

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]


def rank_trainings(folder: Path) -> dict[str, Any]:
    import penstock.integrations.transformers as ours

    return train(ours, "llama", folder / "ours", max_steps=3, group="planned")


def test_logs_and_weights_are_those_of_plain_trainer_with_these_batches(folder, ranks):
    from penstock.integrations.transformers import GroupingCollator

    class Grouped(transformers.Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches = list(islice(epoch_iterator, num_batches))
            grouped = GroupingCollator(collate, len(batches))([row for batch in batches for row in batch])
            return super().get_batch_samples(iter(grouped), num_batches, device)

        def get_train_dataloader(self) -> Any:
            self.data_collator = list
            return super().get_train_dataloader()

    package = SimpleNamespace(Trainer=Grouped, TrainingArguments=transformers.TrainingArguments)
    expected = train(package, "llama", folder / "plain", max_steps=3)
    for rank in ranks:
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
