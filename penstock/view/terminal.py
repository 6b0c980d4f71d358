"""Draw a timeline as text: a row for each rank, time from left to right."""

import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from penstock.schedule import Event, Kind, Timeline
from penstock.schedule.memory import format_bytes, format_in_flight, format_per_rank
from penstock.timing.causes import Cause

FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "=", Kind.W: "~", None: "="}  # None: an overlapped pair
COLOR = {
    Kind.F: "\033[30;44m",
    Kind.B: "\033[30;42m",
    Kind.I: "\033[30;46m",
    Kind.W: "\033[30;43m",
    None: "\033[30;45m",
}
TEACHER_FILL, TEACHER_COLOR = ":", "\033[30;47m"  # of a second model's forwards
RESET = "\033[0m"
IDLE = "."
ROUNDING_COLUMNS = 1e-9  # less is not idle time
MAX_DRAWN_RANKS = 64
MAX_PARTS = 8  # of a picture, one below the other
MAX_LINES = 128  # of all parts

Columns = list[int | None]  # column -> the index of the cell that it shows; None: idle


def draw(timeline: Timeline, width: int = 80, color: bool = False, same_scale: Sequence[Timeline] = (), unit: str = "") -> str:
    """Draw `timeline` in at most `width` columns: a row for each rank, actions as kind and microbatch, idle time as dots.

    Every action has a column at least. If they do not fit, the picture goes on below, in parts; if these were too many, the
    last line says what a column stands for, and how many actions are not seen. A column shows what takes most of its time, or
    an action that has no other column. Of more than 64 ranks, only every n-th is drawn, and a line says so.

    If a rank has several stages, names begin with the stage: `2F3`. An overlapped pair is one block in braces, `{F3B1}`, or `&`
    if it is narrow. Forwards of a teacher are in lower case, `f3::`. `color`: mark kinds with ANSI colours. `same_scale`:
    timelines that must fit at the same scale. `unit`: of time, as in `format_time`.
    """
    timelines = (timeline, *same_scale)
    label = max(len(f"rank {drawn.ranks - 1} |") for drawn in timelines)
    columns = max(width - label, 10)
    scale = _scale_that_shows_all(timelines, columns)
    total = round(scale * timeline.makespan)
    show_stage = any(len({event.action.stage for event in row}) > 1 for row in timeline.rows)

    stride = math.ceil(timeline.ranks / MAX_DRAWN_RANKS)
    rows = {rank: _shown_cells(timeline, rank, scale, total) for rank in range(0, timeline.ranks, stride)}
    parts = []
    for start in range(0, max(total, 1), columns):
        lines = []
        for rank, shown in rows.items():
            blocks = _blocks(timeline, list(timeline.cells(rank)), shown[: start + columns], start, show_stage, color)
            lines.append(f"rank {rank}".ljust(label - 1) + "|" + "".join(blocks))
        parts.append("\n".join(lines))
    notes = _notes(timeline, rows, 1 / scale if scale else 0.0, unit)
    if stride > 1:
        notes.append(f"one in {stride} of the {timeline.ranks} ranks is drawn")
    return "\n".join(["\n\n".join(parts), *notes])


def _notes(timeline: Timeline, rows: Mapping[int, Columns], column_time: float, unit: str) -> list[str]:
    """Return what a column stands for if actions of the drawn `rows` are not seen."""
    cells = {rank: list(timeline.cells(rank)) for rank in rows}
    count = sum(map(len, cells.values()))
    hidden = sum(len(_hidden_cells(cells[rank], shown)) for rank, shown in rows.items())
    if not hidden:
        return []
    time = format_time(float(f"{column_time:.3g}"), unit)
    return [f"a column stands for {time} and shows one action: {hidden} of {count} are not seen; a page (--html) shows all"]


