"""What the main job prints: progress while it runs, and what it came to."""

import statistics
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.config import TrainConfig
    from penstock.train import Run

LINES = 10  # progress lines of a whole run where there is no terminal


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, config: "TrainConfig", run: "Run") -> None:
        self.steps, self.name = config.steps, f"{run.ranks} rank{'s' * (run.ranks > 1)}"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self.bars = Bars(*columns, console=Console(file=sys.stdout), disable=not sys.stdout.isatty())
        self.task = self.bars.add_task(self.name, total=self.steps, told="")

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def step(self, record: dict[str, Any]) -> None:
        """One step more."""
        told = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"bubble {record['bubble']:.0%} (table {record['bubble_of_the_table']:.0%})  "
            f"peak {megabytes(record['peak_memory_bytes'])}"
        )
        self.bars.update(self.task, advance=1, told=told)
        if not sys.stdout.isatty() and (record["step"] % max(1, self.steps // LINES) == 0 or record["step"] == 1):
            print(f"{self.name}  step {record['step']}/{self.steps}  {told}", flush=True)


def megabytes(size: float) -> str:
    """A size to read."""
    return f"{size / 1e6:,.0f} MB"


def closing(run: "Run", alone: "Run | None", folder: "Path") -> None:
    """What came out, on the console."""
    console = Console(soft_wrap=True)
    console.print(
        f"\nloss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, on the held-out part {run.validation_loss:.4f}", highlight=False
    )
    if run.sample:
        console.print("\nThe model continues held-out text (dim) with:", highlight=False)
        console.print(f"[dim]{_safe(run.prompt)}[/dim]{_safe(run.sample)}", highlight=False)
    if alone is not None:
        console.print(_comparison(run, alone))
    console.print(f"\nmetrics, weights and settings are in {folder}", highlight=False)


def _safe(text: str) -> str:
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return printable.replace("[", r"\[")


def _comparison(run: "Run", alone: "Run") -> Table:
    """The two runs side by side, and whether their losses are the same to the last bit."""
    table = Table(
        title=f"\n{run.ranks} ranks and one process, the same {len(run.losses)} steps, one thread each", title_justify="left"
    )
    for heading in ("", f"{run.ranks} ranks", "one process", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    same = sum(a == b for a, b in zip(run.losses, alone.losses, strict=True))
    equal = (
        "equal to the last bit, in every step" if same == len(run.losses) else f"DIFFERENT in {len(run.losses) - same} steps"
    )
    times = statistics.median(run.seconds), statistics.median(alone.seconds)
    table.add_row("last loss", f"{run.losses[-1]!r}", f"{alone.losses[-1]!r}", equal)
    table.add_row(
        "held-out loss",
        f"{run.validation_loss!r}",
        f"{alone.validation_loss!r}",
        "equal" if run.validation_loss == alone.validation_loss else "DIFFERENT",
    )
    table.add_row("a step", f"{times[0] * 1e3:.0f} ms", f"{times[1] * 1e3:.0f} ms", f"{times[1] / times[0]:.2f} times as fast")
    table.add_row(
        "bubble",
        f"{statistics.median(run.bubbles):.0%}",
        f"{statistics.median(alone.bubbles):.0%}",
        f"the table's is {run.planned_bubble:.0%}",
    )
    table.add_row("peak memory of a rank", megabytes(run.peak_memory), megabytes(alone.peak_memory), "")
    return table
