"""`penstock plan`: the fastest way to run a model on given ranks within their memory."""

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.commands.command_options import command
from penstock.commands.source import nearest_path
from penstock.commands.traces import layer_costs, read_traces
from penstock.errors import PenstockError
from penstock.integrations.torch_trace import is_traces
from penstock.plan import ModelProfile, Plan, parse_memory_size, plan, robustness
from penstock.plan.model_profile import COSTS_FILE
from penstock.python_file import USER_CODE_ERRORS, load_file, one_line_error_of_file
from penstock.schedule.memory import format_bytes
from penstock.view.files import report_write_errors

TRANSFORMERS = "transformers:"
LARGER_MEMORY_FACTORS = (1.1, 1.25, 1.5)  # of the limit, also tried
NOISE, DRAWS = 0.1, 200  # relative change of action times; number of random draws


@command(
    model="[FILE.py:FUNCTION | transformers:CONFIG.json]",
    ranks="P", dp="N[,N]", memory="BYTES", batch="ROWS", microbatches="M[,M]", slices="K[,K]", schedules="NAME[,NAME]",
    send="MS", bandwidth="GB/S", speed="TFLOPS", costs="FILE | RUN | TRACES", teacher="SIZE | MODEL | FILE", save_costs="FILE",
    out="FILE",
)  # fmt: skip
class PlanCommand:
    """Find the fastest way to run a model on given ranks.

    A plan is a cut, a schedule, a number of microbatches and what is recomputed. It must fit the memory of the ranks.

    FUNCTION takes no arguments and returns (model, args) or (model, args, loss_fn, target), where args is one microbatch
    for the model's forward. With loss_fn the loss counts too. Each layer is measured on this machine.

    CONFIG.json describes a model of transformers. Its layers are estimated for --speed and --tokens, without a device.
    """

    model: tyro.conf.Positional[str | None] = None
    """Model to measure, or to estimate."""
    ranks: int = 4
    """Most ranks to use, those of all replicas together."""
    dp: str = "1"
    """Replicas of the pipeline, or numbers of replicas to choose from, such as 1,2,4."""
    memory: str = "1TB"
    """Memory of each rank, such as 500MB: parameters, gradients, optimizer state, activations and messages."""
    batch: int = 64
    """Rows of a step, those of all replicas together."""
    microbatches: str | None = None
    """Numbers of microbatches to choose from, such as 8,16; by default all that divide the batch."""
    slices: str = "1"
    """Slices of its tokens that a microbatch is cut into, or numbers to choose from, such as 1,2,4."""
    schedules: str | None = None
    """Families to choose from, such as 1f1b,zb-h1; by default all, and tables searched for the model."""
    effort: Literal["quick", "normal", "long"] = "normal"
    """quick tries published tables, in seconds; normal and long also search for tables, up to minutes."""
    seed: int = 0
    """Seed of the search: the same seed gives the same plans."""
    optimizer: float = 2.0
    """Bytes of optimizer state for each byte of parameters."""
    send: float = 0.0
    """Milliseconds that a message between two ranks takes."""
    bandwidth: float = float("inf")
    """Gigabytes a second between two ranks."""
    speed: float = 100.0
    """Speed of a rank for estimates, in 1e12 operations a second."""
    tokens: int = 1024
    """Tokens of a row for estimates."""
    costs: Path | None = None
    """Read the layers' costs from this file or run, or the stages' from traces, instead of measuring a model."""
    teacher: str | None = None
    """Add a second, frozen model for the next batch: as large as SIZE times the model, or measured or read as the model is."""
    save_costs: Path | None = None
    """Write the measured costs to this file, for --costs."""
    out: Path | None = None
    """Write the best plan to this file, for Pipeline(plan=..), `penstock train --plan` and `penstock show`."""

    def run(self) -> None:
        """Measure or read the layers' costs, plan, print the plans."""
        check_writable(self.save_costs, self.out)
        layers = self._layers(self.model, self.costs)
        teacher = None if self.teacher is None else self._teacher_layers(self.teacher, layers)
        if self.save_costs is not None:
            with report_write_errors(self.save_costs):
                layers.save(self.save_costs)
            print(f"wrote {self.save_costs}")
        limit = parse_memory_size(self.memory)
        with SearchBar() as bar:
            plans = self._plans(layers, teacher, limit, self.effort, bar)
        best = plans[0]
        if self.out is not None:  # before printing: a reader like `head` may end the output early
            with report_write_errors(self.out):
                best.save(self.out)
        print(plans_table(plans, limit))
        print(f"\n{best}")
        for factor in LARGER_MEMORY_FACTORS:
            larger_plan = self._plans(layers, teacher, factor * limit, "quick")[0]
            if larger_plan.seconds < 0.99 * best.seconds:
                less = 1 - larger_plan.seconds / best.seconds
                print(f"with {format_bytes(factor * limit)} a rank: {1e3 * larger_plan.seconds:.4g} ms, {less:.1%} less")
        middle, worst = robustness(best, NOISE, DRAWS, self.seed)
        print(
            f"where every action takes up to {NOISE:.0%} more or less: {1e3 * middle:.4g} ms in the middle of {DRAWS} draws, "
            f"{1e3 * worst:.4g} ms in the worst"
        )
        if self.out is not None:
            print(f"wrote {self.out}")

    def _teacher_layers(self, teacher: str, layers: ModelProfile) -> ModelProfile:
        """Return the costs of the teacher's layers; of a size, those of the model's `layers` times that."""
        try:
            size = float(teacher)
        except ValueError:
            is_model = teacher.startswith(TRANSFORMERS) or ".py:" in teacher
            return self._layers(teacher, None) if is_model else self._layers(None, Path(teacher))
        if not 0 < size < math.inf:
            raise PenstockError(f"--teacher {teacher}: give its size above 0, in times the model's")
        fields = ("forward", "parameters", "frozen")
        return ModelProfile(
            tuple(
                sample._replace(
                    layers=tuple(
                        layer._replace(**{field: size * getattr(layer, field) for field in fields}) for layer in sample.layers
                    )
                )
                for sample in layers.samples
            )
        )

    def _layers(self, model: str | None, costs: Path | None) -> ModelProfile:
        """Return the costs of a model's layers: read from `costs`, estimated, or measured. Raises PenstockError."""
        if (costs is None) == (model is None):
            raise PenstockError("give a model to measure, FILE.py:FUNCTION, or --costs FILE")
        if costs is not None and is_traces(costs):
            record, notes = read_traces(costs)
            print(
                "\n".join(
                    [*notes, "a row of --batch is one microbatch of the traces: `penstock export-costs --rows` changes that"]
                )
            )
            return layer_costs(record)
        if costs is not None:
            file = costs / COSTS_FILE if costs.is_dir() else costs
            if file != costs and not file.is_file():
                raise PenstockError(f"{costs} has no {COSTS_FILE}: a run of `penstock train` without --plan leaves it there")
            return ModelProfile.load(file)
        from penstock.plan import estimate_transformers, measure

        if str(model).startswith(TRANSFORMERS):
            config = Path(str(model).removeprefix(TRANSFORMERS))
            if config.suffix == ".json" and not config.is_file():
                raise PenstockError(f"there is no {config}{nearest_path(config)}")
            print(f"estimates, for {self.speed:g}e12 operations a second and rows of {self.tokens} tokens: nothing is measured")
            return estimate_transformers(config, self.tokens, 1e12 * self.speed)
        module, args, *loss = call_model_function(str(model))
        loss_fn, target = loss or (None, None)
        return measure(module, args, loss_fn=loss_fn, target=target)

    def _plans(
        self,
        layers: ModelProfile,
        teacher: ModelProfile | None,
        memory: float,
        effort: Any,
        progress: Callable[..., object] | None = None,
    ) -> list[Plan]:
        counts = self.microbatches and parse_integers("--microbatches", self.microbatches)
        return plan(
            layers,
            self.ranks,
            memory,
            batch=self.batch,
            dp=parse_integers("--dp", self.dp),
            microbatches=counts or None,
            slices=parse_integers("--slices", self.slices),
            schedules=self.schedules.split(",") if self.schedules else None,
            effort=effort,
            seed=self.seed,
            optimizer=self.optimizer,
            send=self.send / 1e3,
            bandwidth=self.bandwidth * 1e9,
            progress=progress,
            teacher=teacher,
        )


