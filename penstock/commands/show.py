"""The commands `penstock show` and `penstock compare`: find, prove and time, or read; then draw."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional  # not `| None`, for which tyro imports typeguard: a third of the time of `penstock show`

import tyro

from penstock.commands.source import table_of, table_written_in
from penstock.errors import PenstockError
from penstock.plan import is_plan
from penstock.plan import load as load_plan
from penstock.schedule import Costs, Table, Timeline, from_lowered_csv, names, prove, simulate, verify
from penstock.schedule.table import collector_paused
from penstock.view.differences import differences
from penstock.view.files import write, writing
from penstock.view.reading import load
from penstock.view.record import Record
from penstock.view.terminal import colors, draw, summary, terminal_width

WORK = ("model", "batch", "layers", "width", "context")  # of a run's options: what makes its steps longer
LONG = 10**6  # forwards of a schedule, from which on a person wonders
_LOWERED = re.compile(r"\d(SEND|RECV)_[FB]\d")


def is_recorded(source: str) -> bool:
    """Whether `source` is a run or a timeline that was kept, and not a schedule."""
    return source not in names() and (source.endswith(".json") or Path(source).is_dir())


def recorded(source: str) -> Record:
    """The run, timeline or plan that `source` is. Raises PenstockError if it is none."""
    return Record((load_plan(source).timeline,), unit="s", labels=("planned",)) if is_plan(source) else load(source)


def proved(source: str, ranks: int, microbatches: int, **options: int | None) -> tuple[Table, str]:
    """The schedule of that name, or in that CSV or Python file, and what was proved of it; also PyTorch's lowered tables.

    Raises PenstockError for what cannot be built, read or proved.
    """
    if source.endswith(".csv") and _is_lowered(Path(source)):
        script = from_lowered_csv(source)
        prove(script)
        return script.schedule, f"{verify(script.schedule)}\nproved: its own sends and receives, in their order, as well"
    read = table_written_in if source.endswith(".py") else table_of
    schedule = read(source, ranks, microbatches, **options)
    return schedule, str(verify(schedule))


def _is_lowered(path: Path) -> bool:
    """Whether a table says itself what is sent and received when."""
    return path.is_file() and _LOWERED.search(path.read_text(encoding="utf-8-sig", errors="replace")) is not None


@dataclass(frozen=True)
class Simulated:
    """How a schedule is built, and what the simulator is told of it."""

    ranks: int = 4
    """P: processes the model is cut over."""
    microbatches: int = 8
    """M: microbatches each batch is split into."""
    stages_per_rank: Optional[int] = None
    """V, for schedules that leave it open."""
    group_size: Optional[int] = None
    """Microbatches that pass through all stages of a rank together, for the interleaved schedules."""
    forward: float = 1.0
    """What a stage's forward of one microbatch costs."""
    backward: float = 2.0
    """What its backward costs."""
    weights: Optional[float] = None
    """The part of it that is the backward to the weights. Default: half."""
    send: float = 0.0
    """What a message between two ranks costs."""
    overlap: float = 0.0
    """Share of the shorter action of an overlapped pair that the longer one hides."""

    def proved(self, source: str) -> tuple[Table, str]:
        """The schedule of that name or file, and what was proved of it."""
        options = {"stages_per_rank": self.stages_per_rank, "group_size": self.group_size}
        return proved(source, self.ranks, self.microbatches, **options)

    def timed(self, schedule: Table, parts: float = 1) -> Timeline:
        """When each action would run; a stage costs one of `parts` of what is told, and takes as much less memory."""
        weights = self.backward / 2 if self.weights is None else self.weights
        if weights > self.backward:
            raise PenstockError(f"--weights {weights:g} is a part of --backward {self.backward:g}: give no more than that")
        forward, inputs, weights = (each / parts for each in (self.forward, self.backward - weights, weights))
        return simulate(schedule, Costs(forward, inputs, weights, self.send, act=1 / parts, overlap=self.overlap))


