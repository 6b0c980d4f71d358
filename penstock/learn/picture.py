"""Draw a timeline with room for every action's name, on several lines if needed. No torch."""

import math
from collections.abc import Sequence

from penstock.schedule import Event, Timeline
from penstock.view.terminal import draw

MAX_PARTS = 4  # one below the other


def drawn_in_parts(timeline: Timeline, width: int, color: bool = False) -> str:
    """Draw `timeline` in at most `width` columns, cut into pieces of time one below the other."""
    pieces = _pieces(timeline, width - len("rank 0 |"))
    return "\n\n".join(draw(piece, width, color, pieces) for piece in pieces)


def _pieces(timeline: Timeline, columns: int) -> list[Timeline]:
    """Cut `timeline` into pieces of time in which the shortest action has room in `columns`."""
    events = [event for row in timeline.rows for event in row]
    several = any(len({event.action.stage for event in row}) > 1 for row in timeline.rows)
    name = max(len(str(event.action)) + 1 if several else len(str(event.action)) - 1 for event in events)
    min_duration = min(event.end - event.start for event in events)
    units = timeline.makespan / min_duration if min_duration else 0.0
    count = max(1, min(MAX_PARTS, math.ceil(units / (columns // name) - 0.2)))  # a little more, rather than one more piece
    length = math.ceil(units / count - 1e-6) * min_duration or timeline.makespan
    starts = [timeline.start + number * length for number in range(count)]
    return [Timeline(timeline.name, tuple(_between(row, start, start + length) for row in timeline.rows)) for start in starts]


def _between(row: Sequence[Event], start: float, end: float) -> tuple[Event, ...]:
    """Return the parts of a rank's events between two times."""
    inside = [event._replace(start=max(event.start, start), end=min(event.end, end)) for event in row]
    return tuple(event for event in inside if event.end > event.start)