class SearchBar:
    """Show a bar on a terminal during a search. Ctrl-C ends the search with the best plan so far, a second one the program."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("best {task.fields[best]}, Ctrl-C takes it")
        self.bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task, self.interrupted = self.bars.add_task("", total=1, visible=False, best=""), False

    def __enter__(self) -> "SearchBar":
        self.previous_handler = signal.signal(signal.SIGINT, self._stop)
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()
        signal.signal(signal.SIGINT, self.previous_handler)

    def _stop(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __call__(self, description: str, share: float, seconds: float) -> bool:
        """Show the share of the work done and the best step so far. Return whether to end the search."""
        best = f"{1e3 * seconds:.4g} ms" if math.isfinite(seconds) else "not yet found"
        self.bars.update(self.task, description=description, completed=share, best=best, visible=True)
        return self.interrupted


def check_writable(*paths: Path | None) -> None:
    """Raise PenstockError if a file cannot be written, before minutes of work."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise PenstockError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise PenstockError(f"{path} cannot be written: it is a folder")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise PenstockError(f"{path} cannot be written: permission denied")


def call_model_function(source: str) -> Sequence[Any]:
    """Call the function `source`, FILE.py:FUNCTION, and return its result. Raises PenstockError if it fails or is missing."""
    file, _, name = source.partition(".py:")
    if not name:
        raise PenstockError(f"{source} names no function: write it as model.py:build")
    if not Path(file := f"{file}.py").is_file():
        raise PenstockError(f"{source} names no function: {file} is no file{nearest_path(Path(file))}")
    sys.path.insert(0, str(Path(file).parent))  # as Python does for a script
    try:
        function = getattr(load_file(Path(file)), name, None)
        result = function() if callable(function) else None
    except PenstockError:
        raise
    except USER_CODE_ERRORS as error:
        raise PenstockError(f"{name}() fails: {one_line_error_of_file(error, Path(file))}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 4):
        raise PenstockError(f"{source} must be a function that returns (model, args) or (model, args, loss_fn, target)")
    return result


def parse_numbers(option: str, text: str) -> list[float]:
    """Return the numbers in `text`, such as 8,16. Raises PenstockError if it is no list of numbers."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise PenstockError(f"{option} {text} is no list of numbers: write them as 8,16") from error


def parse_integers(option: str, text: str) -> list[int]:
    """Return the integers in `text`, such as 8,16. Raises PenstockError for anything else."""
    values = parse_numbers(option, text)
    if not all(value.is_integer() for value in values):
        raise PenstockError(f"{option} {text}: give whole numbers, as in 8,16")
    return [int(value) for value in values]


def plans_table(plans: Sequence[Plan], limit: float) -> str:
    """Return a table of the plans as text, with a row for each."""
    rows = [("", "step", "above bound", "bubble", "fullest rank", "recomputes", "M", "schedule", "ranks", "cut before")]
    for number, candidate in enumerate(plans, 1):
        recomputed_stages = sum(policy is not None for policy in candidate.recompute)
        rows.append(
            (
                str(number),
                f"{1e3 * candidate.seconds:.4g} ms",
                f"{candidate.share_above_bound:.1%}",
                f"{candidate.timeline.bubble:.1%}",
                f"{format_bytes(max(candidate.peak_memory))} ({max(candidate.peak_memory) / limit:.0%})",
                f"{recomputed_stages} of {len(candidate.recompute)}",
                f"{candidate.microbatches}{f' x {slices} slices' if (slices := candidate.schedule.slices) > 1 else ''}",
                candidate.schedule.name,
                f"{candidate.ranks}{f' x {candidate.dp}' if candidate.dp > 1 else ''}",
                ", ".join(candidate.cuts)
                if len(candidate.cuts) < 8
                else f"{', '.join(candidate.cuts[:3])}, .. {candidate.cuts[-1]}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
