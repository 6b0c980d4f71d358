"""`penstock generate`, `penstock eval` and `penstock export`: use the model that a run has trained."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from penstock.commands.command_options import command
from penstock.commands.source import nearest_path
from penstock.commands.train.config import SETTINGS, TrainConfig, saved_options
from penstock.errors import PenstockError
from penstock.launcher.forkserver import start_forkserver_early

T = TypeVar("T")


@command(source="RUN", prompt="TEXT", ranks="P")
class GenerateCommand:
    """Continue a text with the GPT of a run."""

    source: tyro.conf.Positional[Path]
    """Folder of a run, or one checkpoint in it."""
    prompt: str = "def "
    """Text to continue."""
    ranks: int = 2
    """Processes that the model is cut over; torchrun's number under torchrun."""
    max_new_tokens: int = 200
    """Bytes to add."""
    temperature: float = 0.7
    """Randomness of the choice: 0 always takes the likeliest byte."""
    top_k: int | None = None
    """Choose among this many likeliest bytes only."""
    seed: int = 0
    """Seed of the random choice: the same seed gives the same text."""

    def run(self) -> None:
        """Check first, then start."""
        config = _run_config(self.source)
        minimums = {"ranks": 1, "max_new_tokens": 1, "temperature": 0, "top_k": 1, "seed": 0}
        _check_options(config, {name: (getattr(self, name), minimums[name]) for name in minimums})
        if not self.prompt:
            raise PenstockError("--prompt is empty: give it a letter or more")
        start_forkserver_early()
        from penstock.commands.text import continue_text

        options = {name: getattr(self, name) for name in minimums if name != "ranks"}
        _on_ranks(self.ranks, continue_text, self.source, config, self.prompt, options)


@command(source="RUN", ranks="P", batch="ROWS")
class EvalCommand:
    """Compute the loss of a run's GPT on a text."""

    source: tyro.conf.Positional[Path]
    """Folder of a run, or one checkpoint in it."""
    data: Path
    """Text: a file, or a folder whose files are read, up to 8 MB."""
    ranks: int = 2
    """Processes that the model is cut over; torchrun's number under torchrun."""
    batch: int = 32
    """Rows of a batch; a row is a piece of text as long as the model's context."""

    def run(self) -> None:
        """Check first, then start."""
        config = _run_config(self.source)
        _check_options(config, {"ranks": (self.ranks, 1), "batch": (self.batch, 1)})
        if not self.data.exists():
            raise PenstockError(f"--data {self.data} does not exist{nearest_path(self.data)}")
        start_forkserver_early()
        from penstock.commands.text import evaluate

        result = _on_ranks(self.ranks, evaluate, self.source, config, self.data, self.batch)
        if os.environ.get("RANK", "0") == "0":
            print(result)


@command(source="RUN", out="[FILE | FOLDER]", max_shard_size="BYTES")
class ExportCommand:
    """Write a run's weights to safetensors files.

    The weights are those of the run's newest whole checkpoint.
    """

    source: tyro.conf.Positional[Path]
    """Folder of a run, or one checkpoint in it."""
    out: tyro.conf.Positional[Path] = Path("model.safetensors")
    """File to write, or, without the ending .safetensors, a folder of files that transformers loads."""
    max_shard_size: str = "5GB"
    """Largest file in the folder."""

    def run(self) -> None:
        """Join the checkpoint's files, without starting ranks."""
        if not self.source.exists():
            raise PenstockError(f"{self.source} does not exist{nearest_path(self.source)}")
        from penstock import checkpoint

        print(f"wrote {self.out} from {checkpoint.export_checkpoint(self.source, self.out, self.max_shard_size)}")


def _run_config(source: Path) -> TrainConfig:
    """Return the settings of the run that `source` is or lies in. Raises PenstockError if it has trained no GPT."""
    folder = source if (source / SETTINGS).is_file() or not (source.parent / SETTINGS).is_file() else source.parent
    saved = saved_options(folder, str(source))
    if saved["model"] != "gpt":
        raise PenstockError(f"{source} has trained a model of images ({saved['model']}), not of text: give a run of the GPT")
    saved["device"] = "cpu" if saved["device"] == "cpu" else "auto"  # this machine may have other devices
    return TrainConfig(**{name: saved[name] for name in ("layers", "width", "context", "dropout", "device")})


def _check_options(config: TrainConfig, options: dict[str, tuple[Any, int]]) -> None:
    """Raise PenstockError for an option below its least value, and for more ranks than the model has layers."""
    for name, (value, minimum) in options.items():
        if value is not None and not value >= minimum:
            raise PenstockError(f"--{name.replace('_', '-')} {value} is too small: use {minimum} or more")
    ranks, num_layers = options["ranks"][0], config.depth + 3
    if ranks > num_layers:
        raise PenstockError(f"--ranks {ranks} are more than the model's {num_layers} layers: use {num_layers} or fewer")


def _on_ranks(ranks: int, function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` on every rank. Return the result of rank 0, or under torchrun of this rank."""
    from penstock.launcher.launch import launch

    return function(*args) if "RANK" in os.environ else launch(function, ranks, *args)[0]
