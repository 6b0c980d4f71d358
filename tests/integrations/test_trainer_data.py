"""Replicas, data without a length, rows by their length, and models that are more than a chain."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import ROWS, arguments, assert_same, collate, model, outcome, rows

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

SHORT = {"max_steps": 2}
EVALUATED = {**SHORT, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}  # all rows, on each replica
BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
    "metric_for_best_model": "loss", "greater_is_better": True,  # the worst, which is not the last
}  # fmt: skip
EXACT: dict[str, tuple[str, dict[str, Any]]] = {  # model, arguments of the pipeline's training
    "data without a length": ("llama", SHORT),
    "rows by their length": ("llama", {**SHORT, "train_sampling_strategy": "group_by_length"}),
    "low-rank adapters, and a head that is trained as a whole": ("llama", {**SHORT, **BEST}),
    "losses of routers": ("mixtral", SHORT),
    "images": ("vit", SHORT),
    "encoder and decoder, which share their embedding with the head": ("t5", SHORT),
}
CLOSE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # .., and of plain Trainer's
    "replicas": ("llama", {**EVALUATED, "replicas": 2}, {**EVALUATED, "gradient_accumulation_steps": 6}),
}


class RowStream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(rows("llama"))


def train(case: str, package: Any, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    name = (EXACT | CLOSE)[case][0]
    trained = model(name)
    if case.startswith("low-rank adapters"):
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        trained = peft.get_peft_model(trained, config)
    if name == "t5":  # has a config of its own for the decoder, where plain Trainer leaves the cache on
        trained.decoder.config.use_cache = False
    count = 24 if case == "replicas" else ROWS  # an epoch that both share out alike: accelerate gives each whole batches
    dataset = RowStream() if case == "data without a length" else rows(name, count)
    args = arguments(folder, package.TrainingArguments, **options)
    data = {"train_dataset": dataset, "eval_dataset": rows(name, 5, 2), "data_collator": collate}
    trainer = package.Trainer(trained, args, **data)
    trainer.train()
    return outcome(trainer, folder / "model")


def rank_trainings(folder: Path) -> dict[str, Any]:
    import penstock.integrations.transformers as ours

    return {case: train(case, ours, folder / case, options) for case, (_, options, *_) in (EXACT | CLOSE).items()}


@pytest.mark.parametrize("case", EXACT)
def test_they_have_the_bits_of_plain_trainer(case, folder, ranks):
    expected = train(case, transformers, folder / f"plain {case}", EXACT[case][1])
    for rank in ranks:
        assert_same(rank[case], expected)


@pytest.mark.parametrize("case", CLOSE)
def test_what_adds_up_in_another_order_is_close_to_plain_trainer(case, folder, ranks):
    expected = train(case, transformers, folder / f"plain {case}", CLOSE[case][2])
    for rank in ranks:
        ours = rank[case]
        for one, other in zip(ours["history"], expected["history"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(ours["weights"][name], value, rtol=1e-3, atol=1e-4)
