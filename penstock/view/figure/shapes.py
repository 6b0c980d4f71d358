"""The parts of a figure: boxes, lines and texts. Positions and sizes are in CSS pixels, x to the right and y down."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

INK_COLOR, MUTED_COLOR, LINE_COLOR = "#1c2330", "#5b6472", "#c9ccd2"
TEXT_SIZE, PADDING = 10.0, 8.0  # of a usual text; around a figure


class Box(NamedTuple):
    """A filled rectangle; with a `hatch`, in a lighter tint with lines over it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    outline: str = ""
    hatch: str = ""  # "/", "\\", "x", "-", "|" or "."


class Text(NamedTuple):
    """A line of text. `anchor` says which part of it is at x: "start", "middle" or "end"; y is its vertical middle."""

    x: float
    y: float
    text: str
    size: float = TEXT_SIZE
    anchor: str = "start"
    color: str = INK_COLOR


class Line(NamedTuple):
    """A straight line."""

    x: float
    y: float
    to_x: float
    to_y: float
    color: str = MUTED_COLOR


Shape = Box | Text | Line


class Figure(NamedTuple):
    """Shapes from back to front, and the size of the drawing."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]


Labels = Literal["auto", "action", "microbatch", "none"]


@dataclass(frozen=True)
class FigureStyle:
    """The size of a figure, and what it says.

    `width`, `font_size`: in CSS pixels, 96 an inch; rows grow with the font. `labels`: on each action where there is room:
    "action" (`2F3`), "microbatch" (`3`), "none", or "auto" (the longest that fits of `2F3`, `F3` and `3`).
    """

    width: float = 720.0
    font_size: float = TEXT_SIZE
    labels: Labels = "auto"
    title: bool = False
    legend: bool = True


USUAL_STYLE = FigureStyle()


def tint(color: str, share: float = 0.7) -> str:
    """Return a lighter tint of `color`; `share` (0 to 1) is that of white."""
    return mix_colors(color, "#ffffff", share)


def scale_figure(figure: Figure, factor: float) -> Figure:
    """Return `figure` with its boxes, texts and positions `factor` times as large."""

    def scale_shape(shape: Shape) -> Shape:
        if isinstance(shape, Box):
            sizes = {name: getattr(shape, name) * factor for name in ("x", "y", "width", "height")}
        elif isinstance(shape, Text):
            sizes = {name: getattr(shape, name) * factor for name in ("x", "y", "size")}
        else:
            sizes = {name: getattr(shape, name) * factor for name in ("x", "y", "to_x", "to_y")}
        return shape._replace(**sizes)

    return Figure(figure.title, figure.width * factor, figure.height * factor, tuple(map(scale_shape, figure.shapes)))


def hatch_lines(box: Box, spacing: float = 4.0) -> Iterator[Line]:
    """Yield the lines of the hatch of `box`, inside it."""
    color, (left, top, width, height) = mix_colors(box.color, INK_COLOR, 0.35), box[:4]
    right, bottom = left + width, top + height
    if box.hatch == "-":
        yield from (Line(left, y, right, y, color) for y in _multiples(top, bottom, spacing))
    elif box.hatch == "|":
        yield from (Line(x, top, x, bottom, color) for x in _multiples(left, right, spacing))
    elif box.hatch == ".":
        yield from (
            Line(x, y, x + 0.8, y, color) for y in _multiples(top, bottom, spacing) for x in _multiples(left, right, spacing)
        )
    for slope in "/\\" if box.hatch == "x" else box.hatch if box.hatch in ("/", "\\") else "":
        for start in _multiples(left - height, right, 1.5 * spacing):
            begin, end = max(left, start), min(right, start + height)
            rise = [(x - start) if slope == "\\" else height - (x - start) for x in (begin, end)]
            yield Line(begin, top + rise[0], end, top + rise[1], color)


def _multiples(low: float, high: float, spacing: float) -> Iterator[float]:
    """Yield the multiples of `spacing` between two numbers, so that hatches of adjacent boxes meet."""
    return (count * spacing for count in range(math.floor(low / spacing) + 1, math.ceil(high / spacing)))


def mix_colors(color: str, other_color: str, share: float) -> str:
    """Mix two colours, `#rrggbb`; `share` (0 to 1) is that of `other_color`."""
    parts = ((int(color[at : at + 2], 16), int(other_color[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in parts)
