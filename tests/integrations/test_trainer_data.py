"""Replicas, data without a length, rows by their length, and models that are more than a chain."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import ROWS, arguments, assert_same, collate, model, outcome, rows

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

SHORT = {"max_steps": 2}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {  # model, arguments of the pipeline's training
    "data without a length": ("llama", SHORT),
    "rows by their length": ("llama", {**SHORT, "train_sampling_strategy": "group_by_length"}),
    "low-rank adapters": ("llama", SHORT),
    "losses of routers": ("mixtral", SHORT),
    "images": ("vit", SHORT),
}
CLOSE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # .., and of plain Trainer's
    "encoder and decoder, which share their embedding with the head": ("t5", SHORT, SHORT),
    "replicas": ("llama", {**SHORT, "replicas": 2}, {**SHORT, "gradient_accumulation_steps": 6}),
}


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(rows("llama"))


def train(case: str, kind: type, arguments_kind: type, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    name = (EXACT | CLOSE)[case][0]
    trained = model(name)
    if case == "low-rank adapters":
        import peft

        trained = peft.get_peft_model(trained, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    count = (
        24 if case == "replicas" else ROWS
    )  # an epoch that both share out alike: accelerate gives each replica whole batches
    dataset = Stream() if case == "data without a length" else rows(name, count)
    trainer = kind(trained, arguments(folder, arguments_kind, **options), train_dataset=dataset, data_collator=collate)
    trainer.train()
    return outcome(trainer, folder / "model")


def rank_trainings(folder: Path) -> dict[str, Any]:
    from penstock.integrations.transformers import Trainer, TrainingArguments

    return {
        case: train(case, Trainer, TrainingArguments, folder / case, options)
        for case, (_, options, *_) in (EXACT | CLOSE).items()
    }


@cache
def everyone(folder: Path) -> list[dict[str, Any]]:
    return ps.launch(rank_trainings, 2, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def plain(case: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    return train(case, Trainer, TrainingArguments, folder / f"plain {case}", options)


@pytest.mark.parametrize("case", EXACT)
def test_they_have_the_bits_of_plain_trainer(case, folder):
    expected = plain(case, folder, EXACT[case][1])
    for rank in everyone(folder):
        assert_same(rank[case], expected)


@pytest.mark.parametrize("case", CLOSE)
def test_what_adds_up_in_another_order_is_close_to_plain_trainer(case, folder):
    expected = plain(case, folder, CLOSE[case][2])
    for rank in everyone(folder):
        ours = rank[case]
        for one, other in zip(ours["history"], expected["history"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(ours["weights"][name], value, rtol=1e-3, atol=1e-4)
