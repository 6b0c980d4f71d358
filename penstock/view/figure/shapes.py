"""What a figure is made of: boxes, lines and texts with places and colours, which `svg` and `png` put on paper."""

from typing import NamedTuple

INK, MUTED, LINE = "#1c2330", "#5b6472", "#c9ccd2"
TEXT, PAD = 10.0, 8.0  # the usual size of a text, and the space around a figure


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    color: str
    outline: str = ""


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
