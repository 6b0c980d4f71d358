"""Colours that every eye tells apart, on every page and figure."""

import math
import re
from importlib.resources import files
from itertools import combinations, pairwise

import pytest

from penstock.schedule import Cause
from penstock.view.figure import timeline_figure

CSS = (files("penstock.view") / "page" / "page.css").read_text()
# All but order, which has its own hatch where ten paints have no room in grey.
PAINTS = ("F", "B", "I", "W", "fill", "drain", "imbalance", "communication", "sending")

# How linear red, green and blue are seen without one kind of cones: Machado, Oliveira and Fernandes 2009, full severity.
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "deuteranopic": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopic": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "grey": [[0.2126, 0.7152, 0.0722]] * 3,
}


def color(name, theme):
    """`--name` of the style sheet, in the theme: light is 0, dark is 1."""
    value = re.search(rf"--{name}: (.+);", CSS)[1]
    return re.findall(r"#\w{6}", value)[theme if "light-dark" in value else 0]


def linear(text):
    parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(text):
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(text), strict=True))


def lab(parts):
    """CIELAB of linear red, green and blue, under daylight (D65)."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    white = (0.95047, 1, 1.08883)
    xyz = [sum(map(float.__mul__, row, parts)) / one for row, one in zip(to_xyz, white, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(text, vision):
    rows = ([float(part) for part in row] for row in VISIONS[vision])
    return lab([min(max(sum(map(float.__mul__, row, linear(text))), 0.0), 1.0) for row in rows])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1])
def test_kinds_and_causes_are_told_apart_by_every_eye(vision, theme):
    for one, other in combinations(PAINTS, 2):
        apart = math.dist(seen(color(one, theme), vision), seen(color(other, theme), vision))
        assert apart >= 12, (one, other, apart)


def mixed(kind, theme, chunk):
    """The shade of a rank's stage, as chart/colors.js mixes it."""
    parts = ([int(color(name, theme)[at : at + 2], 16) for at in (1, 3, 5)] for name in (kind, "letter"))
    return "#" + "".join(f"{round((1 - 0.1 * chunk) * a + 0.1 * chunk * b):02x}" for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("vision", [vision for vision in VISIONS if vision != "grey"])
@pytest.mark.parametrize("theme", [0, 1])
def test_order_has_a_colour_of_its_own(vision, theme):
    for name in PAINTS:
        apart = math.dist(seen(color("order", theme), vision), seen(color(name, theme), vision))
        assert apart >= 12, (name, apart)


def test_each_cause_has_a_hatch_of_its_own():  # in grey there is no room for a tenth paint: 9 x 12 is more than 100
    assert set(timeline_figure.CAUSE_HATCHES) == set(timeline_figure.CAUSE_COLORS) == set(map(str, Cause))
    assert len(set(timeline_figure.CAUSE_HATCHES.values())) == len(Cause)


def second(kind, theme):
    return mixed(kind, theme, 1)


@pytest.mark.parametrize("vision", VISIONS)
def test_eight_shades_of_a_kind_are_told_apart_and_darken_in_grey_too(vision):
    for kind in "FBIW":
        shades = [seen(timeline_figure.shade(kind, chunk), vision) for chunk in range(8)]
        assert [lightness for lightness, *_ in shades] == sorted((lightness for lightness, *_ in shades), reverse=True)
        assert min(math.dist(one, other) for one, other in pairwise(shades)) >= 3


def test_a_figure_and_a_page_have_the_same_shades_with_legible_texts():
    script = (files("penstock.view") / "page" / "chart" / "colors.js").read_text()
    darks = dict(re.findall(r"(\w): (\d)", re.search(r"FIRST_DARK_SHADES = {(.+?)}", script)[1]))
    assert {kind: int(number) for kind, number in darks.items()} == timeline_figure.FIRST_DARK_SHADES
    assert f"NUM_SHADES = {timeline_figure.NUM_SHADES};" in script
    assert "var(--letter) ${10 * shade}%" in script
    for kind in "FBIW":
        for chunk in range(8):
            assert timeline_figure.shade(kind, chunk) == mixed(kind, 0, chunk)
            letter = color("letter-B" if chunk >= timeline_figure.FIRST_DARK_SHADES[kind] else f"letter-{kind}", 0)
            assert contrast(letter, mixed(kind, 0, chunk)) >= 4.5
            assert contrast(timeline_figure._text_color(kind, chunk), mixed(kind, 0, chunk)) >= 4.5


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1])
def test_the_second_shade_of_a_kind_is_taken_for_no_other_kind(vision, theme):
    shades = {(kind, of): seen(of(kind, theme), vision) for kind in "FBIW" for of in (color, second)}
    for (one, first), (other, then) in combinations(shades, 2):
        apart = math.dist(shades[one, first], shades[other, then])
        assert one == other or apart >= 5, (one, other, apart)


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_texts_have_the_contrast_of_wcag_aa(theme):
    for ground in ("ground", "panel"):
        for text in ("ink", "muted", "accent"):
            assert contrast(color(text, theme), color(ground, theme)) >= 4.5, (text, ground)
    for kind in "FBIW":
        assert contrast(color(f"letter-{kind}", theme), color(kind, theme)) >= 4.5, kind
        assert contrast(color(f"letter-{kind}", theme), second(kind, theme)) >= 4.5, kind


def test_a_teachers_forwards_have_one_colour_that_texts_can_be_read_on():
    assert timeline_figure.TEACHER_COLOR == color("teacher", 0) == color("teacher", 1)
    assert contrast(color("letter-F", 0), color("teacher", 0)) >= 4.5


def test_figures_have_the_colours_of_the_page():
    for name, value in {**timeline_figure.KIND_COLORS, **timeline_figure.CAUSE_COLORS}.items():
        assert value == color(name, 0)
