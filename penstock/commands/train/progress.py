"""What the main job prints: progress while it runs, and what it came to."""

import statistics
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from penstock.commands.train.config import TrainConfig
from penstock.commands.train.result import TrainResult

REORDERED = 1e-4  # by so much, relatively, losses may differ whose sums have another order
LINES = 10  # progress lines of a whole run where there is no terminal


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, config: TrainConfig, run: TrainResult) -> None:
        self.unit = "tokens" if config.model == "gpt" else "images"
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

    def say(self, text: str) -> None:
        """A few lines, above the bar."""
        print(text, flush=True)

    def step(self, record: dict[str, Any]) -> None:
        """One step more."""
        told = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} {self.unit}/s  "
            f"ranks idle {record['idle_share']:.0%} (even stages {record['idle_share_of_the_table']:.0%})  "
            f"peak {megabytes(record['peak_memory_bytes'])}"
        )
        self.bars.update(self.task, completed=record["step"], told=told)
        if not sys.stdout.isatty() and (record["step"] % max(1, self.steps // LINES) == 0 or record["step"] == 1):
            print(f"{self.name}  step {record['step']}/{self.steps}  {told}", flush=True)


def megabytes(size: float) -> str:
    """A size to read."""
    return f"{size / 1e6:,.0f} MB"


def closing(run: TrainResult, alone: TrainResult | None, folder: Path) -> None:
    """What came out, on the console."""
    if run.preempted:
        told = f"preempted after step {len(run.losses)}, which is saved"
        print(f"\n{told}: go on with penstock train --resume {folder}", flush=True)
        return
    console = Console(soft_wrap=True, markup=False, highlight=False)
    came = f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}, " if run.losses else ""
    console.print(f"\nloss {came}on the held-out part {run.validation_loss:.4f}")
    if run.planned:
        console.print(f"\n{run.planned}")
    if run.explanation:
        console.print(f"\n{run.explanation}")
    if run.clock_error:
        console.print(f"clocks of different machines: compared, to {run.clock_error * 1e6:.0f} us")
    if run.sample:
        console.print("\nThe model continues held-out text (dim) with:")
        console.print(f"[dim]{_safe(run.prompt)}[/dim]{_safe(run.sample)}", markup=True)
    if alone is not None and run.losses:
        console.print(_comparison(run, alone))
    console.print(f"\nmetrics, checkpoints, weights and settings are in {folder}")
    if (folder / "timeline.html").exists():
        console.print(f"the last steps, measured over planned: open {folder / 'timeline.html'} in a browser")


def _safe(text: str) -> str:
    printable = "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "?" for c in text)
    return printable.replace("[", r"\[")


def _comparison(run: TrainResult, alone: TrainResult) -> Table:
    """The two runs side by side, and whether their losses are the same to the last bit."""
    steps = len(run.losses)
    table = Table(
        title=f"The same {steps} steps, one thread a process{', sums in another order' if run.reordered else ''}",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    for heading in ("", f"{run.ranks} ranks", "one process", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    verdict = _verdict(run, list(zip(run.losses, alone.losses[-steps:], strict=True)), "all steps")
    step, step_alone = statistics.median(run.seconds), statistics.median(alone.seconds)
    table.add_row("last loss", digits(run.losses[-1]), digits(alone.losses[-1]), verdict)
    held_out = _verdict(run, [(run.validation_loss, alone.validation_loss)])
    table.add_row("held-out loss", digits(run.validation_loss), digits(alone.validation_loss), held_out)
    table.add_row("a step", f"{step * 1e3:.0f} ms", f"{step_alone * 1e3:.0f} ms", f"speed-up {step_alone / step:.2f}")
    idle = [f"{statistics.median(each.idle_shares):.0%}" for each in (run, alone)]
    table.add_row("ranks idle", *idle, f"even stages {run.planned_idle:.0%}")
    table.add_row("fullest rank", megabytes(run.peak_memory), megabytes(alone.peak_memory), "peak memory of its process")
    return table


def _verdict(run: TrainResult, losses: list[tuple[float, float]], where: str = "") -> str:
    """How equal these pairs are. Over replicas, and over ranks that share products, sums have another order."""
    different = sum(a != b for a, b in losses)
    if not different:
        return "equal to the last bit" + (f", {where}" if where else "")
    if run.reordered and max(abs(a - b) / abs(b) for a, b in losses) < REORDERED:
        return f"at most {max(abs(a - b) / abs(b) for a, b in losses):.0e} apart"
    return f"DIFFERENT in {different} steps" if where else "DIFFERENT"


def digits(loss: float) -> str:
    """As many digits as tell a float32 from its neighbours."""
    return f"{loss:.9g}"
