"""Draw curves as a figure: each in its colour, on logarithmic axes, points joined by straight lines."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.view.figure.shapes import INK_COLOR, LINE_COLOR, MUTED_COLOR, PADDING, TEXT_SIZE, Box, Figure, Line, Shape, Text

COLORS = ("#1f5fa8", "#c4622d", "#2f7d57", "#8a4fa3", "#b3282d", "#0f8a94", "#8c7a1e", "#5b6472", "#d17fb0")
LEFT_MARGIN, BOTTOM_MARGIN, LEGEND_WIDTH, POINT_SIZE = 52.0, 34.0, 120.0, 4.0

Points = Sequence[tuple[float, float]]


def curves(
    title: str, series: Mapping[str, Points], x_name: str, y_name: str, x_ticks: Mapping[float, str], width: float = 720.0
) -> Figure:
    """Return the figure of `series`: name -> points (x, y), all greater than 0. `x_ticks`: x -> its text on the axis."""
    points = [point for points in series.values() for point in points]
    left, right, top, bottom = LEFT_MARGIN, width - LEGEND_WIDTH, 34.0, width * 0.55
    lowest = math.floor(math.log10(min(y for _, y in points)))
    highest = max(math.ceil(math.log10(max(y for _, y in points))), lowest + 1)
    low, high = (math.log2(edge(x for x, _ in points)) for edge in (min, max))

    def position(x: float, y: float) -> tuple[float, float]:
        x_share = (math.log2(x) - low) / ((high - low) or 1)
        y_share = (math.log10(y) - lowest) / (highest - lowest)
        return left + 10 + x_share * (right - left - 20), bottom - y_share * (bottom - top)

    shapes: list[Shape] = [Text(LEFT_MARGIN, PADDING + TEXT_SIZE / 2, title, TEXT_SIZE + 1)]
    for power in range(lowest, highest + 1):
        y = position(points[0][0], 10.0**power)[1]
        shapes += [
            Line(left, y, right, y, LINE_COLOR),
            Text(left - 6, y, f"{10.0**power:g}", TEXT_SIZE - 1, "end", MUTED_COLOR),
        ]
    for tick, text in x_ticks.items():
        x = position(tick, 10.0**lowest)[0]
        shapes += [Line(x, bottom, x, bottom + 4), Text(x, bottom + 12, text, TEXT_SIZE - 1, "middle", MUTED_COLOR)]
    shapes += [
        Text(right, bottom + 26, x_name, TEXT_SIZE - 1, "end", MUTED_COLOR),
        Text(6, top - 10, y_name, TEXT_SIZE - 1, "start", MUTED_COLOR),
    ]
    for number, (name, value) in enumerate(series.items()):
        color, positions = COLORS[number % len(COLORS)], [position(*point) for point in value]
        shapes += [Line(*start, *end, color) for start, end in pairwise(positions)]
        shapes += [Box(x - POINT_SIZE / 2, y - POINT_SIZE / 2, POINT_SIZE, POINT_SIZE, color) for x, y in positions]
        y = top + 8 + 16 * number
        shapes += [Box(right + 12, y - 4, 8, 8, color), Text(right + 25, y, name, TEXT_SIZE - 0.5, "start", INK_COLOR)]
    height = max(bottom + BOTTOM_MARGIN, top + 16 * len(series) + PADDING)
    return Figure(title, width, height, tuple(shapes))
