"""`penstock compare`: two schedules, plans or runs one above the other, or any number of them in a table."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Optional  # not `| None`, for which tyro imports typeguard

import tyro

from penstock.commands.command_options import command
from penstock.commands.show import METAVARS, SimulationOptions, is_timeline_source, load_record
from penstock.errors import PenstockError
from penstock.schedule import Measurement
from penstock.timing.replay import without_teacher
from penstock.view.comparison import Case, csv_table, json_table, latex_table, plot, require_same_unit, text_table
from penstock.view.differences import differences
from penstock.view.files import report_write_errors, write, write_figure
from penstock.view.record import Record
from penstock.view.terminal import draw, terminal_width, use_colors

WORK_OPTIONS = ("model", "batch", "layers", "width", "context")  # options of a run that make its steps longer
COSTS = ("forward", "backward", "weights", "send", "overlap")
_WITH_OPTIONS = re.compile(r"(?P<source>.+?):(?P<options>[a-z][\w-]*=[^,:]*(?:,[a-z][\w-]*=[^,:]*)*)")


@command(
    sources="[SOURCE ..]",
    html="FILE",
    csv="FILE",
    json="FILE",
    latex="FILE",
    plot="FILE",
    **{**METAVARS, "ranks": "P[,P..]", "microbatches": "M[,M..]"},
    **{**dict.fromkeys(COSTS, "TIME[,TIME..]"), "overlap": "SHARE[,SHARE..]"},
)
class CompareCommand:
    """Draw two schedules or runs, or tabulate any number.

    Two are drawn at one scale, one above the other, with their differences. Of more, or at several --ranks, --microbatches or
    costs, a table is printed. Costs are those of a rank, for any number of stages on it. Next to a run or traces, a schedule
    is predicted at the costs measured there, for the same number of ranks and microbatches.

    A schedule may have options of its own: `interleaved-1f1b:stages_per_rank=4,send=0.5`.
    """

    sources: tyro.conf.Positional[tuple[str, ...]] = ("1f1b", "zb-h1")
    """Names, files and folders, as for `penstock show`, each with options of its own behind a colon, if any."""
    ranks: Optional[str] = None
    """P, the processes that the model is cut over, or several numbers, 4,8; 4 by default, a table's own for a table."""
    microbatches: Optional[str] = None
    """M, the microbatches that a batch is split into, or several numbers, 8,16,32; 8 by default, a table's own for a table."""
    stages_per_rank: Optional[int] = None
    """V, the stages on each rank, for the schedules that take any number, and for traces that name no stages."""
    group_size: Optional[int] = None
    """Microbatches that pass through all stages of a rank together, for the interleaved schedules."""
    slices: Optional[int] = None
    """K, the slices that a microbatch is cut into along its sequence, for the schedules that take any number."""
    forward: str = "1"
    """Time of a rank's forward of one microbatch, or several."""
    backward: str = "2"
    """Time of a rank's backward of one microbatch, or several."""
    weights: Optional[str] = None
    """Part of the backward's time that computes the weights' gradients; half of it by default."""
    send: str = "0"
    """Time of a message between two ranks, or several."""
    overlap: str = "0"
    """Share of the shorter action of an overlapped pair that the longer one hides, or several."""
    html: Optional[Path] = None
    """Draw all on a page for the browser, in this file."""
    csv: Optional[Path] = None
    """Write the table's numbers to this CSV file, without rounding."""
    json: Optional[Path] = None
    """Write the same to this JSON file."""
    latex: Optional[Path] = None
    """Write the table for LaTeX to this file; it needs the package booktabs."""
    plot: Optional[Path] = None
    """Draw curves over the microbatches, or over the ranks, in this .svg, .pdf or .png file."""
    plot_value: Literal["bubble", "memory", "makespan"] = "bubble"
    """What --plot draws."""

    def run(self) -> None:
        """Write the files, then print: two pictures with the differences, or the table."""
        sources = [parse_source(source) for source in self.sources]
        runs = {name: load_record(name, self.stages_per_rank) for name, _ in sources if is_timeline_source(name)}
        measured = next((record for record, _ in runs.values() if record.explanation), None)
        cases = list(self._cases(sources, {name: record for name, (record, _) in runs.items()}, measured))
        records = [case.record for case in cases]
        if measured and len(cases) > len(sources):
            problem = f"next to {measured.name}, a schedule is predicted for its ranks and microbatches"
            raise PenstockError(f"{problem}: give one number for each option")
        require_same_unit(records)

        if len(cases) == len(sources) == 2:
            work = [_work_options(name) for name, _ in sources]
            report = [*_pictures(records), differences(records[0], records[1], work)]
        else:
            report = [text_table(cases)]
        if measured and len(runs) < len(sources):
            report.append(_self_prediction(measured))
        report += [note for _, notes in runs.values() for note in notes]
        report += [f"wrote {path}" for path in [*write(records, self.html), *self._write_tables(cases)]]
        print("\n".join(report))

    def _cases(
        self, sources: Sequence[tuple[str, dict[str, Any]]], runs: dict[str, Record], measured: Record | None
    ) -> Iterator[Case]:
        """Yield the cases, a source's together; a table from a file once, whatever ranks and microbatches were asked for."""
        seen = set[tuple[Any, ...]]()
        for source, own_options in sources:
            if source in runs:
                yield Case(runs[source])
                continue
            for options in self._points(source, own_options):
                case = _simulate(source, options, own_options) if measured is None else _predict(source, options, measured)
                step = case.record.usual
                key = case.name, step.ranks, step.makespan, step.peak_memory, *case.costs.items()
                if source.endswith(".csv") and key in seen:
                    continue
                seen.add(key)
                yield case

    def _points(self, source: str, own_options: dict[str, Any]) -> Iterator[SimulationOptions]:
        """Yield the options of a source for all combinations of the listed numbers.

        One number of ranks or microbatches must be that of a table, which has its own place among several.
        """
        single = {name: getattr(self, name) for name in ("stages_per_rank", "group_size", "slices")}
        lists: dict[str, list[Any]] = {
            name: _parse_numbers(f"--{name}", text, int if name in ("ranks", "microbatches") else float)
            for name in ("ranks", "microbatches", *COSTS)
            if (text := getattr(self, name)) is not None and name not in own_options
        }
        if source.endswith(".csv"):
            for name in {"ranks", "microbatches"} & lists.keys():
                lists[name] = lists[name] if len(lists[name]) == 1 else [None]
        for numbers in product(*lists.values()):
            yield SimulationOptions(**{**single, **dict(zip(lists, numbers, strict=True)), **own_options})

    def _write_tables(self, cases: Sequence[Case]) -> Iterator[Path]:
        """Write the table and the plot to the files that are not None, and yield their paths."""
        texts = ((self.csv, csv_table), (self.json, json_table), (self.latex, latex_table))
        for path, text_of in texts:
            if path is not None:
                with report_write_errors(path):
                    path.write_text(text_of(cases), encoding="utf-8")
                yield path
        if self.plot is not None:
            write_figure(plot(cases, self.plot_value), self.plot)
            yield self.plot


