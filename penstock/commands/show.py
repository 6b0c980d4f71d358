"""`penstock schedules` and `penstock show`: list schedules, and draw schedules, plans and runs."""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, Optional  # not `| None`, for which tyro imports typeguard: a third of the time of `penstock show`

import tyro

from penstock.commands.command_options import command
from penstock.commands.source import check_file, check_size, default_size, table_from_python, table_of
from penstock.commands.traces import read_traces
from penstock.errors import PenstockError
from penstock.integrations.torch_trace import is_traces
from penstock.plan import is_plan_file
from penstock.plan import load as load_plan
from penstock.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    Table,
    Timeline,
    from_rows,
    names,
    prove,
    script_from_compute_comms_csv,
    simulate,
    verify,
    with_teacher,
)
from penstock.schedule.catalog import FAMILIES
from penstock.schedule.schedule import read_csv_cells
from penstock.schedule.table import pause_garbage_collection
from penstock.timing.simulate import simulate_until_deadlock
from penstock.timing.teacher_stages import costs_with_teacher, teacher_ranks
from penstock.view.citation import bibtex
from penstock.view.figure.deadlock import deadlock_figure, stops
from penstock.view.figure.shapes import FigureStyle
from penstock.view.files import report_write_errors, write, write_figure
from penstock.view.reading import load
from penstock.view.record import Record
from penstock.view.terminal import draw, summary, terminal_width, use_colors

SLOW_FORWARDS = 10**6  # above this many forwards, proving and timing take minutes
METAVARS = {
    "ranks": "P",
    "microbatches": "M",
    "stages_per_rank": "V",
    "group_size": "N",
    "slices": "K",
}  # words for values in --help
_LOWERED = re.compile(r"\d(SEND|RECV)_[FB]\d")


def is_timeline_source(source: str) -> bool:
    """Return whether `source` names a run, a timeline or traces, existing or not, rather than a schedule."""
    is_folder = Path(source).is_dir() or ("/" in source and not source.endswith((".csv", ".py")))
    return source not in names() and (source.endswith((".json", ".json.gz")) or is_folder)


def load_record(source: str, stages_per_rank: int | None = None) -> tuple[Record, list[str]]:
    """Load a run, timeline, plan or traces. Return the record, and notes on how traces were read. Raises PenstockError."""
    if is_traces(Path(source)):
        return read_traces(Path(source), stages_per_rank or 1)
    return Record((load_plan(source).timeline,), unit="s", labels=("planned",)) if is_plan_file(source) else load(source), []


def build_and_verify(source: str, ranks: int | None, microbatches: int | None, **options: int | None) -> tuple[Schedule, str]:
    """Return the schedule of that name or file, and the proof as text. Files: CSV, PyTorch's CSV with communication, Python.

    Raises PenstockError if the schedule cannot be built, read or proved.
    """
    if source.endswith(".csv") and _is_lowered(Path(source)):
        script = script_from_compute_comms_csv(source)
        prove(script)
        assert isinstance(script.schedule, Schedule)
        check_size(source, (script.schedule.ranks, script.schedule.microbatches), ranks, microbatches)
        return script.schedule, f"{verify(script.schedule)}\nproved: its own sends and receives, in their order, as well"
    schedule = read_unproved(source, ranks, microbatches, **options)
    return schedule, str(verify(schedule))


def read_unproved(source: str, ranks: int | None, microbatches: int | None, **options: int | None) -> Schedule:
    """Return the schedule of that name or file, not proved. Raises PenstockError if it cannot be built or read."""
    if source.endswith(".csv"):
        check_file(source, options)
        table = from_rows(source, read_csv_cells(source))
        check_size(source, (table.ranks, table.microbatches), ranks, microbatches)
        return table
    read = table_from_python if source.endswith(".py") else table_of
    return read(source, ranks, microbatches, **options)


def _is_lowered(path: Path) -> bool:
    """Return whether the CSV file has its own sends and receives."""
    return path.is_file() and _LOWERED.search(path.read_text(encoding="utf-8-sig", errors="replace")) is not None


@command()
class SchedulesCommand:
    """List the schedules with their bubbles and memory."""

    def run(self) -> None:
        """Print a line for each schedule, or several if the terminal is narrow."""
        print("\n".join(_schedule_lines(terminal_width() if sys.stdout.isatty() else None)))
        print(
            "\nP ranks, V stages on each, M microbatches (any number). F, I, W: the time of"
            "\none microbatch's forward, backward to the input and backward to the weights on"
            "\none rank; B = I + W, T = F + B. `penstock show NAME` draws one."
        )


