"""The output of the main job: progress while it runs, and at the end its result on one screen."""

import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from penstock.commands.train.config import REPORT, TrainConfig
from penstock.commands.train.training_result import TrainResult

REORDERED_TOLERANCE = 1e-4  # relative difference of losses whose sums have another order
PROGRESS_LINES = 10  # printed over a whole run, without a terminal
MAX_SAMPLE_LINES = 4


class Progress:
    """Show a bar on a terminal; print a line every few steps elsewhere."""

    def __init__(self, config: TrainConfig, run: TrainResult) -> None:
        self.unit = "tokens" if config.model == "gpt" else "images"
        self.steps, self.name = config.steps, f"{run.ranks} rank{'s' * (run.ranks > 1)}"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self.bars = Bars(*columns, console=Console(file=sys.stdout), disable=not sys.stdout.isatty())
        self.task = self.bars.add_task(self.name, total=self.steps, state="")

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """Print text above the bar."""
        print(text, flush=True)

    def step(self, record: dict[str, Any]) -> None:
        """Show the record of a step."""
        state = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} {self.unit}/s  "
            f"ranks idle {record['idle_share']:.0%} (even stages {record['idle_share_of_the_table']:.0%})  "
            f"peak {megabytes(record['peak_memory_bytes'])}"
        )
        self.bars.update(self.task, completed=record["step"], state=state)
        if not sys.stdout.isatty() and (record["step"] % max(1, self.steps // PROGRESS_LINES) == 0 or record["step"] == 1):
            print(f"{self.name}  step {record['step']}/{self.steps}  {state}", flush=True)


def megabytes(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e6:,.0f} MB"


def print_result(run: TrainResult, single_run: TrainResult | None, folder: Path) -> None:
    """Print the result of the run, in at most 24 lines. `single_run`: that of the same steps in one process, or None."""
    if run.preempted:
        reason = f"preempted after step {len(run.losses)}, which is saved"
        print(f"\n{reason}: go on with penstock train --resume {folder}", flush=True)
        return
    console = Console(soft_wrap=True, markup=False, highlight=False)
    progress = f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}, " if run.losses else ""
    console.print(f"\nloss {progress}on the held-out part {run.validation_loss:.4f}")

    for report in (run.planned, run.explanation):  # the first line of each; REPORT has the others
        if report:
            console.print(report.partition("\n")[0])
    if run.crowding:
        console.print(run.crowding)
    if run.clock_error:
        console.print(f"clocks of different machines: compared, to {run.clock_error * 1e6:.0f} us")

    if run.sample:
        console.print("\nThe model continues held-out text (dim) with:")
        prompt = _safe(run.prompt.splitlines()[-1])
        sample = _safe("\n".join(run.sample.splitlines()[:MAX_SAMPLE_LINES]))
        console.print(f"[dim]{prompt}[/dim]{sample}", markup=True)

    if single_run is not None and run.losses:
        console.print()
        console.print(_comparison(run, single_run))

    console.print(f"\nmetrics, checkpoints and weights are in {folder}")
    if (folder / REPORT).exists():
        console.print(f"where the time went: {REPORT} there, and timeline.html for a browser")


def _safe(text: str) -> str:
    """Return `text` with `?` for letters that a terminal cannot print, and rich's markup escaped."""
    printable = "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "?" for c in text)
    return printable.replace("[", r"\[")


def _comparison(run: TrainResult, single_run: TrainResult) -> Table:
    """Return a table of the two runs, with whether their losses are equal to the last bit."""
    steps = len(run.losses)
    table = Table(
        title=f"The same {steps} steps, one thread in each process{', sums in another order' if run.reordered else ''}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("", f"{run.ranks} ranks", "one process", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    verdict = _verdict(run, list(zip(run.losses, single_run.losses[-steps:], strict=True)), "all steps")
    step, single_step = statistics.median(run.seconds), statistics.median(single_run.seconds)
    table.add_row("last loss", digits(run.losses[-1]), digits(single_run.losses[-1]), verdict)
    held_out = _verdict(run, [(run.validation_loss, single_run.validation_loss)])
    table.add_row("held-out loss", digits(run.validation_loss), digits(single_run.validation_loss), held_out)
    table.add_row("a step", f"{step * 1e3:.0f} ms", f"{single_step * 1e3:.0f} ms", f"speed-up {single_step / step:.2f}")
    idle = [f"{statistics.median(result.idle_shares):.0%}" for result in (run, single_run)]
    table.add_row("ranks idle", *idle, f"even stages {run.planned_idle:.0%}")
    table.add_row("fullest rank", megabytes(run.peak_memory), megabytes(single_run.peak_memory), "peak memory of its process")
    return table


def _verdict(run: TrainResult, pairs: list[tuple[float, float]], where: str = "") -> str:
    """Return as text whether the losses of each pair are equal; with replicas or `tp` a small difference is expected."""
    different = sum(a != b for a, b in pairs)
    if not different:
        return "equal to the last bit" + (f", {where}" if where else "")
    if run.reordered and max(abs(a - b) / abs(b) for a, b in pairs) < REORDERED_TOLERANCE:
        return f"at most {max(abs(a - b) / abs(b) for a, b in pairs):.0e} apart"
    return f"DIFFERENT in {different} steps" if where else "DIFFERENT"


def digits(loss: float) -> str:
    """Return a loss as text, with the nine digits that identify a float32."""
    return f"{loss:.9g}"