def parse_source(text: str) -> tuple[str, dict[str, Any]]:
    """Return a source, and its own options: `interleaved-1f1b:stages_per_rank=4` has one. Raises PenstockError."""
    match = _WITH_OPTIONS.fullmatch(text)
    if match is None:
        return text, {}
    names, options = [field.name for field in fields(SimulationOptions)], dict[str, Any]()
    for word in match["options"].split(","):
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in names:
            raise PenstockError(f"{match['source']} takes no option {name} behind its colon: use {', '.join(names)}")
        options[name] = _parse_numbers(f"{name} of {match['source']}", value, float if name in COSTS else int)[0]
    return match["source"], options


def _parse_numbers(name: str, text: str, kind: Callable[[str], float]) -> list[float]:
    """Return the numbers in `text`, divided by commas. Raises PenstockError."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise PenstockError(f"{name} {text!r} cannot be read: give {words}, with commas between several") from None


def _simulate(source: str, options: SimulationOptions, own_options: dict[str, Any]) -> Case:
    """Time the schedule `source` at the options' costs."""
    schedule, _ = options.build_and_verify(source)
    if own_options:
        schedule = replace(schedule, name=f"{source}:{','.join(f'{name}={value:g}' for name, value in own_options.items())}")
    timeline = options.simulate_with_options(schedule, schedule.stages / schedule.ranks)
    return Case(Record((timeline,)), {name: cost for name in COSTS if (cost := getattr(options, name)) is not None})


def _predict(source: str, options: SimulationOptions, measured: Record) -> Case:
    """Predict the schedule `source` at the costs of the `measured` run or traces, on as many ranks and microbatches."""
    measurement = _measurement(measured)
    same_size = replace(options, ranks=measurement.schedule.ranks, microbatches=measurement.schedule.microbatches)
    schedule, _ = same_size.build_and_verify(source)
    return Case(Record((measurement.predict(schedule),), unit="s", labels=("predicted",)))


def _pictures(records: Sequence[Record]) -> Iterator[str]:
    """Yield the name and the picture of each record, all at one scale."""
    for record in records:
        yield record.name
        yield draw(record.usual, terminal_width(), use_colors(), [record.usual for record in records], record.unit)


def _measurement(record: Record) -> Measurement:
    return Measurement.from_timelines(*record.steps, layers=record.layers)


def _self_prediction(measured: Record) -> str:
    """Return the prediction of the measured step itself: other predictions may be as far off."""
    measurement = _measurement(measured)
    predicted, alone = measurement.predict(measurement.schedule).makespan, without_teacher(measured.usual)
    without = "" if alone is measured.usual else f" without its teacher took {1e3 * alone.makespan:.4g} ms, and"
    return (
        f"{measured.name},{without} is itself predicted to take {1e3 * predicted:.4g} ms, {predicted / alone.makespan - 1:+.1%}"
    )


def _work_options(source: str) -> dict[str, Any]:
    """Return the options of the run `source` that decide its work; an empty dict if `source` is no run."""
    from penstock.commands.train.config import SETTINGS, saved_options  # most sources do not need them

    if not (Path(source) / SETTINGS).is_file():
        return {}
    return {name: value for name, value in saved_options(Path(source), source).items() if name in WORK_OPTIONS}