def _schedule_lines(width: int | None) -> Iterator[str]:
    """Yield the lines of a table of the schedules; if it is wider than `width`, yield a paragraph for each schedule."""
    heads = ("schedule", "what it does", "stages on a rank", "bubble", "in flight on rank r")
    rows = [
        (name, family.summary, family.stages_per_rank_text, family.bubble, family.in_flight)
        for name, family in FAMILIES.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    if width is None or sum(widths) + 2 * len(widths) <= width:
        for row in (heads, *rows):
            yield "  ".join(cell.ljust(column) for cell, column in zip(row, widths, strict=True)).rstrip()
        return

    for name, summary_text, *cells in rows:
        details = "; ".join(f"{head}: {cell}" for head, cell in zip(heads[2:], cells, strict=True))
        yield textwrap.fill(f"{name}: {summary_text}; {details}", width, subsequent_indent="    ")


@command()
class SimulationOptions:
    """Options of a schedule, and of the simulator's costs."""

    ranks: Optional[int] = None
    """P, the processes that the model is cut over; 4 by default, a table's own for a table."""
    microbatches: Optional[int] = None
    """M, the microbatches that a batch is split into; 8 by default, a table's own for a table."""
    stages_per_rank: Optional[int] = None
    """V, the stages on each rank, for the schedules that take any number, and for traces that name no stages."""
    group_size: Optional[int] = None
    """Microbatches that pass through all stages of a rank together, for the interleaved schedules."""
    slices: Optional[int] = None
    """K, the slices that a microbatch is cut into along its sequence, for the schedules that take any number."""
    forward: float = 1.0
    """Time of a stage's forward of one microbatch."""
    backward: float = 2.0
    """Time of a stage's backward of one microbatch."""
    weights: Optional[float] = None
    """Part of the backward's time that computes the weights' gradients; half of it by default."""
    send: float = 0.0
    """Time of a message between two ranks."""
    overlap: float = 0.0
    """Share of the shorter action of an overlapped pair that the longer one hides."""

    def build_and_verify(self, source: str) -> tuple[Schedule, str]:
        """Return the schedule of that name or file, and the proof as text."""
        options = {"stages_per_rank": self.stages_per_rank, "group_size": self.group_size, "slices": self.slices}
        return build_and_verify(source, self.ranks, self.microbatches, **options)

    def simulate_with_options(self, schedule: Table, parts: float = 1) -> Timeline:
        """Simulate the schedule with the options' costs, of time and memory, divided by `parts`; a teacher is as large."""
        costs, trained = self.costs(parts), schedule.num_trained_stages
        if schedule.teacher is not None:
            costs = costs_with_teacher(costs, trained, schedule.num_stages - trained)
        return simulate(schedule, costs)

    def costs(self, parts: float = 1) -> Costs:
        """Return the options' costs, of time and memory, divided by `parts`."""
        weights = self.backward / 2 if self.weights is None else self.weights
        if weights > self.backward:
            raise PenstockError(f"--weights {weights:g} is a part of --backward {self.backward:g}: give no more than that")
        forward, inputs, weights = (cost / parts for cost in (self.forward, self.backward - weights, weights))
        return Costs(forward, inputs, weights, self.send, act=1 / parts, overlap=self.overlap)


@command(
    schedule="[SOURCE]",
    csv="FILE",
    json="FILE",
    html="FILE",
    perfetto="FILE",
    svg="FILE",
    png="FILE",
    pdf="FILE",
    figure_width="PIXELS",
    font_size="PIXELS",
    **dict.fromkeys(("forward", "backward", "weights", "send"), "TIME"),
    overlap="SHARE",
    **METAVARS,
)
class ShowCommand(SimulationOptions):
    """Draw a schedule, a plan or a run, with bubble and memory.

    SOURCE is a schedule's name, a file, or a folder. A schedule is timed by the simulator, at the costs that the options give.
    A file is a table as .csv, a .py with a function schedule(rank, ranks, microbatches), which is run here, a plan.json,
    or the timeline.json of a run. A folder is that of a run, drawn as it was measured, or one of torch.profiler's traces, one a
    rank, of another program's steps.
    """

    schedule: tyro.conf.Positional[str] = "1f1b"
    """Name that `penstock schedules` lists, file, or folder of a run or of traces."""
    teacher: bool = False
    """Add a second, frozen model as large as the first, whose forwards of the next batch run in the idle time."""
    table: bool = False
    """Print the table too."""
    csv: Optional[str] = None
    """Write the table to this file, in PyTorch's compute-only form."""
    json: Optional[Path] = None
    """Write a timeline.json, which show, compare and studio read."""
    html: Optional[Path] = None
    """Write a page for the browser, one file: zoom, causes of idle time, memory, critical path."""
    perfetto: Optional[Path] = None
    """Write a trace that ui.perfetto.dev opens."""
    svg: Optional[Path] = None
    """Write a figure for a paper."""
    pdf: Optional[Path] = None
    """Write the same figure as a page of PDF, for LaTeX."""
    png: Optional[Path] = None
    """Write the same figure as an image; needs Pillow: pip install 'penstock-pipeline[png]'."""
    figure_width: float = 720.0
    """Width of the figures of --svg, --pdf and --png in pixels, 96 an inch: 312 fills a column of 3.25 inches."""
    font_size: float = 10.0
    """Size of their texts in pixels; rows grow with it."""
    labels: Literal["auto", "action", "microbatch", "none"] = "auto"
    """Texts on their actions: 2F3, or 3, or none; auto takes the longest that fits."""
    title: bool = False
    """Write the name above them."""
    legend: bool = True
    """Explain their colours below them."""
    memory: bool = False
    """Show memory in those figures, even if it is not known in bytes."""
    path: bool = False
    """Show the critical path in those figures."""
    arrows: bool = False
    """Show messages in those figures, as lines from the sending to the receiving action."""
    bibtex: bool = False
    """Only print how to cite Penstock and the papers of the schedule, in BibTeX."""
    embed: bool = False
    """Write only the chart into the page of --html, to be framed by another page."""

    def run(self) -> None:
        """Write the files, then print: a reader like `head` may end the output early."""
        if self.bibtex:
            is_timeline = is_timeline_source(self.schedule)
            name = load_record(self.schedule, self.stages_per_rank)[0].name if is_timeline else self.schedule
            print(bibtex(name.partition(",")[0]))
            return
        with pause_garbage_collection():  # a large schedule has millions of actions
            record, lines = self._load_record() if is_timeline_source(self.schedule) else self._simulate()
            if self.json is not None:
                with report_write_errors(self.json):
                    record.save(self.json)
                lines.append(f"wrote {self.json}")
            pictures = self.html, self.perfetto, self.svg, self.png, self.embed, self._figure_extras(), self.pdf
            files = write([record], *pictures, self._figure_style())
            print("\n".join([*lines, *(f"wrote {path}" for path in files)]))

    def build_and_verify(self, source: str) -> tuple[Schedule, str]:
        """Return the schedule and its proof, with a teacher if that is asked for."""
        schedule, proof = super().build_and_verify(source)
        if not self.teacher:
            return schedule, proof
        costs = self.costs()
        placement = teacher_ranks(schedule, costs)
        schedule = with_teacher(
            schedule, placement, costs=costs_with_teacher(costs, schedule.num_trained_stages, len(placement))
        )
        return schedule, str(verify(schedule))

    def _figure_style(self) -> FigureStyle:
        return FigureStyle(self.figure_width, self.font_size, self.labels, self.title, self.legend)

    def _figure_extras(self) -> list[str]:
        return [name for name in ("memory", "path", "arrows") if getattr(self, name)]

    def _simulate(self) -> tuple[Record, list[str]]:
        """Build, verify and simulate the schedule. Return the record and the lines to print."""
        if prod(default_size(self.ranks, self.microbatches)) > SLOW_FORWARDS:
            print("millions of actions are proved and timed one by one: that takes minutes", flush=True)
        try:
            schedule, proof = self.build_and_verify(self.schedule)
        except ScheduleError:
            self._draw_until_deadlock()
            raise
        timeline, lines = self.simulate_with_options(schedule), [proof, *([str(schedule)] if self.table else [])]
        lines += [draw(timeline, terminal_width(), use_colors()), summary(timeline)]
        if (parts := schedule.num_trained_stages / schedule.ranks) > 1:
            rank_costs = self.simulate_with_options(schedule, parts)
            most = max(rank_costs.peak_memory)
            result = f"makespan {rank_costs.makespan:g}, memory at most {most:g} microbatches on a rank"
            lines.append(f"these costs are of a stage; at those of a rank, as in `penstock compare`: {result}")
        if self.csv is not None:
            with report_write_errors(self.csv):
                schedule.to_csv(self.csv)
            lines.append(f"wrote {self.csv}")
        return Record((timeline,)), lines

    def _draw_until_deadlock(self) -> None:
        """Draw what runs of a refused table until its ranks wait for each other; nothing if that is not why it is refused."""
        try:
            schedule = read_unproved(self.schedule, self.ranks, self.microbatches)
            timeline = simulate_until_deadlock(schedule, self.costs())
        except PenstockError:
            return
        if stopped := stops(schedule, timeline):
            lines = [f"rank {rank} stops before {action}" for rank, action in stopped.items()]
            print("\n".join([draw(timeline, terminal_width(), use_colors()), *lines]))
            named = replace(timeline, name=f"{schedule.name} deadlocks: {', '.join(lines)}")
            for path in write([Record((named,))], self.html):
                print(f"wrote {path}")
            for figure_path in (self.svg, self.png, self.pdf):
                if figure_path is not None:
                    write_figure(deadlock_figure(schedule, timeline), figure_path)
                    print(f"wrote {figure_path}")

    def _load_record(self) -> tuple[Record, list[str]]:
        """Load the run, timeline or traces. Return the record and the lines to print."""
        if self.table or self.teacher or self.csv is not None:
            raise PenstockError(f"{self.schedule} is a timeline, not a table: leave out --table, --csv and --teacher")
        record, lines = load_record(self.schedule, self.stages_per_rank)
        microbatches = len({event.action.microbatch for event in record.usual.events})
        check_size(self.schedule, (record.usual.ranks, microbatches), self.ranks, self.microbatches)
        timelines = {f"{record.name}, {record.label}": record.usual} | (
            {"predicted": record.predicted} if record.predicted else {}
        )
        for label, timeline in timelines.items():
            picture = draw(timeline, terminal_width(), use_colors(), list(timelines.values()), record.unit)
            lines += [label, picture, summary(timeline, record.unit)]
        if record.explanation:
            lines.append(f"verdict: {record.explanation.verdict_text}")
        return record, lines
