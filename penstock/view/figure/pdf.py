"""Write a figure as PDF: one page of vectors, its texts in Helvetica, a font that every reader of PDF has.

The file has six objects, one of them a compressed stream of drawing commands (ISO 32000-1). The origin of a page is at its
lower left, so the stream begins by turning the y axis down, and each text turns it back.
"""

import zlib
from os import PathLike
from pathlib import Path

from penstock.view.figure.shapes import Box, Figure, Shape, Text, hatch_lines, tint

POINTS_PER_PIXEL = 0.75  # 72 points an inch, 96 CSS pixels an inch
LINE_WIDTH = 0.75
# The widths of Helvetica's characters from space to ~, in thousandths of the font size (Adobe's metrics of the standard fonts).
WIDTHS = [
    *(278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278), *[556] * 10,
    *(278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778),
    *(667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556, 333, 556, 556, 500, 556, 556, 278),
    *(556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584),
]  # fmt: skip
USUAL_WIDTH = 556


def save_pdf(figure: Figure, path: str | PathLike[str]) -> None:
    """Write `figure` to the PDF file `path`; equal figures give equal files."""
    Path(path).write_bytes(pdf(figure))


def pdf(figure: Figure) -> bytes:
    """Return the bytes of a PDF file."""
    width, height = figure.width * POINTS_PER_PIXEL, figure.height * POINTS_PER_PIXEL
    turn = f"{POINTS_PER_PIXEL} 0 0 -{POINTS_PER_PIXEL} 0 {height:.2f} cm {LINE_WIDTH} w"
    stream = zlib.compress("\n".join([turn, *map(_shape, figure.shapes)]).encode("cp1252", "replace"), 9)
    title = figure.title.encode("utf-16-be").hex()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %.2f %.2f]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>" % (width, height),
        b"<</Length %d/Filter/FlateDecode>>stream\n%b\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
        b"<</Title<FEFF%b>>>" % title.encode(),
    ]
    file, offsets = b"%PDF-1.4\n", list[int]()
    for number, content in enumerate(objects, start=1):
        offsets.append(len(file))
        file += b"%d 0 obj%b endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    trailer = b"trailer<</Size %d/Root 1 0 R/Info 6 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(file))
    return file + head + table + trailer


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        outline = f"{_rgb(shape.outline)} RG " if shape.outline else ""
        fill = f"{_rgb(tint(shape.color) if shape.hatch else shape.color)} rg"
        box = f"{outline}{fill} {shape.x:.2f} {shape.y:.2f} {shape.width:.2f} {shape.height:.2f} re {'B' if outline else 'f'}"
        return "\n".join([box, *map(_shape, hatch_lines(shape))])
    if isinstance(shape, Text):
        left = shape.x - text_width(shape.text, shape.size) * {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor]
        escaped = shape.text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        place = f"1 0 0 -1 {left:.2f} {shape.y + 0.35 * shape.size:.2f} Tm"
        return f"BT /F {shape.size:g} Tf {_rgb(shape.color)} rg {place} ({escaped}) Tj ET"
    return f"{_rgb(shape.color)} RG {shape.x:.2f} {shape.y:.2f} m {shape.to_x:.2f} {shape.to_y:.2f} l S"


def text_width(text: str, size: float) -> float:
    """Return the width of `text` in Helvetica; other characters than those of ASCII count as wide as a digit."""
    widths = (WIDTHS[ord(letter) - 32] if " " <= letter <= "~" else USUAL_WIDTH for letter in text)
    return sum(widths) * size / 1000


def _rgb(color: str) -> str:
    return " ".join(f"{int(color[at : at + 2], 16) / 255:.3f}" for at in (1, 3, 5))
