"""Draw a timeline as a figure for a paper.

It has a row for each rank, the predicted row below it if there is one, memory if it is known in bytes, an axis and a legend.
Colours also differ in lightness, and causes of idle time in their hatch, so that they differ in print. Each stage of a rank has
its own shade of a kind's colour, the same as on a page. If actions are denser than pixels, each time bin shows the shares of
its kinds and causes, stacked.
"""

import math
from collections.abc import Collection, Iterator
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.schedule import Timeline
from penstock.view.data.sums import NUM_BINS, sums_data
from penstock.view.data.timeline_data import Data, timeline_data
from penstock.view.figure.shapes import (
    INK_COLOR,
    MUTED_COLOR,
    PADDING,
    TEXT_SIZE,
    USUAL_STYLE,
    Box,
    Figure,
    FigureStyle,
    Line,
    Shape,
    Text,
    mix_colors,
    scale_figure,
)
from penstock.view.record import Record
from penstock.view.terminal import format_memory

KIND_COLORS = {"F": "#629ad9", "B": "#19653f", "I": "#0b838e", "W": "#d7b34e"}
KIND_TEXT_COLORS = {"F": INK_COLOR, "B": "#ffffff", "I": "#ffffff", "W": INK_COLOR}
TEACHER_COLOR = "#c9c2b6"  # of a second model's forwards
CAUSE_COLORS = {
    "fill": "#fbfcfe",
    "order": "#dec1c6",
    "imbalance": "#6c2507",
    "drain": "#dcd6f0",
    "communication": "#410c2d",
    "sending": "#030401",
}
CAUSE_HATCHES = {"fill": ".", "order": "x", "imbalance": "/", "drain": "-", "communication": "\\", "sending": "|"}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "backward (weights)"}
LABEL_WIDTH, ROW_HEIGHT, PREDICTED_HEIGHT, ROW_GAP = 58.0, 20.0, 12.0, 7.0
TITLE_HEIGHT, MIN_WIDTH = 20.0, 120.0  # of the whole figure, at the usual size of texts
SLICE_HEIGHT, SLICE_COLOR = 3.0, "#f2a7c3"  # of the mark of an action's slice
MEMORY_HEIGHT, MEMORY_COLOR = 14.0, "#b3bac4"  # of the curve of a rank's activation memory
MAX_RANKS = 128
FIRST_DARK_SHADES = {"F": 3, "B": 0, "I": 0, "W": 4}  # on which a text is white
NUM_SHADES, DARK_COLOR, LIGHT_COLOR = 8, "#0b0f16", "#ffffff"  # of a rank's stages, which repeat after the eighth


def figure(
    record: Record, extras: Collection[str] = (), width: float | None = None, style: FigureStyle = USUAL_STYLE
) -> Figure:
    """Draw the usual step of `record`, as high as it needs. `width`: in place of that of `style`.

    `extras`: "memory" (also if it is not known in bytes), "path" (the critical path), "arrows" (messages between ranks).

    Raises PenstockError for more than 128 ranks, for `extras` if there are more actions than pixels, and for a style without
    room for the ranks' names.
    """
    width = style.width if width is None else width
    if not style.font_size > 0 or width * TEXT_SIZE / style.font_size < MIN_WIDTH:
        needed = math.ceil(MIN_WIDTH * max(style.font_size, 1) / TEXT_SIZE)
        raise PenstockError(
            f"a figure {width:g} pixels wide has no room at font size {style.font_size:g}: use {needed} or more"
        )
    factor = style.font_size / TEXT_SIZE
    drawn = _figure(record, extras, width / factor, style)
    return drawn if factor == 1 else scale_figure(drawn, factor)


