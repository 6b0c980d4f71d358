"""Draw a timeline with room for every action's name, on several lines if needed. No torch."""

import math
from collections.abc import Sequence

from penstock.schedule import Event, Timeline
from penstock.view.terminal import draw

MAX_PARTS = 4  # drawn one below the other


def draw_in_parts(timeline: Timeline, width: int, color: bool = False) -> str:
    """Draw `timeline` in at most `width` columns: consecutive parts of its time, one below the other."""
    parts = _split_time(timeline, width - len("rank 0 |"))
    return "\n\n".join(draw(part, width, color, parts) for part in parts)


def _split_time(timeline: Timeline, columns: int) -> list[Timeline]:
    """Split `timeline` into parts so that, in `columns`, the shortest action has room for its name."""
    events = [event for row in timeline.rows for event in row]
    shows_stages = any(len({event.action.stage for event in row}) > 1 for row in timeline.rows)
    name_width = max(len(str(event.action)) + (1 if shows_stages else -1) for event in events)
    min_duration = min(event.end - event.start for event in events)
    units = timeline.makespan / min_duration if min_duration else 0.0
    count = max(1, min(MAX_PARTS, math.ceil(units / (columns // name_width) - 0.2)))  # 0.2: rather too full than one part more
    length = math.ceil(units / count - 1e-6) * min_duration or timeline.makespan
    starts = [timeline.start + number * length for number in range(count)]
    return [Timeline(timeline.name, tuple(_clip(row, start, start + length) for row in timeline.rows)) for start in starts]


def _clip(row: Sequence[Event], start: float, end: float) -> tuple[Event, ...]:
    """Return the events of a rank between two times; those that cross one are cut off."""
    clipped = [event._replace(start=max(event.start, start), end=min(event.end, end)) for event in row]
    return tuple(event for event in clipped if event.end > event.start)
