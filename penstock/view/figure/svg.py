"""Write a figure as SVG, for a paper or a page."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape, quoteattr

from penstock.view.figure.shapes import Box, Figure, Shape, Text, hatch_lines, tint

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def svg(figure: Figure) -> str:
    """Return the text of an SVG file; equal figures give equal texts."""
    return _document(figure, map(_shape, figure.shapes))


def compact_svg(figure: Figure) -> str:
    """Return an SVG without hatches that takes a quarter of the bytes: one path for all boxes of a colour, texts above them."""
    return _document(figure, _merged_shapes(figure.shapes))


def _document(figure: Figure, elements: Iterable[str]) -> str:
    size = f'width="{figure.width:g}" height="{figure.height:g}" viewBox="0 0 {figure.width:g} {figure.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family={quoteattr(FONT)}>'
    background = f'<rect width="{figure.width:g}" height="{figure.height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(figure.title)}</title>", background, *elements, "</svg>", ""])


def _merged_shapes(shapes: Iterable[Shape]) -> Iterator[str]:
    boxes, others = defaultdict[tuple[str, str], list[str]](list), list[str]()
    for shape in shapes:
        if isinstance(shape, Box):
            fill, (x, y, width, height) = tint(shape.color) if shape.hatch else shape.color, map(_number, shape[:4])
            boxes[fill, shape.outline].append(f"M{x} {y}h{width}v{height}h-{width}z")
        else:
            others.append(_shape(shape))
    for (fill, outline), parts in boxes.items():
        stroke = f' stroke="{outline}" stroke-width="0.75"' if outline else ""
        yield f'<path d="{"".join(parts)}" fill="{fill}"{stroke}/>'
    yield from others


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        outline = f' stroke="{shape.outline}" stroke-width="0.75"' if shape.outline else ""
        position = (
            f'x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}" height="{_number(shape.height)}"'
        )
        color = tint(shape.color) if shape.hatch else shape.color
        return "\n".join([f'<rect {position} fill="{color}"{outline}/>', *map(_shape, hatch_lines(shape))])
    if isinstance(shape, Text):
        position = f'x="{_number(shape.x)}" y="{_number(shape.y + 0.35 * shape.size)}" font-size="{shape.size:g}"'
        return f'<text {position} text-anchor="{shape.anchor}" fill="{shape.color}">{escape(shape.text)}</text>'
    ends = f'x1="{_number(shape.x)}" y1="{_number(shape.y)}" x2="{_number(shape.to_x)}" y2="{_number(shape.to_y)}"'
    return f'<line {ends} stroke="{shape.color}" stroke-width="0.75"/>'


def _number(value: float) -> str:
    """Format with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