def _figure(record: Record, extras: Collection[str], width: float, style: FigureStyle) -> Figure:
    """Draw the figure at the usual size of texts."""
    dense = len(record.usual.events) > width * record.usual.ranks
    if record.usual.ranks > MAX_RANKS:
        raise PenstockError(
            f"{record.name} has {record.usual.ranks} ranks: a figure has room for {MAX_RANKS}, a page (--html) for all"
        )
    if dense and extras:
        options = " and ".join(f"--{option}" for option in sorted(extras))
        raise PenstockError(
            f"{record.name} has more actions than a figure has pixels: it shows their shares alone, leave out {options}"
        )
    timeline = _data(record.usual, dense)
    predicted = None if record.predicted is None else _data(record.predicted, dense)
    duration = max(timeline["makespan"], predicted["makespan"] if predicted else 0) or 1
    scale = (width - LABEL_WIDTH - PADDING) / duration
    shapes: list[Shape] = []
    y = PADDING
    if style.title:
        shapes.append(Text(LABEL_WIDTH, y + TEXT_SIZE / 2, record.name, TEXT_SIZE + 1))
        y += TITLE_HEIGHT
    memory = (bool(timeline["memory_unit"]) or "memory" in extras) and not dense
    tops: list[float] = []
    num_slices = 1 + max((_slice(event) for row in timeline["ranks"] for event in row["events"]), default=0)
    num_stages = max((len(_trained_stages(row, timeline)) for row in timeline["ranks"]), default=0)
    labels = style.labels if style.labels != "auto" or num_stages > 1 else "kind"
    for rank, row in enumerate(timeline["ranks"]):
        shapes.append(Text(LABEL_WIDTH - 8, y + ROW_HEIGHT / 2, f"rank {rank}", anchor="end"))
        shapes += _row(row, timeline, scale, y, ROW_HEIGHT, labels)
        shapes += _slice_marks(row, scale, y + ROW_HEIGHT, num_slices) if num_slices > 1 else ()
        tops.append(y)
        y += ROW_HEIGHT
        if predicted and rank < len(predicted["ranks"]):
            shapes.append(Text(LABEL_WIDTH - 8, y + 2 + PREDICTED_HEIGHT / 2, "predicted", TEXT_SIZE - 2.5, "end", MUTED_COLOR))
            shapes += _row(predicted["ranks"][rank], predicted, scale, y + 2, PREDICTED_HEIGHT, "none")
            y += 2 + PREDICTED_HEIGHT
        if memory:
            peak = format_memory(timeline["peak_memory"][rank], timeline["memory_unit"])
            shapes.append(Text(LABEL_WIDTH - 8, y + 2 + MEMORY_HEIGHT / 2, peak, TEXT_SIZE - 2.5, "end", MUTED_COLOR))
            shapes += _memory(row["memory"], timeline, scale, y + 2)
            y += 2 + MEMORY_HEIGHT
        y += ROW_GAP
    if "path" in extras or "arrows" in extras:
        shapes += _marks(timeline, scale, tops, extras)
    shapes += _axis(duration, scale, y, record.unit)
    legend = list(_legend(timeline, predicted, width, y + 34, memory, num_stages, num_slices)) if style.legend else []
    height = max((shape.y for shape in legend), default=y + 14) + 14
    return Figure(record.name, width, height, (*shapes, *legend))


def _data(timeline: Timeline, dense: bool) -> Data:
    """Return the events; if they are denser than pixels, their shares of each time bin."""
    return sums_data(timeline) if dense else timeline_data(timeline)


def _marks(timeline: Data, scale: float, tops: list[float], extras: Collection[str]) -> Iterator[Line]:
    """Yield lines over the rows: the critical path, and an arrow from each sender to its receiver."""
    rank_and_event = {event["action"]: (rank, event) for rank, row in enumerate(timeline["ranks"]) for event in row["events"]}
    pairs = [(message["action"], name) for name, (_, event) in rank_and_event.items() for message in event.get("receives", ())]
    lines_and_colors = [(pairs, MUTED_COLOR)] * ("arrows" in extras) + [([*pairwise(timeline["critical_path"])], INK_COLOR)] * (
        "path" in extras
    )
    for lines, color in lines_and_colors:
        for sender_name, receiver_name in lines:
            (rank, source), (receiver, event) = rank_and_event[sender_name], rank_and_event[receiver_name]
            down = receiver > rank
            start, end = LABEL_WIDTH + source["end"] * scale, LABEL_WIDTH + event["start"] * scale
            if rank != receiver:
                yield Line(start, tops[rank] + ROW_HEIGHT * down, end, tops[receiver] + ROW_HEIGHT * (not down), color)
    if "path" in extras:
        for rank, event in (rank_and_event[name] for name in timeline["critical_path"]):
            left, right = (LABEL_WIDTH + event[edge] * scale for edge in ("start", "end"))
            yield from (Line(left, y, right, y, INK_COLOR) for y in (tops[rank], tops[rank] + ROW_HEIGHT))


