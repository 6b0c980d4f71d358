"""A figure as SVG, for a paper or a page."""

from xml.sax.saxutils import escape, quoteattr

from penstock.view.figure.shapes import Box, Figure, Shape, Text, hatching, pale

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def svg(figure: Figure) -> str:
    """`figure` as the text of an SVG file; the same text for the same figure."""
    size = f'width="{figure.width:g}" height="{figure.height:g}" viewBox="0 0 {figure.width:g} {figure.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family={quoteattr(FONT)}>'
    background = f'<rect width="{figure.width:g}" height="{figure.height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(figure.title)}</title>", background, *map(_shape, figure.shapes), "</svg>", ""])


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        outline = f' stroke="{shape.outline}" stroke-width="0.75"' if shape.outline else ""
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
        color = pale(shape.color) if shape.hatch else shape.color
        return "\n".join([f'<rect {place} fill="{color}"{outline}/>', *map(_shape, hatching(shape))])
    if isinstance(shape, Text):
        place = f'x="{_n(shape.x)}" y="{_n(shape.y + 0.35 * shape.size)}" font-size="{shape.size:g}"'
        return f'<text {place} text-anchor="{shape.anchor}" fill="{shape.color}">{escape(shape.text)}</text>'
    ends = f'x1="{_n(shape.x)}" y1="{_n(shape.y)}" x2="{_n(shape.to_x)}" y2="{_n(shape.to_y)}"'
    return f'<line {ends} stroke="{shape.color}" stroke-width="0.75"/>'


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
