"""The figure for a paper: SVG and PNG."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from timelines import COSTS, measured, two_ranks

from penstock.errors import PenstockError
from penstock.schedule import ActivationSize, Costs, Timeline, build, simulate
from penstock.view.figure.png import save_png
from penstock.view.figure.shapes import Box, Line, Text, hatch_lines
from penstock.view.figure.svg import svg
from penstock.view.figure.timeline import (
    CAUSE_COLORS,
    CAUSE_HATCHES,
    KIND_COLORS,
    LABEL_WIDTH,
    MEMORY_COLOR,
    MEMORY_HEIGHT,
    ROW_HEIGHT,
    figure,
)
from penstock.view.record import Record

SPACE = "{http://www.w3.org/2000/svg}"


def test_the_figure_has_each_action_at_its_time_idle_time_in_its_colour_and_an_axis():
    drawn = figure(Record((two_ranks(),)), width=LABEL_WIDTH + 8 + 110)  # 10 pixels a unit of time
    boxes = [(round((s.x - LABEL_WIDTH) / 10, 6), round(s.width / 10, 6), s.color) for s in drawn.shapes if isinstance(s, Box)]
    fill, drain, wire = CAUSE_COLORS["fill"], CAUSE_COLORS["drain"], CAUSE_COLORS["communication"]
    forward, backward = KIND_COLORS["F"], KIND_COLORS["B"]
    assert boxes[:7] == [
        (2, 3, fill),
        (5, 1, wire),
        (8, 1, wire),
        (0, 1, forward),
        (1, 1, forward),
        (6, 2, backward),
        (9, 2, backward),
    ]
    assert boxes[7:14] == [
        (0, 1, fill),
        (1, 1, wire),
        (8, 3, drain),
        (2, 1, forward),
        (3, 2, backward),
        (5, 1, forward),
        (6, 2, backward),
    ]
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert texts[:13] == ["rank 0", "0", "1", "B0", "B1", "rank 1", "0", "B0", "1", "B1", "0", "10", "time"]
    assert texts[13:] == ["forward", "backward", "idle: fill", "idle: drain", "idle: communication"]
    assert sum(isinstance(shape, Line) for shape in drawn.shapes) == 3


def test_memory_that_is_known_in_bytes_is_a_curve_below_each_rank():
    known = replace(two_ranks(), activation_sizes=(ActivationSize(3e6, 3e6), ActivationSize(2e6, 2e6)), memory_unit="bytes")
    drawn = figure(Record((known,)), width=LABEL_WIDTH + 8 + 110)  # 10 pixels a unit of time
    curve = [s for s in drawn.shapes if isinstance(s, Box) and s.color == MEMORY_COLOR][:-1]  # the last stands in the legend
    heights = [(round((s.x - LABEL_WIDTH) / 10), round(s.width / 10), round(s.height / MEMORY_HEIGHT * 6)) for s in curve]
    assert heights == [(0, 1, 3), (1, 7, 6), (8, 3, 3), (2, 3, 2), (5, 3, 2)]
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert texts.count("6 MB") == texts.count("2 MB") == 1
    assert texts[-1] == "memory of activations, and its peak"


def test_the_planned_row_stands_below_the_measured_one_on_the_same_axis():
    schedule = build("1f1b", ranks=4, microbatches=8)
    drawn = figure(Record((measured(schedule, 1),), simulate(schedule, COSTS), "s"))
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert texts.count("planned") == 4
    assert "time (ms)" in texts
    assert all(shape.x + shape.width <= drawn.width for shape in drawn.shapes if isinstance(shape, Box))


def test_memory_path_and_arrows_are_drawn_if_asked():
    timeline = two_ranks()
    plain, result = figure(Record((timeline,))), figure(Record((timeline,)), ("memory", "path", "arrows"))
    count = [sum(isinstance(shape, Line) for shape in drawn.shapes) for drawn in (plain, result)]
    between = sum(one.rank != other.rank for one, other in pairwise(timeline.critical_path))
    assert count[1] - count[0] == 4 + between + 2 * len(timeline.critical_path)  # four messages; an outline is two lines
    assert sum(isinstance(shape, Box) and shape.color == MEMORY_COLOR for shape in result.shapes) > 4


def test_idle_time_is_hatched_by_its_cause_within_its_box():
    hatches = {shape.hatch for shape in figure(Record((two_ranks(),))).shapes if isinstance(shape, Box) and shape.hatch}
    assert hatches == {CAUSE_HATCHES[cause] for cause in ("fill", "drain", "communication")}
    for hatch in CAUSE_HATCHES.values():
        lines = list(hatch_lines(Box(10, 20, 30, 12, "#6c2507", hatch=hatch)))
        assert lines
        assert all(10 <= line.x <= line.to_x <= 40.8 and 20 <= line.y <= 32 and 20 <= line.to_y <= 32 for line in lines), hatch


def test_where_actions_are_denser_than_pixels_the_parts_of_each_slice_of_time_are_drawn():
    timeline = simulate(build("1f1b", 2, 400), Costs(1, 1, 2, send=0.5))
    drawn = figure(Record((timeline,)))
    boxes = [shape for shape in drawn.shapes if isinstance(shape, Box)]
    assert len(boxes) < 2 * 256 * 4
    whole = drawn.width - LABEL_WIDTH - 8
    took = sum(event.end - event.start for event in timeline.events if event.action.kind.value == "B")
    area = sum(box.width * box.height for box in boxes if box.color == KIND_COLORS["B"] and box.width < 10)  # not the legend
    assert area / (2 * whole * ROW_HEIGHT) == pytest.approx(took / (2 * timeline.makespan), abs=2e-3)
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert {"forward", "backward", "idle: fill", "idle: drain", "idle: communication"} <= set(texts)
    with pytest.raises(
        PenstockError, match=r"1f1b has more actions than a figure has pixels: .* leave out --arrows and --path"
    ):
        figure(Record((timeline,)), ("path", "arrows"))


def test_more_ranks_than_a_figure_has_room_for_are_told():
    with pytest.raises(PenstockError, match=r"1f1b has 129 ranks: a figure has room for 128, a page \(--html\) for all"):
        figure(Record((simulate(build("1f1b", 129, 1)),)))


def test_the_svg_is_well_formed_whatever_the_name_and_says_the_same_each_time():
    timeline = two_ranks()
    named = Timeline("<script>&\"'", timeline.rows, timeline.message_costs)
    text = svg(figure(Record((named,))))
    root = ElementTree.fromstring(text)
    assert root.find(f"{SPACE}title").text == "<script>&\"'"
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "text", "line"}
    assert text == svg(figure(Record((named,))))


def test_the_png_is_the_figure_painted(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    drawn = figure(Record((two_ranks(),)))
    save_png(drawn, tmp_path / "a.png")
    image = image_module.open(tmp_path / "a.png")
    assert image.size == (round(drawn.width * 3), round(drawn.height * 3))
    first = next(shape for shape in drawn.shapes if isinstance(shape, Box) and shape.color == KIND_COLORS["F"])
    pixel = image.getpixel((round(3 * first.x) + 4, round(3 * first.y) + 4))
    assert "#{:02x}{:02x}{:02x}".format(*pixel) == KIND_COLORS["F"]


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PenstockError, match=r"pip install 'penstock-pipeline\[png\]'"):
        save_png(figure(Record((two_ranks(),))), tmp_path / "a.png")


@pytest.mark.ranks
def test_pictures_need_no_torch():
    code = "import sys, penstock.commands.show, penstock.view.files, penstock.view.html; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
