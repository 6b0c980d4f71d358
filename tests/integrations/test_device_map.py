"""docs/howto/device-map.md: a script of transformers with `device_map="auto"`, and the same as a pipeline on two ranks."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import OneProcess
from torch import Tensor

import penstock as ps

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "device-map.md").read_text(encoding="utf-8")
SETUP, *CODE = re.findall(r"<!-- setup\n(.*?)-->|```python\n(.*?)```", PAGE, re.DOTALL)


def page() -> dict[str, Any]:
    """What the page defines; without its setup, which writes the model."""
    names: dict[str, Any] = {"__name__": "a page"}
    for _, block in CODE:
        exec(compile(block, "device-map.md", "exec"), names)
    return names


def after(batches: list[dict[str, Tensor]]) -> Any:
    return page()["after"](batches, out="pipeline")


def accumulated(batches: list[dict[str, Tensor]], loss_fn: Any) -> tuple[list[float], dict[str, Tensor]]:
    """One process over the same microbatches of two rows, weighted by their tokens: losses, and the trained weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained("model").train()
    pipe = OneProcess(partial(model, use_cache=False), loss_fn, None, 4, lambda labels: (labels[:, 1:] != -100).sum())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        losses.append(pipe.step(**inputs, target=batch["labels"]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def test_five_lines_are_marked() -> None:
    assert sum(block.count("# <-") for _, block in CODE) == 5


@pytest.mark.slow
@pytest.mark.ranks
def test_the_pipeline_trains_as_one_process_and_its_export_is_a_model_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    monkeypatch.chdir(tmp_path)
    setup: dict[str, Any] = {}
    exec(SETUP[0], setup)
    batches, names = setup["batches"], page()
    spread_losses, _ = names["before"](batches)

    everyone = ps.launch(after, 2, batches)
    losses, text = everyone[0]
    assert os.path.exists("pipeline/config.json")

    expected, weights = accumulated(batches, names["next_token_loss"])
    assert [found for found, _ in everyone] == [expected] * 2
    assert losses == pytest.approx(spread_losses, rel=1e-4)  # of the whole batch at once
    trained = transformers.AutoModelForCausalLM.from_pretrained("pipeline")
    assert all(torch.equal(value, weights[name]) for name, value in trained.state_dict().items())
    assert torch.equal(text, trained.generate(batches[0]["input_ids"][:1], max_new_tokens=4, do_sample=False))
