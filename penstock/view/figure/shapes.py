"""What a figure is made of: boxes, lines and texts with places and colours, which `svg` and `png` put on paper."""

import math
from collections.abc import Iterator
from typing import NamedTuple

INK, MUTED, LINE = "#1c2330", "#5b6472", "#c9ccd2"
TEXT, PAD = 10.0, 8.0  # the usual size of a text, and the space around a figure


class Box(NamedTuple):
    """A rectangle; with a `hatch` it is pale, and has lines in it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    outline: str = ""
    hatch: str = ""  # "/", "\\", "-", "|" or "."


class Text(NamedTuple):
    """A line of text; `anchor` (start, middle, end) is what stands at x, and y is its middle."""

    x: float
    y: float
    text: str
    size: float = TEXT
    anchor: str = "start"
    color: str = INK


class Line(NamedTuple):
    """A straight line."""

    x: float
    y: float
    to_x: float
    to_y: float
    color: str = MUTED


Shape = Box | Text | Line


class Figure(NamedTuple):
    """What is on the paper, back to front, and how large that is, in pixels of CSS."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]


def pale(color: str) -> str:
    """A tint of `color`."""
    return _mixed(color, "#ffffff", 0.7)


def hatching(box: Box, apart: float = 4.0) -> Iterator[Line]:
    """The lines within a box that has a hatch, from the upper left to the lower right."""
    color, (left, top, width, height) = _mixed(box.color, INK, 0.35), box[:4]
    right, bottom = left + width, top + height
    if box.hatch == "-":
        yield from (Line(left, y, right, y, color) for y in _steps(top, bottom, apart))
    elif box.hatch == "|":
        yield from (Line(x, top, x, bottom, color) for x in _steps(left, right, apart))
    elif box.hatch == ".":
        yield from (Line(x, y, x + 0.8, y, color) for y in _steps(top, bottom, apart) for x in _steps(left, right, apart))
    elif box.hatch:
        for start in _steps(left - height, right, 1.5 * apart):
            begin, end = max(left, start), min(right, start + height)
            rise = [(x - start) if box.hatch == "\\" else height - (x - start) for x in (begin, end)]
            yield Line(begin, top + rise[0], end, top + rise[1], color)


def _steps(low: float, high: float, apart: float) -> Iterator[float]:
    """The multiples of `apart` between two numbers: so hatches of boxes side by side meet."""
    return (count * apart for count in range(math.floor(low / apart) + 1, math.ceil(high / apart)))


def _mixed(color: str, other_color: str, share: float) -> str:
    """`color`, with a `share` of `other_color` in it."""
    parts = ((int(color[at : at + 2], 16), int(other_color[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in parts)
