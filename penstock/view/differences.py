"""Compare two timelines in numbers, side by side."""

from collections.abc import Mapping, Sequence

from penstock.schedule import Timeline
from penstock.view.comparison import count_microbatches, require_same_unit
from penstock.view.record import Record
from penstock.view.terminal import format_memory, format_time, shown_causes

MAX_NAME_CHARACTERS = 20


def differences(run_a: Record, run_b: Record, work: Sequence[Mapping[str, object]] = ({}, {})) -> str:
    """Return a table of two records in numbers with their differences, and a warning if their work was not the same.

    `work`: for each run, option -> value, such as its model and its batch.

    Raises PenstockError if only one of the runs is in seconds.
    """
    require_same_unit((run_a, run_b))
    base, changed = run_a.usual, run_b.usual
    work_differences = [
        f"{name} ({a} and {b})"
        for name, a, b in (
            ("ranks", base.ranks, changed.ranks),
            ("microbatches", count_microbatches(base), count_microbatches(changed)),
            *((option, work[0][option], work[1][option]) for option in work[0] if option in work[1]),
        )
        if a != b
    ]
    rows = [
        ("", *(_shorten(record.name) for record in (run_a, run_b)), "difference"),
        (
            "makespan",
            format_time(base.makespan, run_a.unit),
            format_time(changed.makespan, run_a.unit),
            _relative_change(base.makespan, changed.makespan),
        ),
        ("bubble", f"{base.bubble:.1%}", f"{changed.bubble:.1%}", _point_change(base.bubble, changed.bubble)),
        (
            "memory, most on a rank",
            *(format_memory(_peak(step), step.memory_unit) for step in (base, changed)),
            _memory_change(base, changed),
        ),
    ]
    rows += [
        (f"idle by {cause}", f"{share:.1%}", f"{changed.causes[cause]:.1%}", _point_change(share, changed.causes[cause]))
        for cause, share in base.causes.items()
        if cause in shown_causes(base) or cause in shown_causes(changed)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))) for row in rows
    )
    warning = (
        f"\nthese differ in {' and '.join(work_differences)}: their times are those of different work"
        if work_differences
        else ""
    )
    return "\n".join("  ".join(line).rstrip() for line in lines) + warning


def _shorten(name: str) -> str:
    """Shorten a name for a table of 80 columns."""
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 2]}.."


def _peak(timeline: Timeline) -> float:
    return max(timeline.peak_memory, default=0.0)


def _memory_change(base: Timeline, changed: Timeline) -> str:
    return _relative_change(_peak(base), _peak(changed)) if base.memory_unit == changed.memory_unit else ""


def _relative_change(base: float, changed: float) -> str:
    return _format_change(changed / base - 1, "%") if base else ""


def _point_change(base: float, changed: float) -> str:
    return _format_change(changed - base, " points")


def _format_change(share: float, unit: str) -> str:
    return "same" if abs(share) < 5e-4 else f"{100 * share:+.1f}{unit}"
