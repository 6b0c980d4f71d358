"""Curves as a figure."""

import math

from penstock.view.figure.curves import curves


def test_curves_are_log_log():
    figure = curves("t", {"one": [(1, 1), (10, 10), (100, 100)]}, "x", "y", {1: "1", 100: "100"})
    dots = [shape for shape in figure.shapes if type(shape).__name__ == "Box"][:3]
    (a, b, c) = [(dot.x, dot.y) for dot in dots]
    assert math.isclose(b[0] - a[0], c[0] - b[0])
    assert math.isclose(b[1] - a[1], c[1] - b[1])
    assert a[1] > b[1]
