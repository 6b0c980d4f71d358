"""A timeline as a figure for a paper.

A row for each rank, the planned one below it if there is one, memory where it is known in bytes, an axis and a legend.
Colours differ in lightness too, and causes of idle time in their hatch, so that they differ in print. Where
actions are denser than pixels, the parts of each slice of time are drawn one above the other.
"""

import math
from collections.abc import Collection, Iterator
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.schedule import Timeline
from penstock.view.data.sums import SLICES, sums_data
from penstock.view.data.timeline import Data, timeline_data
from penstock.view.figure.shapes import INK, MUTED, PAD, TEXT, Box, Figure, Line, Shape, Text
from penstock.view.record import Record
from penstock.view.terminal import format_memory

KINDS = {"F": "#629ad9", "B": "#19653f", "I": "#0b838e", "W": "#d7b34e"}
LETTERS = {"F": INK, "B": "#ffffff", "I": "#ffffff", "W": INK}
CAUSES = {"fill": "#fbfcfe", "imbalance": "#6c2507", "drain": "#dcd6f0", "communication": "#410c2d", "sending": "#030401"}
HATCHES = {"fill": ".", "imbalance": "/", "drain": "-", "communication": "\\", "sending": "|"}
NAMES = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "backward (weights)"}
LABEL, ROW, PLANNED, GAP = 58.0, 20.0, 12.0, 7.0
MEMORY, SHADE = 14.0, "#b3bac4"  # the curve of what a rank's activations take, where that is known in bytes
MOST_RANKS = 128


def figure(record: Record, extras: Collection[str] = (), width: float = 720.0) -> Figure:
    """The usual step of `record`, `width` wide and as high as it needs.

    `extras`: "memory" that is not known in bytes too, the critical "path", and "arrows" for messages between ranks.

    Raises PenstockError for more ranks than a figure has room for, and for `extras` where there is none for single actions.
    """
    dense = len(record.usual.events) > width * record.usual.ranks
    if record.usual.ranks > MOST_RANKS:
        raise PenstockError(
            f"{record.name} has {record.usual.ranks} ranks: a figure has room for {MOST_RANKS}, a page (--html) for all"
        )
    if dense and extras:
        options = " and ".join(f"--{option}" for option in sorted(extras))
        raise PenstockError(
            f"{record.name} has more actions than a figure has pixels: it shows their shares alone, leave out {options}"
        )
    timeline = _data(record.usual, dense)
    planned = None if record.planned is None else _data(record.planned, dense)
    duration = max(timeline["makespan"], planned["makespan"] if planned else 0) or 1
    scale = (width - LABEL - PAD) / duration
    shapes: list[Shape] = []
    y = PAD
    memory = (bool(timeline["memory_unit"]) or "memory" in extras) and not dense
    tops: list[float] = []
    several = any(len({_stage(event) for event in row["events"]}) > 1 for row in timeline["ranks"])
    for rank, row in enumerate(timeline["ranks"]):
        shapes.append(Text(LABEL - 8, y + ROW / 2, f"rank {rank}", anchor="end"))
        shapes += _row(row, timeline, scale, y, ROW, several)
        tops.append(y)
        y += ROW
        if planned and rank < len(planned["ranks"]):
            shapes.append(Text(LABEL - 8, y + 2 + PLANNED / 2, "planned", TEXT - 2.5, "end", MUTED))
            shapes += _row(planned["ranks"][rank], planned, scale, y + 2, PLANNED, several, named=False)
            y += 2 + PLANNED
        if memory:
            peak = format_memory(timeline["peak_memory"][rank], timeline["memory_unit"])
            shapes.append(Text(LABEL - 8, y + 2 + MEMORY / 2, peak, TEXT - 2.5, "end", MUTED))
            shapes += _memory(row["memory"], timeline, scale, y + 2)
            y += 2 + MEMORY
        y += GAP
    if "path" in extras or "arrows" in extras:
        shapes += _marks(timeline, scale, tops, extras)
    shapes += _axis(duration, scale, y, record.unit)
    legend = list(_legend(timeline, planned, width, y + 34, memory))
    height = max((shape.y for shape in legend), default=y + 34) + 14
    return Figure(record.name, width, height, (*shapes, *legend))


def _data(timeline: Timeline, dense: bool) -> Data:
    """Action by action, or slice by slice."""
    return sums_data(timeline) if dense else timeline_data(timeline)


def _marks(timeline: Data, scale: float, tops: list[float], extras: Collection[str]) -> Iterator[Line]:
    """Lines over the rows: along the critical path, and from each action that sends to the one that receives."""
    at = {event["action"]: (rank, event) for rank, row in enumerate(timeline["ranks"]) for event in row["events"]}
    pairs = [(message["action"], name) for name, (_, event) in at.items() for message in event.get("receives", ())]
    lines_and_colors = [(pairs, MUTED)] * ("arrows" in extras) + [([*pairwise(timeline["critical_path"])], INK)] * (
        "path" in extras
    )
    for lines, color in lines_and_colors:
        for (rank, source), (taker, event) in ((at[source_event], at[target_event]) for source_event, target_event in lines):
            down = taker > rank
            start, end = LABEL + source["end"] * scale, LABEL + event["start"] * scale
            if rank != taker:
                yield Line(start, tops[rank] + ROW * down, end, tops[taker] + ROW * (not down), color)
    if "path" in extras:
        for rank, event in (at[name] for name in timeline["critical_path"]):
            left, right = (LABEL + event[edge] * scale for edge in ("start", "end"))
            yield from (Line(left, y, right, y, INK) for y in (tops[rank], tops[rank] + ROW))