def _stage(event: Data) -> str:
    return event["action"].partition(_kind(event))[0]


def _kind(event: Data) -> str:
    return next(kind for kind in KIND_COLORS if kind in event["action"])


def shade(kind: str, chunk: int) -> str:
    """Return the colour of a kind of action on a rank's stage, the one of index `chunk`: darker from first to eighth."""
    return mix_colors(KIND_COLORS[kind], DARK_COLOR, 0.1 * (chunk % NUM_SHADES))


def _text_color(kind: str, chunk: int) -> str:
    """Return the colour of a text on that shade: the usual one of the kind, or white on shades too dark for it."""
    number = chunk % NUM_SHADES
    return LIGHT_COLOR if number >= FIRST_DARK_SHADES[kind] else DARK_COLOR if number else KIND_TEXT_COLORS[kind]


def _slice(event: Data) -> int:
    return int(event["action"].partition(".")[2] or 0)


def _row(row: Data, timeline: Data, scale: float, y: float, height: float, labels: str) -> Iterator[Shape]:
    """Draw a row of a rank. `labels`: as in `FigureStyle`, or "kind", as "auto" without stages."""
    if "sums" in row:
        yield from _proportions(row["sums"], scale, y, height)
    halves = {action: half for pair in timeline["overlaps"] for half, action in enumerate(pair)}
    for start, end, cause in row["idle"]:
        yield Box(
            LABEL_WIDTH + start * scale, y, (end - start) * scale, height, CAUSE_COLORS[cause], hatch=CAUSE_HATCHES[cause]
        )
    stages = _trained_stages(row, timeline)
    for event in row["events"]:
        kind, stage = _kind(event), int(_stage(event))
        is_trained = stage in stages
        chunk = stages.index(stage) if is_trained else 0
        x, bar_width = LABEL_WIDTH + event["start"] * scale, (event["end"] - event["start"]) * scale
        half = halves.get(event["action"])
        top, bar_height = (y, height) if half is None else (y + half * height / 2, height / 2)
        yield Box(
            x,
            top,
            bar_width,
            bar_height,
            shade(kind, chunk) if is_trained else TEACHER_COLOR,
            "#ffffff" if bar_width > 3 else "",
        )
        size = min(TEXT_SIZE - 1.5, bar_height - 1)
        text = next((text for text in _texts(event["action"], labels) if len(text) * size * 0.6 + 2 < bar_width), None)
        if text is not None:
            yield Text(x + bar_width / 2, top + bar_height / 2, text, size, "middle", _text_color(kind, chunk))


def _trained_stages(row: Data, timeline: Data) -> list[int]:
    """Return the stages of a rank's row, ascending, without those of a teacher."""
    first = _first_teacher_stage(timeline)
    return sorted({stage for event in row["events"] if (stage := int(_stage(event))) < first})


def _first_teacher_stage(timeline: Data) -> float:
    """Return the stage with which a teacher begins; infinity if there is none."""
    chains = timeline.get("chains")
    return math.inf if chains is None or chains["teacher"] is None else int(chains["teacher"])


def _slice_marks(row: Data, scale: float, y: float, num_slices: int) -> Iterator[Box]:
    """Draw a mark below each action, above `y`: it stands at the place of the action's slice among those of a microbatch."""
    for event in row["events"]:
        width = (event["end"] - event["start"]) * scale / num_slices
        x = LABEL_WIDTH + event["start"] * scale + _slice(event) * width
        yield Box(x, y - SLICE_HEIGHT, width, SLICE_HEIGHT, SLICE_COLOR)


def _proportions(sums: Data, scale: float, y: float, height: float) -> Iterator[Box]:
    """Stack the shares of kinds and causes in each time bin."""
    bin_width, tops = sums["end"] / NUM_BINS * scale, [y] * NUM_BINS
    for part, color in (KIND_COLORS | CAUSE_COLORS).items():
        for index, share in enumerate(sums["parts"].get(part, ())):
            if share:
                yield Box(LABEL_WIDTH + index * bin_width, tops[index], bin_width, share * height, color)
                tops[index] += share * height


