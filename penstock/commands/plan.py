"""`penstock plan`: the fastest step of a model that fits the memory."""

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.commands.source import nearest_path
from penstock.errors import PenstockError
from penstock.learn.puzzles.judge import Missed, fault, loaded
from penstock.learn.written import FAULTS
from penstock.plan import Layers, bytes_of, plan, robustness
from penstock.plan import Plan as Planned
from penstock.plan.estimating import COSTS
from penstock.schedule.timing.explanation import bytes_told
from penstock.view.files import writing

TRANSFORMERS = "transformers:"
MORE_MEMORY = (1.1, 1.25, 1.5)
NOISE, DRAWS = 0.1, 200


@dataclass(frozen=True)
class Plan:
    """Find the cut, schedule, microbatches and recomputation whose step is the shortest in the memory there is."""

    model: tyro.conf.Positional[str | None] = None
    """FILE.py:FUNCTION. The function takes nothing and gives (model, args), with args a microbatch for its forward; or
    (model, args, loss_fn, target), to count the loss too. Each layer is measured here. Or transformers:CONFIG.json, a model of
    transformers, which needs no device: its layers are estimated for --speed and --tokens."""
    ranks: int = 4
    """P: the most processes the model is cut over; with --dp those of all replicas."""
    dp: str = "1"
    """Replicas of the pipeline, which share ranks and rows; or numbers to choose from: 1,2,4."""
    memory: str = "1TB"
    """Of each rank, for parameters, gradients, optimizer state, activations and messages: 2GB, 500MB."""
    batch: int = 64
    """Rows of a step."""
    microbatches: str | None = None
    """Numbers of microbatches to choose from: 8,16. Default: any that divides the batch."""
    schedules: str | None = None
    """Families to choose from: 1f1b,zb-h1. Default: all, and tables made for the model."""
    effort: Literal["quick", "normal", "long"] = "normal"
    """quick: published tables only, in seconds. normal, long: tables made for the model too, in half a minute or minutes."""
    seed: int = 0
    """Of the search. The same gives the same plans."""
    optimizer: float = 2.0
    """Bytes of optimizer state for each byte of parameters."""
    send: float = 0.0
    """Milliseconds that a message between two ranks takes."""
    bandwidth: float = float("inf")
    """Gigabytes a second between two ranks."""
    speed: float = 100.0
    """Of a rank, for estimates: 1e12 operations a second that it reaches."""
    tokens: int = 1024
    """Of a row, for estimates."""
    costs: Path | None = None
    """Take the layers' costs from this file, or from the folder of a run, instead of measuring a model."""
    save_costs: Path | None = None
    """Write what was measured to this file, for --costs."""
    out: Path | None = None
    """Write the best plan to this file, for Pipeline(plan=..), `penstock train --plan` and `penstock show`."""

    def run(self) -> None:
        """Measure or read, plan, tell."""
        check_writable(self.save_costs, self.out)
        layers = self._layers()
        if self.save_costs is not None:
            with writing(self.save_costs):
                layers.save(self.save_costs)
            print(f"wrote {self.save_costs}")
        limit = bytes_of(self.memory)
        with Watched() as watched:
            plans = self._planned(layers, limit, self.effort, watched)
        best = plans[0]
        if self.out is not None:  # before anything is told: whoever reads that may stop at any line
            with writing(self.out):
                best.save(self.out)
        print(table(plans, limit))
        print(f"\n{best}")
        for factor in MORE_MEMORY:
            more = self._planned(layers, factor * limit, "quick")[0]
            if more.seconds < 0.99 * best.seconds:
                less = 1 - more.seconds / best.seconds
                print(f"with {bytes_told(factor * limit)} a rank: {1e3 * more.seconds:.4g} ms, {less:.1%} less")
        middle, worst = robustness(best, NOISE, DRAWS, self.seed)
        print(
            f"where every action takes up to {NOISE:.0%} more or less: {1e3 * middle:.4g} ms in the middle of {DRAWS} draws, "
            f"{1e3 * worst:.4g} ms in the worst"
        )
        if self.out is not None:
            print(f"wrote {self.out}")

    def _layers(self) -> Layers:
        if (self.costs is None) == (self.model is None):
            raise PenstockError("give a model to measure, FILE.py:FUNCTION, or --costs FILE")
        if self.costs is not None:
            costs = self.costs / COSTS if self.costs.is_dir() else self.costs
            if costs != self.costs and not costs.is_file():
                raise PenstockError(f"{self.costs} has no {COSTS}: a run of `penstock train` without --plan leaves it there")
            return Layers.load(costs)
        from penstock.plan import measure, of_transformers

        if str(self.model).startswith(TRANSFORMERS):
            config = Path(str(self.model).removeprefix(TRANSFORMERS))
            if config.suffix == ".json" and not config.is_file():
                raise PenstockError(f"there is no {config}{nearest_path(config)}")
            print(f"estimates, for {self.speed:g}e12 operations a second and rows of {self.tokens} tokens: nothing is measured")
            return of_transformers(config, self.tokens, 1e12 * self.speed)
        model, args, *loss = built(str(self.model))
        loss_fn, target = loss or (None, None)
        return measure(model, args, loss_fn=loss_fn, target=target)

    def _planned(
        self, layers: Layers, memory: float, effort: Any, progress: Callable[..., object] | None = None
    ) -> list[Planned]:
        counts = self.microbatches and whole_numbers("--microbatches", self.microbatches)
        return plan(
            layers,
            self.ranks,
            memory,
            batch=self.batch,
            dp=whole_numbers("--dp", self.dp),
            microbatches=counts or None,
            schedules=self.schedules.split(",") if self.schedules else None,
            effort=effort,
            seed=self.seed,
            optimizer=self.optimizer,
            send=self.send / 1e3,
            bandwidth=self.bandwidth * 1e9,
            progress=progress,
        )


