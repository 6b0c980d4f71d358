"""A timeline as text: a row for each rank, time from left to right."""

from penstock.schedule import Event, Kind, Timeline

FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "=", Kind.W: "~"}
COLOR = {Kind.F: "\033[30;44m", Kind.B: "\033[30;42m", Kind.I: "\033[30;46m", Kind.W: "\033[30;43m"}
RESET = "\033[0m"
IDLE = "."


def draw(timeline: Timeline, width: int = 80, color: bool = False) -> str:
    """`timeline` in at most `width` columns: each action its kind and microbatch as far as there is room, idle time dots.

    Where a rank has several stages, the stage stands in front: `2F3`. With `color`, ANSI colours tell the kinds apart.
    """
    label = len(f"rank {timeline.ranks - 1} |")
    columns = max(width - label, 10)
    scale = _scale(timeline, columns)
    columns = round(scale * timeline.makespan)
    several = any(len({event.action.stage for event in row}) > 1 for row in timeline.rows)
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = "".join(_cells(row, timeline.start, scale, columns, several, color))
        lines.append(f"rank {rank}".ljust(label - 1) + "|" + cells)
    return "\n".join(lines)


def _scale(timeline: Timeline, columns: int) -> float:
    """Columns for a unit of time: whole ones for the shortest action where that does not waste much room."""
    shortest = min((event.end - event.start for event in timeline.events if event.end > event.start), default=0.0)
    if not shortest:
        return 0.0
    fits = columns / timeline.makespan
    whole = int(fits * shortest) / shortest
    return whole if whole > 0.6 * fits else fits


def _cells(row: tuple[Event, ...], origin: float, scale: float, columns: int, several: bool, color: bool) -> list[str]:
    """The pieces of one row: idle time and actions in turn, `columns` wide together."""
    pieces, at = [], 0
    for event in row:
        start, end = (min(columns, round((time - origin) * scale)) for time in (event.start, event.end))
        start = max(start, at)
        pieces.append(IDLE * (start - at))
        pieces.append(_block(event, max(end - start, 0), several, color))
        at = max(end, start)
    return [*pieces, IDLE * (columns - at)]


def _block(event: Event, width: int, several: bool, color: bool) -> str:
    kind, stage, microbatch = event.action
    if not width:
        return ""
    texts = (f"{stage}{kind.value}{microbatch}" if several else "", f"{kind.value}{microbatch}", kind.value)
    text = next((text for text in texts if text and len(text) <= width), kind.value)
    if not color:
        return text.ljust(width, FILL[kind])
    gap = " " * (width > len(text))
    return f"{COLOR[kind]}{text.ljust(width - len(gap))}{RESET}{gap}"


def summary(timeline: Timeline) -> str:
    """What the picture shows, in numbers: time, bubble both ways, memory."""
    flights = "/".join(map(str, timeline.peak_in_flight))
    return (
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}"
        f" (longest rank's span {timeline.span:g}, bubble {timeline.bubble_by_span:.1%}), activations in flight {flights}"
    )