def _memory(curve: list[list[float]], timeline: Data, scale: float, y: float) -> Iterator[Shape]:
    """Draw the memory that a rank holds over time; the largest peak of all ranks fills the height."""
    peak = max(timeline["peak_memory"]) or 1
    for (start, amount), (end, _) in pairwise([*curve, [timeline["makespan"], 0]]):
        if bar_height := MEMORY_HEIGHT * amount / peak:
            yield Box(
                LABEL_WIDTH + start * scale, y + MEMORY_HEIGHT - bar_height, (end - start) * scale, bar_height, MEMORY_COLOR
            )


def _texts(action: str, labels: str) -> list[str]:
    """Return the texts for an action, from the longest to the shortest."""
    kind = _kind({"action": action})
    microbatch = action.partition(kind)[2]
    texts = {"action": [action], "kind": [kind + microbatch, microbatch], "microbatch": [microbatch], "none": []}
    return texts.get(labels, [action, kind + microbatch, microbatch])


def _axis(duration: float, scale: float, y: float, unit: str) -> Iterator[Shape]:
    """Draw the time axis with ticks at round numbers, about 80 pixels apart."""
    factor, unit = _unit(duration) if unit == "s" else (1.0, unit)
    rough = duration * factor / max(2, duration * scale / 80)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
    yield Line(LABEL_WIDTH, y, LABEL_WIDTH + duration * scale, y)
    for count in range(int(duration * factor / step + 1e-9) + 1):
        x = LABEL_WIDTH + count * step / factor * scale
        yield Line(x, y, x, y + 4)
        yield Text(x, y + 12, f"{count * step:.10g}", TEXT_SIZE - 1, "middle", MUTED_COLOR)
    yield Text(LABEL_WIDTH - 8, y + 12, f"time ({unit})" if unit else "time", TEXT_SIZE - 1, "end", MUTED_COLOR)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to a readable unit, and the unit."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _legend(
    timeline: Data, predicted: Data | None, width: float, y: float, memory: bool, num_stages: int, num_slices: int
) -> Iterator[Box | Text]:
    """Draw the legend of the kinds and causes that occur, of stages' shades and slices' marks, over several lines if needed."""
    timelines = [timeline, *([predicted] if predicted else [])]
    rows = [row for value in timelines for row in value["ranks"]]
    kinds, causes = {_kind(event) for row in rows for event in row["events"]}, {idle[2] for row in rows for idle in row["idle"]}
    parts = {part for row in rows if "sums" in row for part in row["sums"]["parts"]}  # not hatched
    items = [(color, "", KIND_NAMES[kind]) for kind, color in KIND_COLORS.items() if kind in kinds | parts]
    if any(_first_teacher_stage(value) < math.inf for value in timelines):
        items.append((TEACHER_COLOR, "", "forward of the teacher"))
    items += [(color, CAUSE_HATCHES[cause], f"idle: {cause}") for cause, color in CAUSE_COLORS.items() if cause in causes]
    items += [(color, "", f"idle: {cause}") for cause, color in CAUSE_COLORS.items() if cause in parts]
    if memory:
        items.append((MEMORY_COLOR, "", "memory of activations, and its peak"))
    swatches = [([color], hatch, text) for color, hatch, text in items]
    if num_stages > 1 and (shown_kind := next((kind for kind in KIND_COLORS if kind in kinds), None)):
        shades = [shade(shown_kind, chunk) for chunk in range(min(num_stages, NUM_SHADES))]
        swatches.insert(len(kinds), (shades, "", "stages of a rank, first to last"))
    if num_slices > 1:
        text = f"mark below an action: which of {num_slices} slices, the first on the left"
        swatches.insert(len(kinds) + (num_stages > 1), ([SLICE_COLOR], "", text))
    x = LABEL_WIDTH
    for colors, hatch, text in swatches:
        bar_width = 6 + 10 * len(colors) + 5.4 * len(text) + 14
        if x + bar_width > width and x > LABEL_WIDTH:
            x, y = LABEL_WIDTH, y + 16
        for number, color in enumerate(colors):
            yield Box(x + 10 * number, y - 5, 10, 10, color, hatch=hatch)
        yield Text(x + 5 + 10 * len(colors), y, text, TEXT_SIZE - 0.5)
        x += bar_width