class Watched:
    """A bar on a terminal while tables are searched for. Ctrl-C ends that, with the best so far; once more, it ends all."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("best {task.fields[best]}, Ctrl-C takes it")
        self.bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task, self.enough = self.bars.add_task("", total=1, visible=False, best=""), False

    def __enter__(self) -> "Watched":
        self.before = signal.signal(signal.SIGINT, self._stop)
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()
        signal.signal(signal.SIGINT, self.before)

    def _stop(self, *_: object) -> None:
        if self.enough:
            raise KeyboardInterrupt
        self.enough = True

    def __call__(self, what: str, share: float, seconds: float) -> bool:
        """So much is done; whether that is enough."""
        best = f"{1e3 * seconds:.4g} ms" if math.isfinite(seconds) else "not yet found"
        self.bars.update(self.task, description=what, completed=share, best=best, visible=True)
        return self.enough


def check_writable(*paths: Path | None) -> None:
    """Raises PenstockError for a path that no file can have, before minutes are spent on what is to be written there."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise PenstockError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise PenstockError(f"{path} cannot be written: it is a folder, and a file is asked for")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise PenstockError(f"{path} cannot be written: you have no right to")


def built(source: str) -> Sequence[Any]:
    """What the function gives that `source`, FILE.py:FUNCTION, names. Raises PenstockError if it is none."""
    file, _, name = source.partition(".py:")
    if not name:
        raise PenstockError(f"{source} names no function: write it as model.py:build")
    if not Path(file := f"{file}.py").is_file():
        raise PenstockError(f"{source} names no function: {file} is no file{nearest_path(Path(file))}")
    sys.path.insert(0, str(Path(file).parent))  # as if it had been started
    try:
        made = getattr(loaded(Path(file)), name, None)
        given = made() if callable(made) else None
    except Missed as error:
        raise PenstockError(str(error)) from error
    except PenstockError:
        raise
    except FAULTS as error:
        raise PenstockError(f"{name}() fails: {fault(error, Path(file))}") from error
    if not isinstance(given, tuple) or len(given) not in (2, 4):
        raise PenstockError(f"{source} is to be a function that gives (model, args) or (model, args, loss_fn, target)")
    return given


def numbers(option: str, text: str) -> list[float]:
    """The numbers that `text` lists. Raises PenstockError for anything else."""
    try:
        return [float(each) for each in text.split(",")]
    except ValueError as error:
        raise PenstockError(f"{option} {text} is no list of numbers: write them as 8,16") from error


def whole_numbers(option: str, text: str) -> list[int]:
    """Likewise whole ones."""
    found = numbers(option, text)
    if not all(each.is_integer() for each in found):
        raise PenstockError(f"{option} {text}: give whole numbers, as in 8,16")
    return [int(each) for each in found]


def table(plans: Sequence[Planned], limit: float) -> str:
    """A row for each plan."""
    rows = [("", "step", "above bound", "bubble", "fullest rank", "recomputes", "M", "schedule", "ranks", "cut before")]
    for number, each in enumerate(plans, 1):
        again = sum(way is not None for way in each.recompute)
        rows.append(
            (
                str(number),
                f"{1e3 * each.seconds:.4g} ms",
                f"{each.above:.1%}",
                f"{each.timeline.bubble:.1%}",
                f"{bytes_told(max(each.peak_memory))} ({max(each.peak_memory) / limit:.0%})",
                f"{again} of {each.schedule.stages}",
                str(each.microbatches),
                each.schedule.name,
                f"{each.ranks}{f' x {each.dp}' if each.dp > 1 else ''}",
                ", ".join(each.cuts) if len(each.cuts) < 8 else f"{', '.join(each.cuts[:3])}, .. {each.cuts[-1]}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
