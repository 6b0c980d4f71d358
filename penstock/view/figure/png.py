"""Write a figure as PNG, with Pillow and the font in its package, so that it looks the same on every machine."""

from os import PathLike
from typing import Any

from penstock.errors import PenstockError
from penstock.view.figure.shapes import Box, Figure, Shape, Text, hatch_lines, tint

SCALE = 3  # PNG pixels for a pixel of the figure: 216 an inch
PILLOW_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def save_png(figure: Figure, path: str | PathLike[str]) -> None:
    """Write `figure` to the PNG file `path`. Raises PenstockError if Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise PenstockError(
            "a PNG is painted with Pillow, which is not installed: pip install 'penstock-pipeline[png]'"
        ) from error
    image = Image.new("RGB", (round(figure.width * SCALE), round(figure.height * SCALE)), "#ffffff")
    canvas = ImageDraw.Draw(image)
    for shape in figure.shapes:
        _draw(canvas, shape)
    image.save(path, format="PNG", dpi=(72 * SCALE, 72 * SCALE), optimize=True)


def _draw(canvas: Any, shape: Shape) -> None:
    if isinstance(shape, Box):
        left, top = round(shape.x * SCALE), round(shape.y * SCALE)
        right, bottom = round((shape.x + shape.width) * SCALE), round((shape.y + shape.height) * SCALE)
        if right > left and bottom > top:
            outline = {"outline": shape.outline, "width": 1} if shape.outline else {}
            canvas.rectangle(
                (left, top, right - 1, bottom - 1), fill=tint(shape.color) if shape.hatch else shape.color, **outline
            )
            for line in hatch_lines(shape):
                _draw(canvas, line)
    elif isinstance(shape, Text):
        position = shape.x * SCALE, shape.y * SCALE
        canvas.text(position, shape.text, shape.color, _font(shape.size), anchor=PILLOW_ANCHORS[shape.anchor])
    else:
        ends = (shape.x * SCALE, shape.y * SCALE, shape.to_x * SCALE, shape.to_y * SCALE)
        canvas.line(ends, shape.color, width=SCALE - 1)


def _font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)