def _stage(event: Data) -> str:
    return event["action"].partition(_kind(event))[0]


def _kind(event: Data) -> str:
    return next(kind for kind in KINDS if kind in event["action"])


def _row(
    row: Data, timeline: Data, scale: float, y: float, height: float, several: bool, named: bool = True
) -> Iterator[Shape]:
    if "sums" in row:
        yield from _proportions(row["sums"], scale, y, height)
    halves = {action: half for pair in timeline["overlaps"] for half, action in enumerate(pair)}
    for start, end, cause in row["idle"]:
        yield Box(LABEL + start * scale, y, (end - start) * scale, height, CAUSES[cause], hatch=HATCHES[cause])
    for event in row["events"]:
        x, wide = LABEL + event["start"] * scale, (event["end"] - event["start"]) * scale
        half = halves.get(event["action"])
        top, high = (y, height) if half is None else (y + half * height / 2, height / 2)
        yield Box(x, top, wide, high, KINDS[_kind(event)], "#ffffff" if wide > 3 else "")
        size = min(TEXT - 1.5, high - 1)
        text = next((text for text in _names(event["action"], several) if len(text) * size * 0.6 + 2 < wide), None)
        if named and text is not None:
            yield Text(x + wide / 2, top + high / 2, text, size, "middle", LETTERS[_kind(event)])


def _proportions(sums: Data, scale: float, y: float, height: float) -> Iterator[Box]:
    """The parts of each slice of time, one above the other."""
    wide, tops = sums["end"] / SLICES * scale, [y] * SLICES
    for part, color in (KINDS | CAUSES).items():
        for place, share in enumerate(sums["parts"].get(part, ())):
            if share:
                yield Box(LABEL + place * wide, tops[place], wide, share * height, color)
                tops[place] += share * height


def _memory(curve: list[list[float]], timeline: Data, scale: float, y: float) -> Iterator[Shape]:
    """What is held from each change to the next; the fullest rank reaches the top."""
    peak = max(timeline["peak_memory"]) or 1
    for (start, amount), (end, _) in pairwise([*curve, [timeline["makespan"], 0]]):
        if high := MEMORY * amount / peak:
            yield Box(LABEL + start * scale, y + MEMORY - high, (end - start) * scale, high, SHADE)


def _names(action: str, several: bool) -> list[str]:
    kind = _kind({"action": action})
    microbatch = action.partition(kind)[2]
    return [action] * several + [kind + microbatch, microbatch]


def _axis(duration: float, scale: float, y: float, unit: str) -> Iterator[Shape]:
    """A line with ticks at round numbers, about 80 pixels apart."""
    factor, unit = _unit(duration) if unit == "s" else (1.0, unit)
    rough = duration * factor / max(2, duration * scale / 80)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(round_one * power for round_one in (1, 2, 5, 10) if round_one * power >= rough * 0.999)
    yield Line(LABEL, y, LABEL + duration * scale, y)
    for count in range(int(duration * factor / step + 1e-9) + 1):
        x = LABEL + count * step / factor * scale
        yield Line(x, y, x, y + 4)
        yield Text(x, y + 12, f"{count * step:.10g}", TEXT - 1, "middle", MUTED)
    yield Text(LABEL - 8, y + 12, f"time ({unit})" if unit else "time", TEXT - 1, "end", MUTED)


def _unit(duration: float) -> tuple[float, str]:
    return (1.0, "s") if duration >= 1 else (1e3, "ms") if duration >= 1e-3 else (1e6, "µs")


def _legend(timeline: Data, planned: Data | None, width: float, y: float, memory: bool) -> Iterator[Box | Text]:
    """What is there of kinds and of causes of idle time, in as many lines as are needed."""
    timelines = [timeline, *([planned] if planned else [])]
    rows = [row for value in timelines for row in value["ranks"]]
    kinds, causes = {_kind(event) for row in rows for event in row["events"]}, {idle[2] for row in rows for idle in row["idle"]}
    parts = {part for row in rows if "sums" in row for part in row["sums"]["parts"]}  # not hatched
    items = [(color, "", NAMES[kind]) for kind, color in KINDS.items() if kind in kinds | parts]
    items += [(color, HATCHES[cause], f"idle: {cause}") for cause, color in CAUSES.items() if cause in causes]
    items += [(color, "", f"idle: {cause}") for cause, color in CAUSES.items() if cause in parts]
    if memory:
        items.append((SHADE, "", "memory of activations, and its peak"))
    x = LABEL
    for color, hatch, text in items:
        wide = 16 + 5.4 * len(text) + 14
        if x + wide > width and x > LABEL:
            x, y = LABEL, y + 16
        yield Box(x, y - 5, 10, 10, color, hatch=hatch)
        yield Text(x + 15, y, text, TEXT - 0.5)
        x += wide
