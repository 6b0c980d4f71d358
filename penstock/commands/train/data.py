"""The data of `penstock train`: bytes of text, or images of digits, with a held-out part."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from penstock.commands.train.config import HELD_OUT, PIXELS, text_files
from penstock.randomness import mix_seed

MAX_TEXT_BYTES = 8_000_000  # more than a short training reads


@dataclass(frozen=True)
class TextDataset:
    """Bytes of text. A batch is `rows` windows of `context` bytes; its target is the same windows one byte later."""

    train: Tensor  # (bytes,) uint8
    held_out: Tensor
    context: int

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the batch of `step`, the same on every rank: inputs and targets, (rows, context) int64 each."""
        return self._windows(self.train, _generator(seed, step), rows)

    def validation(self, rows: int, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the held-out part, the same in every call."""
        for number in range(batches):
            yield self._windows(self.held_out, _generator(0, number), rows)

    def _windows(self, text: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - self.context, (rows, 1), generator=generator)
        windows = text[starts + torch.arange(self.context + 1)].long()  # (rows, context + 1)
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class DigitsDataset:
    """Images of handwritten digits with their classes."""

    inputs: Tensor  # (images, width) float32, an 8 x 8 image padded with zeros to `width`
    classes: Tensor  # (images,) int64
    held_out: int  # images at the end

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the batch of `step`: images (rows, width) and their classes (rows,)."""
        indices = torch.randint(len(self.inputs) - self.held_out, (rows,), generator=_generator(seed, step))
        return self.inputs[indices], self.classes[indices]

    def validation(self, rows: int, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out images, in at most `batches` batches of `rows`."""
        held_out = zip(*(tensor[-self.held_out :].split(rows) for tensor in (self.inputs, self.classes)), strict=True)
        yield from islice(held_out, batches)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix_seed(seed, step) >> 1)


def text(path: Path | None, context: int) -> TextDataset:
    """Return the bytes that `read` returns, with the last ones held out."""
    content = read(path)
    held_out = int(len(content) * HELD_OUT)
    return TextDataset(content[:-held_out], content[-held_out:], context)


def read(path: Path | None) -> Tensor:
    """Read a file, all files below a folder, or for None the sources of Python's standard library. Return (bytes,) uint8."""
    data = bytearray()
    for file in text_files(path) if path is not None else _sources():
        data += file.read_bytes()[: MAX_TEXT_BYTES - len(data)]
        if len(data) >= MAX_TEXT_BYTES:
            break
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _sources() -> list[Path]:
    standard = Path(sysconfig.get_path("stdlib"))
    packages = sorted(standard.glob("[a-z]*/*.py"))
    return sorted(standard.glob("*.py")) + [file for file in packages if file.parent.name != "site-packages"]


def digits(width: int) -> DigitsDataset:
    """Return scikit-learn's 1797 handwritten digits (8 x 8, from UCI's Optical Recognition of Handwritten Digits)."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.data, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=_generator(0, 0))
    inputs = torch.zeros(len(images), width)
    inputs[:, :PIXELS] = images[order]
    return DigitsDataset(inputs, torch.tensor(loaded.target)[order], held_out=len(images) // 5)
