"""Curves as a figure: one colour for each, both axes logarithmic, the points joined by straight lines."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.view.figure.shapes import INK, LINE, MUTED, PAD, TEXT, Box, Figure, Line, Shape, Text

COLORS = ("#1f5fa8", "#c4622d", "#2f7d57", "#8a4fa3", "#b3282d", "#0f8a94", "#8c7a1e", "#5b6472", "#d17fb0")
LEFT, BOTTOM, LEGEND, POINT = 52.0, 34.0, 120.0, 4.0

Points = Sequence[tuple[float, float]]


def curves(
    title: str, series: Mapping[str, Points], x_name: str, y_name: str, x_ticks: Mapping[float, str], width: float = 720.0
) -> Figure:
    """`series` by name, each of points (x, y) above 0; `x_ticks` are the places on the x axis that get a text."""
    points = [point for points in series.values() for point in points]
    left, right, top, bottom = LEFT, width - LEGEND, 34.0, width * 0.55
    lowest = math.floor(math.log10(min(y for _, y in points)))
    highest = max(math.ceil(math.log10(max(y for _, y in points))), lowest + 1)
    low, high = (math.log2(edge(x for x, _ in points)) for edge in (min, max))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / ((high - low) or 1)
        up = (math.log10(y) - lowest) / (highest - lowest)
        return left + 10 + across * (right - left - 20), bottom - up * (bottom - top)

    shapes: list[Shape] = [Text(LEFT, PAD + TEXT / 2, title, TEXT + 1)]
    for power in range(lowest, highest + 1):
        y = at(points[0][0], 10.0**power)[1]
        shapes += [Line(left, y, right, y, LINE), Text(left - 6, y, f"{10.0**power:g}", TEXT - 1, "end", MUTED)]
    for tick, text in x_ticks.items():
        x = at(tick, 10.0**lowest)[0]
        shapes += [Line(x, bottom, x, bottom + 4), Text(x, bottom + 12, text, TEXT - 1, "middle", MUTED)]
    shapes += [Text(right, bottom + 26, x_name, TEXT - 1, "end", MUTED), Text(6, top - 10, y_name, TEXT - 1, "start", MUTED)]
    for number, (name, value) in enumerate(series.items()):
        color, places = COLORS[number % len(COLORS)], [at(*point) for point in value]
        shapes += [Line(*start, *end, color) for start, end in pairwise(places)]
        shapes += [Box(x - POINT / 2, y - POINT / 2, POINT, POINT, color) for x, y in places]
        y = top + 8 + 16 * number
        shapes += [Box(right + 12, y - 4, 8, 8, color), Text(right + 25, y, name, TEXT - 0.5, "start", INK)]
    height = max(bottom + BOTTOM, top + 16 * len(series) + PAD)
    return Figure(title, width, height, tuple(shapes))
