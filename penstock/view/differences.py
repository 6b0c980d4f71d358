"""Two timelines in numbers, side by side."""

from collections.abc import Mapping, Sequence

from penstock.errors import PenstockError
from penstock.schedule import Timeline
from penstock.view.record import Record
from penstock.view.terminal import held, told, told_causes

MOST = 20  # characters of a name


def differences(first: Record, second: Record, did: Sequence[Mapping[str, object]] = ({}, {})) -> str:
    """Two records in numbers, side by side, and what the second has more or less; a warning where their work was not the same.

    `did`: what else each is known to have done, by name: its model, its batch.

    Raises PenstockError where one is in seconds and the other is not.
    """
    if first.unit != second.unit:
        told_of = (f"{each.name} is {'in seconds' if each.unit else 'in units of its costs'}" for each in (first, second))
        raise PenstockError(f"{', and '.join(told_of)}: compare two runs or plans, or two schedules")
    one, other = first.usual, second.usual
    unlike = [
        f"{what} ({a} and {b})"
        for what, a, b in (
            ("ranks", one.ranks, other.ranks),
            ("microbatches", _microbatches(one), _microbatches(other)),
            *((name, did[0][name], did[1][name]) for name in did[0] if name in did[1]),
        )
        if a != b
    ]
    rows = [
        ("", *(_short(each.name) for each in (first, second)), "difference"),
        ("makespan", told(one.makespan, first.unit), told(other.makespan, first.unit), _more(one.makespan, other.makespan)),
        ("bubble", f"{one.bubble:.1%}", f"{other.bubble:.1%}", _points(one.bubble, other.bubble)),
        ("memory, most on a rank", *(held(_peak(each), each.memory_unit) for each in (one, other)), _more_memory(one, other)),
    ]
    rows += [
        (f"idle by {cause}", f"{share:.1%}", f"{other.causes[cause]:.1%}", _points(share, other.causes[cause]))
        for cause, share in one.causes.items()
        if cause in told_causes(one) or cause in told_causes(other)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))) for row in rows
    )
    warning = f"\nthese differ in {' and '.join(unlike)}: their times are those of different work" if unlike else ""
    return "\n".join("  ".join(line).rstrip() for line in lines) + warning


def _microbatches(timeline: Timeline) -> int:
    return len({event.action.microbatch for event in timeline.events})


def _short(name: str) -> str:
    """A name as a column of 80 has room for it."""
    return name if len(name) <= MOST else f"{name[: MOST - 2]}.."


def _peak(timeline: Timeline) -> float:
    return max(timeline.peak_memory, default=0.0)


def _more_memory(one: Timeline, other: Timeline) -> str:
    return _more(_peak(one), _peak(other)) if one.memory_unit == other.memory_unit else ""


def _more(one: float, other: float) -> str:
    return _signed(other / one - 1, "%") if one else ""


def _points(one: float, other: float) -> str:
    return _signed(other - one, " points")


def _signed(share: float, unit: str) -> str:
    return "same" if abs(share) < 5e-4 else f"{100 * share:+.1f}{unit}"
