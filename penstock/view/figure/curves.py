"""Draw curves as a figure: each in its colour, x on a logarithmic axis, points joined by straight lines."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.view.figure.shapes import INK_COLOR, LINE_COLOR, MUTED_COLOR, PADDING, TEXT_SIZE, Box, Figure, Line, Shape, Text

COLORS = ("#1f5fa8", "#c4622d", "#2f7d57", "#8a4fa3", "#b3282d", "#0f8a94", "#8c7a1e", "#5b6472", "#d17fb0")
LEFT_MARGIN, BOTTOM_MARGIN, LEGEND_WIDTH, POINT_SIZE = 52.0, 34.0, 120.0, 4.0
CHARACTER_WIDTH, MAX_LINEAR_TICKS = 5.4, 6

Points = Sequence[tuple[float, float]]


def curves(
    title: str,
    series: Mapping[str, Points],
    x_name: str,
    y_name: str,
    x_ticks: Mapping[float, str],
    width: float = 720.0,
    from_zero: bool = False,
) -> Figure:
    """Return the figure of `series`: name -> points (x, y), all greater than 0. `x_ticks`: x -> its text on the axis.

    `from_zero`: y is on a linear axis from 0, and may be 0; else on a logarithmic one.
    """
    points = [point for points in series.values() for point in points]
    legend_width = max(LEGEND_WIDTH, 30 + CHARACTER_WIDTH * max(map(len, series)))
    left, right, top, bottom = LEFT_MARGIN, width - legend_width, 34.0, width * 0.55
    y_ticks = _linear_ticks(max(y for _, y in points)) if from_zero else _powers_of_ten([y for _, y in points])
    lowest, highest = (y if from_zero else math.log10(y) for y in (y_ticks[0], y_ticks[-1]))
    low, high = (math.log2(edge(x for x, _ in points)) for edge in (min, max))

    def position(x: float, y: float) -> tuple[float, float]:
        x_share = (math.log2(x) - low) / ((high - low) or 1)
        y_share = ((y if from_zero else math.log10(y)) - lowest) / (highest - lowest)
        return left + 10 + x_share * (right - left - 20), bottom - y_share * (bottom - top)

    shapes: list[Shape] = [Text(LEFT_MARGIN, PADDING + TEXT_SIZE / 2, title, TEXT_SIZE + 1)]
    for y_tick in y_ticks:
        y = position(points[0][0], y_tick)[1]
        shapes += [
            Line(left, y, right, y, LINE_COLOR),
            Text(left - 6, y, f"{y_tick:g}", TEXT_SIZE - 1, "end", MUTED_COLOR),
        ]
    for tick, text in x_ticks.items():
        x = position(tick, y_ticks[0])[0]
        shapes += [Line(x, bottom, x, bottom + 4), Text(x, bottom + 12, text, TEXT_SIZE - 1, "middle", MUTED_COLOR)]
    shapes += [
        Text(right, bottom + 26, x_name, TEXT_SIZE - 1, "end", MUTED_COLOR),
        Text(6, top - 10, y_name, TEXT_SIZE - 1, "start", MUTED_COLOR),
    ]
    for number, (name, value) in enumerate(series.items()):
        color, positions = COLORS[number % len(COLORS)], [position(*point) for point in value]
        shapes += [Line(*start, *end, color) for start, end in pairwise(positions)]
        size = POINT_SIZE + (len(series) - 1 - number)  # of points at one place, the first is seen around the last
        shapes += [Box(x - size / 2, y - size / 2, size, size, color) for x, y in positions]
        y = top + 8 + 16 * number
        shapes += [Box(right + 12, y - 4, 8, 8, color), Text(right + 25, y, name, TEXT_SIZE - 0.5, "start", INK_COLOR)]
    height = max(bottom + BOTTOM_MARGIN, top + 16 * len(series) + PADDING)
    return Figure(title, width, height, tuple(shapes))


def _powers_of_ten(values: Sequence[float]) -> list[float]:
    """Return the powers of ten from the one below all `values` to the one above; two at least."""
    lowest = math.floor(math.log10(min(values)))
    return [10.0**power for power in range(lowest, max(math.ceil(math.log10(max(values))), lowest + 1) + 1)]


def _linear_ticks(most: float) -> list[float]:
    """Return round numbers from 0 to the first that is not below `most`."""
    power = 10.0 ** math.floor(math.log10(most or 1))
    step = next(step for share in (0.1, 0.2, 0.5, 1, 2) if (step := share * power) * (MAX_LINEAR_TICKS - 1) >= (most or 1))
    return [count * step for count in range(math.ceil(round((most or 1) / step, 9)) + 1)]
