"""Draw what runs of a table until its ranks wait for each other, with a mark where each rank stops."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Table
from penstock.timing.timeline import Timeline
from penstock.view.figure.shapes import PADDING, Box, Figure, Shape, Text
from penstock.view.figure.timeline_figure import LABEL_WIDTH, ROW_GAP, ROW_HEIGHT, figure
from penstock.view.record import Record

STOP_COLOR, STOP_WIDTH = "#b3282d", 120.0  # of the text that says before which action a rank stops, beside the picture
WIDTH = 720.0


def stops(schedule: Table, timeline: Timeline) -> dict[int, Action]:
    """Return rank -> the action before which it stops, for the ranks that do not reach the end of their row."""
    rows = zip(timeline.rows, schedule.actions, strict=True)
    return {rank: actions[len(row)] for rank, (row, actions) in enumerate(rows) if len(row) < len(actions)}


def deadlock_figure(schedule: Table, timeline: Timeline) -> Figure:
    """Return the figure of `timeline`, which `simulate_until_deadlock` made of `schedule`. Raises PenstockError as `figure`."""
    drawn = figure(Record((timeline,)), width=WIDTH - STOP_WIDTH)
    runs = [shape for shape in drawn.shapes if not _is_idle(shape)]  # a cause of idle time assumes that the step ends
    return drawn._replace(width=WIDTH, shapes=(*runs, *_stop_marks(schedule, timeline, drawn.width)))


def _is_idle(shape: Shape) -> bool:
    """Return whether `shape` is a figure's box of idle time, or belongs to its legend."""
    return shape.text.startswith("idle:") if isinstance(shape, Text) else isinstance(shape, Box) and bool(shape.hatch)


def _stop_marks(schedule: Table, timeline: Timeline, width: float) -> Iterator[Shape]:
    """Yield, for each rank that stops, a hatched rest of its row, and the action before which it stops."""
    right = width - PADDING
    scale = (right - LABEL_WIDTH) / (timeline.makespan or 1)
    for rank, action in stops(schedule, timeline).items():
        row = timeline.rows[rank]
        top, left = PADDING + rank * (ROW_HEIGHT + ROW_GAP), LABEL_WIDTH + (row[-1].end if row else 0) * scale
        yield Box(left, top, right - left, ROW_HEIGHT, STOP_COLOR, hatch="/")
        yield Text(right + 6, top + ROW_HEIGHT / 2, f"stops before {action}", color=STOP_COLOR)
