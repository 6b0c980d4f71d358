"""`penstock generate` and `penstock eval`: what a run has trained, put to use."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from penstock.commands.source import nearest_path
from penstock.commands.train.config import SETTINGS, TrainConfig, saved_options
from penstock.comms.launch.forkserver import start_forkserver_early
from penstock.comms.launch.launcher import launch
from penstock.errors import PenstockError

T = TypeVar("T")


@dataclass(frozen=True)
class Generate:
    """Continue a text with the GPT that a run has trained, and print it as it comes."""

    source: tyro.conf.Positional[Path]
    """The folder of a run, or one checkpoint in it."""
    prompt: str = "def "
    """The text to continue."""
    ranks: int = 2
    """Processes the model is cut over (under torchrun: its processes)."""
    max_new_tokens: int = 200
    """Bytes to add."""
    temperature: float = 0.7
    """How bold: 0 always takes the likeliest byte."""
    top_k: int | None = None
    """Take one of so many likeliest bytes only."""
    seed: int = 0
    """Of what is drawn: another one, another text."""

    def run(self) -> None:
        """Check first, then start."""
        config = _trained(self.source)
        least = {"ranks": 1, "max_new_tokens": 1, "temperature": 0, "top_k": 1, "seed": 0}
        _check(config, {name: (getattr(self, name), least[name]) for name in least})
        if not self.prompt:
            raise PenstockError("--prompt is empty: give it a letter or more")
        start_forkserver_early()
        from penstock.commands.text import write_on

        options = {name: getattr(self, name) for name in least if name != "ranks"}
        _on_ranks(self.ranks, write_on, self.source, config, self.prompt, options)


@dataclass(frozen=True)
class Eval:
    """Mean loss and perplexity of the GPT that a run has trained, on text of your own."""

    source: tyro.conf.Positional[Path]
    """The folder of a run, or one checkpoint in it."""
    data: Path
    """A file, or a folder whose files are read, up to 8 MB."""
    ranks: int = 2
    """Processes the model is cut over (under torchrun: its processes)."""
    batch: int = 32
    """Pieces of text, as long as the model's context, that go in together."""

    def run(self) -> None:
        """Check first, then start."""
        config = _trained(self.source)
        _check(config, {"ranks": (self.ranks, 1), "batch": (self.batch, 1)})
        if not self.data.exists():
            raise PenstockError(f"--data {self.data} does not exist{nearest_path(self.data)}")
        start_forkserver_early()
        from penstock.commands.text import evaluate

        told = _on_ranks(self.ranks, evaluate, self.source, config, self.data, self.batch)
        if os.environ.get("RANK", "0") == "0":
            print(told)


def _trained(source: Path) -> TrainConfig:
    """The settings of the run that is, or has, `source`. Raises PenstockError if it has trained no GPT."""
    folder = source if (source / SETTINGS).is_file() or not (source.parent / SETTINGS).is_file() else source.parent
    saved = saved_options(folder, str(source))
    if saved["model"] != "gpt":
        raise PenstockError(f"{source} has trained a model of images ({saved['model']}), not of text: give a run of the GPT")
    saved["device"] = "cpu" if saved["device"] == "cpu" else "auto"  # where it was trained need not be where it is used
    return TrainConfig(**{name: saved[name] for name in ("layers", "width", "context", "dropout", "device")})


def _check(config: TrainConfig, given: dict[str, tuple[Any, int]]) -> None:
    """Raises PenstockError for an option below the least it can be, and for more ranks than the model has layers."""
    for name, (value, least) in given.items():
        if value is not None and not value >= least:
            raise PenstockError(f"--{name.replace('_', '-')} {value} is too small: use {least} or more")
    if given["ranks"][0] > config.depth + 3:
        raise PenstockError(f"--ranks {given['ranks'][0]} are more than the model's {config.depth + 3} layers: use fewer")


def _on_ranks(ranks: int, function: Callable[..., T], *args: Any) -> T:
    """What rank 0, or this rank of torchrun's, gets of `function(*args)`."""
    return function(*args) if "RANK" in os.environ else launch(function, ranks, *args)[0]
