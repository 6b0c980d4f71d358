"""A figure as PNG, painted with Pillow and the font it brings along, so that it looks the same on every machine."""

from os import PathLike
from typing import Any

from penstock.errors import PenstockError
from penstock.view.figure.shapes import Box, Figure, Shape, Text, hatching, pale

PIXELS = 3  # for each of the figure's: 216 a inch
ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def save_png(figure: Figure, path: str | PathLike[str]) -> None:
    """Write `figure` to the PNG file at `path`. Raises PenstockError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise PenstockError("a PNG is painted with Pillow, which is not installed: pip install 'penstock[png]'") from error
    image = Image.new("RGB", (round(figure.width * PIXELS), round(figure.height * PIXELS)), "#ffffff")
    brush = ImageDraw.Draw(image)
    for shape in figure.shapes:
        _paint(brush, shape)
    image.save(path, format="PNG", dpi=(72 * PIXELS, 72 * PIXELS), optimize=True)


def _paint(brush: Any, shape: Shape) -> None:
    if isinstance(shape, Box):
        left, top = round(shape.x * PIXELS), round(shape.y * PIXELS)
        right, bottom = round((shape.x + shape.width) * PIXELS), round((shape.y + shape.height) * PIXELS)
        if right > left and bottom > top:
            outline = {"outline": shape.outline, "width": 1} if shape.outline else {}
            brush.rectangle(
                (left, top, right - 1, bottom - 1), fill=pale(shape.color) if shape.hatch else shape.color, **outline
            )
            for line in hatching(shape):
                _paint(brush, line)
    elif isinstance(shape, Text):
        place = shape.x * PIXELS, shape.y * PIXELS
        brush.text(place, shape.text, shape.color, _font(shape.size), anchor=ANCHORS[shape.anchor])
    else:
        ends = (shape.x * PIXELS, shape.y * PIXELS, shape.to_x * PIXELS, shape.to_y * PIXELS)
        brush.line(ends, shape.color, width=PIXELS - 1)


def _font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * PIXELS)
