"""A table of any number of schedules and runs: as text, CSV, JSON or LaTeX, and a plot of one of its columns."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Timeline
from penstock.view.figure.curves import curves
from penstock.view.figure.shapes import Figure
from penstock.view.record import Record
from penstock.view.terminal import format_memory, format_time

LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX_ESCAPES |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class Case:
    """A schedule or run to compare, and the costs at which the schedule was timed."""

    record: Record
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its record; of a file with a table or rule, without the ending."""
        return re.sub(r"\.(py|csv)$", "", self.record.name)

    def values(self) -> dict[str, Any]:
        """Return its numbers by name, without rounding."""
        step = self.record.usual
        return {
            "schedule": self.name,
            "ranks": step.ranks,
            "microbatches": count_microbatches(step),
            **self.costs,
            "makespan": step.makespan,
            "span": step.span,
            "bubble": step.bubble,
            "bubble_by_span": step.bubble_by_span,
            "memory": max(step.peak_memory, default=0.0),
            "in_flight": max(step.peak_in_flight, default=0.0),
            "time_unit": self.record.unit,
            "memory_unit": step.memory_unit or "activations",
            **{f"idle_by_{cause}": share for cause, share in step.causes.items()},
        }


def count_microbatches(timeline: Timeline) -> int:
    """Return the number of microbatches that ran."""
    return len({event.action.microbatch for event in timeline.events})


def require_same_unit(records: Sequence[Record]) -> None:
    """Raise PenstockError if times of some records are in seconds, and of others in the unit of the costs."""
    first, second = records[0], next((record for record in records if record.unit != records[0].unit), records[0])
    if first.unit != second.unit:
        units = (f"{record.name} is {'in seconds' if record.unit else 'in units of its costs'}" for record in (first, second))
        raise PenstockError(f"{', and '.join(units)}: compare two runs or plans, or two schedules")


def text_table(cases: Sequence[Case]) -> str:
    """Return the table as aligned text."""
    rows = list(_text_rows(cases))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def latex_table(cases: Sequence[Case]) -> str:
    """Return the table for LaTeX, with the rules of its package booktabs."""
    heads, *rows = _text_rows(cases)
    lines = [" & ".join(map(_latex_text, row)) + r" \\" for row in rows]
    head = " & ".join(map(_latex_text, heads)) + r" \\"
    columns = "l" + "r" * (len(heads) - 1)
    begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}", ""])


def csv_table(cases: Sequence[Case]) -> str:
    """Return the numbers as CSV, without rounding, a line for each case below the names of the columns."""
    file = io.StringIO()
    rows = [case.values() for case in cases]
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def json_table(cases: Sequence[Case]) -> str:
    """Return the numbers as JSON, without rounding: a list with an object for each case."""
    return json.dumps([case.values() for case in cases], indent=1) + "\n"


def _text_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield the names of the columns, then the texts of each case; costs only if they differ."""
    costs = [name for name in dict.fromkeys(name for case in cases for name in case.costs) if _differs(cases, name)]
    yield ["schedule", "P", "M", *costs, "makespan", "bubble", _memory_head(cases)]
    for case in cases:
        step = case.record.usual
        yield [
            case.name,
            f"{step.ranks}",
            f"{count_microbatches(step)}",
            *(f"{case.costs[name]:g}" if name in case.costs else "" for name in costs),
            format_time(step.makespan, case.record.unit),
            f"{step.bubble:.1%}",
            format_memory(max(step.peak_memory, default=0.0), step.memory_unit),
        ]


def _memory_head(cases: Sequence[Case]) -> str:
    """Return what the peak memory is called: without bytes it is counted in microbatches in flight."""
    has_bytes = any(case.record.usual.memory_unit for case in cases)
    return f"{'memory' if has_bytes else 'in flight'}, most on a rank"


def _differs(cases: Sequence[Case], name: str) -> bool:
    return len({case.costs.get(name) for case in cases}) > 1


def _latex_text(text: str) -> str:
    text = "".join(LATEX_ESCAPES.get(letter, letter) for letter in text)
    return f"${text}$" if text in ("P", "M") else re.sub(r"^([\d.]+) ?(\\%|[a-zµ]+|[kMG]B)$", r"\1\\,\2", text)


def plot(cases: Sequence[Case], value: str = "bubble") -> Figure:
    """Return the curves of `value` (bubble, memory or makespan) over the microbatches, or over the ranks if only these differ.

    Raises PenstockError if all cases have as many ranks and as many microbatches.
    """
    rows = [case.values() for case in cases]
    differing = [name for name in ("microbatches", "ranks") if len({row[name] for row in rows}) > 1]
    if not differing:
        raise PenstockError("a plot needs several numbers: give --microbatches 8,16,32, or --ranks 4,8")
    x_name, *labels = [*differing, *(name for name in dict.fromkeys(key for case in cases for key in case.costs))]
    labels = [name for name in labels if len({row.get(name) for row in rows}) > 1]
    factor = 100.0 if value == "bubble" else 1.0

    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = ", ".join([row["schedule"], *(f"{name} {row[name]:g}" for name in labels if name in row)])
        series.setdefault(label, []).append((row[x_name], factor * row[value]))
    ticks = {float(row[x_name]): f"{row[x_name]}" for row in rows}
    sorted_series = {name: sorted(points) for name, points in series.items()}
    title = {"bubble": "bubble, in percent", "memory": _memory_head(cases)}.get(value, value)
    return curves(title, sorted_series, x_name, "", ticks, from_zero=True)
