"""Text and a trained GPT that is cut over ranks: continued, and measured by its loss. Every rank runs these."""

import codecs
import io
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import checkpoint, comms
from penstock.commands.train import data
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.setup import gpt, token_loss
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline

MICROBATCHES = 4


def _trained(source: Path, config: TrainConfig) -> Pipeline:
    """The GPT with the weights of the newest whole checkpoint."""
    comms.init_distributed(device=None if config.device == "auto" else config.device)
    pipe = Pipeline(gpt(config), token_loss, "gpipe", MICROBATCHES)
    checkpoint.resume(source, pipe)
    return pipe


def write_on(source: Path, config: TrainConfig, prompt: str, options: dict[str, Any]) -> None:
    """Continue `prompt`; rank 0 prints each byte when it is there, as far as it makes letters."""
    pipe, letters = _trained(source, config), codecs.getincrementaldecoder("utf-8")(errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the model may write any letter

    def show(text: str) -> None:
        if pipe.position.world.rank == 0:
            print("".join(each if each.isprintable() or each in "\n\t" else "?" for each in text), end="", flush=True)

    show(prompt)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape"))])  # as it was typed
    pipe.generate(tokens, on_token=lambda column: show(letters.decode(bytes(column.tolist()))), **options)
    show(letters.decode(b"", final=True) + "\n")


def evaluate(source: Path, config: TrainConfig, path: Path, batch: int) -> str:
    """The mean loss over all bytes but the first, in words; the model sees at most its context of them at once."""
    text = data.read(path).long()
    if len(text) < 2:
        raise PenstockError(f"--data {path} has {len(text)} bytes: 2 or more are needed, one to see and one to tell")
    pipe, total = _trained(source, config), 0.0
    for inputs, target in _pieces(text, config.context, batch):
        _, loss = pipe.eval(inputs, target=target)
        total += loss.item() * target.numel()
    mean = total / (len(text) - 1)
    return (
        f"loss {mean:.4f}, perplexity {math.exp(mean):.3f} ({mean / math.log(2):.3f} bits a byte), "
        f"over {len(text):,} bytes of {path}"
    )


def _pieces(text: Tensor, context: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, (batch, context) each, one after the other; what is left over makes a shorter one."""
    whole = (len(text) - 1) // context * context
    inputs, targets = (text[start : start + whole].view(-1, context).split(batch) for start in (0, 1))
    rest = [(text[None, whole:-1], text[None, whole + 1 :])] if whole < len(text) - 1 else []
    return [*zip(inputs, targets, strict=True), *rest] if whole else rest