def _scale_that_shows_all(timelines: Sequence[Timeline], columns: int) -> float:
    """Return columns for a unit of time, for as few parts of `columns` as show every action; for one part if none does."""
    rows = [(timeline, rank, list(timeline.cells(rank))) for timeline in timelines for rank in range(timeline.ranks)]
    num_ranks = max(min(timeline.ranks, MAX_DRAWN_RANKS) for timeline in timelines)
    max_parts = max(1, min(MAX_PARTS, MAX_LINES // max(num_ranks, 1)))
    min_parts = math.ceil(max(len(cells) for *_, cells in rows) / columns) if rows else 1
    for parts in range(max(min_parts, 1), max_parts + 1):
        scale = _scale(timelines, parts * columns)
        shown = (
            (cells, _shown_cells(timeline, rank, scale, round(scale * timeline.makespan))) for timeline, rank, cells in rows
        )
        if not any(_hidden_cells(cells, numbers) for cells, numbers in shown):
            return scale
    return _scale(timelines, columns)


def _hidden_cells(cells: Sequence[tuple[Event, ...]], shown: Columns) -> list[int]:
    """Return the indices of the cells that no column shows, though they take time."""
    seen = set(shown)
    return [number for number, cell in enumerate(cells) if number not in seen and cell[-1].end > cell[0].start]


def _scale(timelines: Sequence[Timeline], columns: int) -> float:
    """Return columns for a unit of time: a whole number for the shortest action, unless that wastes much space."""
    times = (event.end - event.start for timeline in timelines for event in timeline.events)
    min_time = min((time for time in times if time > 0), default=0.0)
    if not min_time:
        return 0.0
    fits = columns / max(timeline.makespan for timeline in timelines)
    columns_per_unit = int(fits * min_time) / min_time
    return columns_per_unit if columns_per_unit > 0.6 * fits else fits


def _blocks(
    timeline: Timeline, cells: Sequence[tuple[Event, ...]], shown: Columns, start: int, show_stage: bool, color: bool
) -> list[str]:
    """Return the blocks of a row from column `start` on; one that began before has no name."""
    blocks: list[str] = []
    teacher = timeline.stage_chains.teacher
    for number, run in groupby(shown[start:]):
        width = len(list(run))
        is_continued = not blocks and start > 0 and shown[start - 1] == number
        if number is None:
            blocks.append(IDLE * width)
        else:
            is_teacher = teacher is not None and cells[number][0].action.stage >= teacher
            blocks.append(_block(cells[number], width, show_stage, color, not is_continued, is_teacher))
    return blocks


def _shown_cells(timeline: Timeline, rank: int, scale: float, columns: int) -> Columns:
    """Return for each column the index of the cell that it shows; None for idle time.

    That is the cell that takes most of its time, unless another has no column: it gets one from idle time, or from a cell
    that has more.
    """
    cells = list(timeline.cells(rank))
    times: list[dict[int, float]] = [{} for _ in range(columns)]
    columns_of: list[list[int]] = [[] for _ in cells]
    for number, cell in enumerate(cells):
        start, end = ((time - timeline.start) * scale for time in (cell[0].start, cell[-1].end))
        for column in range(int(start), min(columns, math.ceil(end))):
            times[column][number] = min(end, column + 1) - max(start, column)
            columns_of[number].append(column)

    shown = [_longest_cell(cells, column_times) for column_times in times]
    counts = Counter(shown)
    for number in _hidden_cells(cells, shown):
        free = [column for column in columns_of[number] if shown[column] is None or counts[shown[column]] > 1]
        if free:
            column = max(free, key=lambda column: (shown[column] is None, times[column][number]))
            counts[shown[column]] -= 1
            counts[number] = 1
            shown[column] = number
    return shown


def _longest_cell(cells: Sequence[tuple[Event, ...]], times: Mapping[int, float]) -> int | None:
    """Return the cell that takes most of a column, given the time of each in it; None for idle time."""
    kinds: dict[Kind | str | None, float] = {IDLE: 1 - sum(times.values()) - ROUNDING_COLUMNS}
    for number, time in times.items():
        kind = _kind(cells[number])
        kinds[kind] = kinds.get(kind, 0.0) + time
    longest_kind = max(kinds, key=lambda kind: kinds[kind])
    candidates = [number for number in times if _kind(cells[number]) == longest_kind]
    return None if longest_kind == IDLE else max(candidates, key=lambda number: times[number])


def _kind(cell: tuple[Event, ...]) -> Kind | None:
    """Return the kind of a cell's action; None for an overlapped pair."""
    return cell[0].action.kind if len(cell) == 1 else None


def _block(
    cell: tuple[Event, ...], width: int, show_stage: bool, color: bool, show_name: bool, is_teacher: bool = False
) -> str:
    kind = _kind(cell)
    text = next(text for text in _texts(cell, show_stage) if len(text) <= width) if show_name else ""
    if not color:
        return _pad(text.lower(), width, TEACHER_FILL) if is_teacher else _pad(text, width, FILL[kind])
    gap = " " * (width > len(text))
    return f"{TEACHER_COLOR if is_teacher else COLOR[kind]}{_pad(text, width - len(gap), ' ')}{RESET}{gap}"


def _texts(cell: tuple[Event, ...], show_stage: bool) -> Iterator[str]:
    """Yield the names of a cell, from the longest to a single character."""
    actions = [event.action for event in cell]
    kinds, microbatch_names = (
        "".join(a.kind.value for a in actions),
        "".join(f"{a.kind.value}{a.microbatch_text}" for a in actions),
    )
    names = [" ".join(map(str, actions))] * show_stage + [microbatch_names, kinds]
    if len(cell) == 1:
        yield from names
    else:
        yield from (f"{{{name}}}" for name in (*names, ""))
        yield "&"


def _pad(text: str, width: int, fill: str) -> str:
    """Pad `text` to `width`, inside its braces if it has them."""
    brace = "}" * text.endswith("}")
    return text.removesuffix("}").ljust(width - len(brace), fill) + brace


def summary(timeline: Timeline, unit: str = "") -> str:
    """Return two lines of numbers: makespan, span, bubbles and memory; busy and idle shares of all ranks' time.

    `unit`: of time, `s`, or empty for the unit of the costs.
    """
    trained = {event.action.stage for event in timeline.events if event.action.kind is not Kind.F}
    flights = format_in_flight(timeline.peak_in_flight, len(trained) / timeline.ranks)
    peaks = format_per_rank(timeline.peak_memory, partial(format_memory, unit=timeline.memory_unit))
    idle, busiest = timeline.idle_share, "" if same_share(timeline) else " (the bubble is that of the busiest rank alone)"
    memory = f", which take {peaks}" if timeline.memory_unit else ""
    causes = ", ".join(f"{cause} {share:.1%}" for cause, share in shown_causes(timeline).items())
    return (
        f"makespan {format_time(timeline.makespan, unit)}, bubble {timeline.bubble:.1%}"
        f" (longest rank's span {format_time(timeline.span, unit)}, bubble {timeline.bubble_by_span:.1%}),"
        f" activations in flight {flights}{memory}\n"
        f"time of all ranks: busy {1 - idle:.1%}, idle {idle:.1%}{busiest} by {causes}"
    )


def same_share(timeline: Timeline) -> bool:
    """Return whether the bubble equals the idle share, because all ranks are idle for the same share of the step."""
    return abs(timeline.bubble - timeline.idle_share) < 5e-4


def shown_causes(timeline: Timeline) -> dict[Cause, float]:
    """Return the shares of the causes of idle time, without sending if it is zero: only measured steps have it."""
    return {cause: share for cause, share in timeline.causes.items() if share or cause is not Cause.SENDING}


def format_time(time: float, unit: str = "") -> str:
    """Return a time as text: 12.3 ms if the unit is `s`, else the number and its unit."""
    if unit != "s":
        return f"{_plain(time)}{unit and ' '}{unit}"
    factor, unit = (1.0, "s") if time >= 1 else (1e3, "ms") if time >= 1e-3 else (1e6, "µs")
    return f"{time * factor:.4g} {unit}"


def format_memory(amount: float, unit: str = "") -> str:
    """Return memory as text: 12.3 MB if the unit is `bytes`, else the number."""
    return format_bytes(amount) if unit == "bytes" else _plain(amount)


def _plain(number: float) -> str:
    """Return a number with six digits and no exponent, as the page does."""
    return f"{float(f'{number:.6g}'):.15g}"


def terminal_width() -> int:
    """Return the columns of the terminal, or of COLUMNS; 100 if neither is a number."""
    return shutil.get_terminal_size((100, 24)).columns


def use_colors() -> bool:
    """Return whether to use colours: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
