"""Continue a text with a trained GPT over ranks, or compute its loss on a text. All ranks call these functions."""

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


def _load_pipeline(source: Path, config: TrainConfig) -> Pipeline:
    """Return the GPT with the weights of the newest whole checkpoint."""
    comms.init_distributed(device=None if config.device == "auto" else config.device)
    pipe = Pipeline(gpt(config), token_loss, "gpipe", MICROBATCHES)
    checkpoint.resume(source, pipe)
    return pipe


def continue_text(source: Path, config: TrainConfig, prompt: str, options: dict[str, Any]) -> None:
    """Continue `prompt`; rank 0 prints each letter as soon as its bytes are complete."""
    pipe, decoder = _load_pipeline(source, config), codecs.getincrementaldecoder("utf-8")(errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the model may write any letter

    def show(text: str) -> None:
        if pipe.position.world.rank == 0:
            print("".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text), end="", flush=True)

    show(prompt)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape"))])  # the bytes that were typed
    pipe.generate(tokens, on_token=lambda column: show(decoder.decode(bytes(column.tolist()))), **options)
    show(decoder.decode(b"", final=True) + "\n")


def evaluate(source: Path, config: TrainConfig, path: Path, batch: int) -> str:
    """Return the mean loss over all bytes but the first, as text; each prediction sees at most the model's context."""
    text = data.read(path).long()
    if len(text) < 2:
        raise PenstockError(f"--data {path} has {len(text)} bytes: 2 or more are needed, one to see and one to predict")
    pipe, total = _load_pipeline(source, config), 0.0
    for inputs, target in _pieces(text, config.context, batch):
        _, loss = pipe.eval(inputs, target=target)
        total += loss.item() * target.numel()
    mean = total / (len(text) - 1)
    return (
        f"loss {mean:.4f}, perplexity {math.exp(mean):.3f} ({mean / math.log(2):.3f} bits a byte), "
        f"over {len(text):,} bytes of {path}"
    )


def _pieces(text: Tensor, context: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets, (batch, context) each, in order; the last pair is one row of the remaining bytes."""
    full_length = (len(text) - 1) // context * context
    inputs, targets = (text[start : start + full_length].view(-1, context).split(batch) for start in (0, 1))
    remainder = [(text[None, full_length:-1], text[None, full_length + 1 :])] if full_length < len(text) - 1 else []
    return [*zip(inputs, targets, strict=True), *remainder] if full_length else remainder