@dataclass(frozen=True)
class Show(Simulated):
    """Draw a schedule as it would run, timed by the simulator, or a run as it was measured, with its bubble and memory."""

    schedule: tyro.conf.Positional[str] = "1f1b"
    """A name that `penstock schedules` lists, a CSV table, a Python file with a function schedule(rank, ranks, microbatches),
    which is run, the folder of a run, its timeline.json, or a plan.json."""
    table: bool = False
    """Print the bare table as well."""
    csv: Optional[str] = None
    """Also write the table to this file, in PyTorch's compute-only form."""
    html: Optional[Path] = None
    """Also draw it as a page for the browser: one file, with zoom, causes of idle time, memory and critical path."""
    perfetto: Optional[Path] = None
    """Also write it as a trace that ui.perfetto.dev opens."""
    svg: Optional[Path] = None
    """Also draw it as a figure for a paper."""
    png: Optional[Path] = None
    """The same as an image (needs Pillow: pip install 'penstock[png]')."""
    memory: bool = False
    """These two figures show memory, also where it is not known in bytes."""
    path: bool = False
    """They show the critical path."""
    arrows: bool = False
    """They show a line from each action that sends to the one that receives."""
    embed: bool = False
    """The page is the chart alone, for the frame of another page, whose theme it takes."""

    def run(self) -> None:
        """Build, prove, time, draw - or read and draw; files first, since whoever reads the rest may stop at any line."""
        with collector_paused():  # millions of actions, if so many are asked for
            record, told = self._recorded() if is_recorded(self.schedule) else self._simulated()
            files = write([record], self.html, self.perfetto, self.svg, self.png, self.embed, self._also())
            print("\n".join([*told, *(f"wrote {path}" for path in files)]))

    def _also(self) -> list[str]:
        return [name for name in ("memory", "path", "arrows") if getattr(self, name)]

    def _simulated(self) -> tuple[Record, list[str]]:
        if self.ranks * self.microbatches > LONG:
            print("millions of actions are proved and timed one by one: that takes minutes", flush=True)
        schedule, proof = self.proved(self.schedule)
        timeline, told = self.timed(schedule), [proof, *([str(schedule)] if self.table else [])]
        told += [draw(timeline, terminal_width(), colors()), summary(timeline)]
        if (parts := schedule.stages / schedule.ranks) > 1:
            same = self.timed(schedule, parts)
            of_rank = f"makespan {same.makespan:g}, memory at most {max(same.peak_memory):g} on a rank"
            told.append(f"these costs are of a stage; at those of a rank, as in `penstock compare`: {of_rank}")
        if self.csv is not None:
            with writing(self.csv):
                schedule.to_csv(self.csv)
            told.append(f"wrote {self.csv}")
        return Record((timeline,)), told

    def _recorded(self) -> tuple[Record, list[str]]:
        if self.table or self.csv is not None:
            raise PenstockError(f"{self.schedule} is a timeline, not a table: leave out --table and --csv")
        record, told = recorded(self.schedule), list[str]()
        drawn = {f"{record.name}, {record.label}": record.usual} | ({"planned": record.planned} if record.planned else {})
        for label, timeline in drawn.items():
            told += [label, draw(timeline, terminal_width(), colors(), list(drawn.values())), summary(timeline, record.unit)]
        if record.explanation:
            told.append(f"verdict: {record.explanation.verdict_told}")
        return record, told


@dataclass(frozen=True)
class Compare(Simulated):
    """Draw two schedules, or two runs, one above the other at one scale, and say how they differ.

    Costs are those of a rank, whatever number of stages a schedule gives it.
    """

    first: tyro.conf.Positional[str] = "1f1b"
    """A schedule, a table or a run, as for `penstock show`."""
    second: tyro.conf.Positional[str] = "zb-h1"
    """Another."""
    html: Optional[Path] = None
    """Also draw both on a page for the browser."""

    def run(self) -> None:
        """Draw both, then the numbers; the page first, as in `penstock show`."""
        sources = (self.first, self.second)
        records = [self._record(source) for source in sources]
        told = differences(records[0], records[1], [_done(source) for source in sources])
        files = [*write(records, self.html)]
        for record in records:
            print(record.name)
            print(draw(record.usual, terminal_width(), colors(), [each.usual for each in records]))
        print(told)
        for path in files:
            print(f"wrote {path}")

    def _record(self, source: str) -> Record:
        if is_recorded(source):
            return recorded(source)
        schedule, _ = self.proved(source)
        return Record((self.timed(schedule, schedule.stages / schedule.ranks),))


def _done(source: str) -> dict[str, Any]:
    """What the run in the folder `source` trained, and on how many rows; nothing where that is not known."""
    from penstock.commands.train.config import SETTINGS, saved_options  # most that is shown has no need of them

    if not (Path(source) / SETTINGS).is_file():
        return {}
    return {name: value for name, value in saved_options(Path(source), source).items() if name in WORK}
