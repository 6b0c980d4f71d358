"""The figure for a paper: SVG and PNG."""

import re
import subprocess
import sys
import zlib
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from timelines import COSTS, measured, two_ranks

from penstock.errors import PenstockError
from penstock.schedule import ActivationSize, Costs, Timeline, build, simulate, with_teacher
from penstock.view.figure.pdf import pdf, save_pdf, text_width
from penstock.view.figure.png import save_png
from penstock.view.figure.shapes import Box, FigureStyle, Line, Text, hatch_lines
from penstock.view.figure.svg import svg
from penstock.view.figure.timeline_figure import (
    CAUSE_COLORS,
    CAUSE_HATCHES,
    KIND_COLORS,
    LABEL_WIDTH,
    MEMORY_COLOR,
    MEMORY_HEIGHT,
    ROW_HEIGHT,
    SLICE_COLOR,
    TEACHER_COLOR,
    figure,
    shade,
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


def test_the_predicted_row_stands_below_the_measured_one_on_the_same_axis():
    schedule = build("1f1b", ranks=4, microbatches=8)
    drawn = figure(Record((measured(schedule, 1),), simulate(schedule, COSTS), "s"))
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert texts.count("predicted") == 4
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


def test_each_stage_of_a_rank_has_its_shade_and_the_legend_shows_them():
    drawn = figure(Record((simulate(build("interleaved-1f1b", 2, 2, stages_per_rank=8)),)))
    colors = [shape.color for shape in drawn.shapes if isinstance(shape, Box)]
    assert {shade(kind, chunk) for kind in "FB" for chunk in range(8)} <= {*colors}
    swatches = [shape for shape in drawn.shapes if isinstance(shape, Box) and shape.y > drawn.height - 25]
    assert [shape.color for shape in swatches][2:10] == [shade("F", chunk) for chunk in range(8)]
    assert "stages of a rank, first to last" in [shape.text for shape in drawn.shapes if isinstance(shape, Text)]


def test_the_mark_of_a_slice_stands_at_its_place_among_those_of_a_microbatch():
    timeline = simulate(build("gpipe", 1, 1, slices=4))
    drawn = figure(Record((timeline,)), width=LABEL_WIDTH + 8 + 120)  # a step of 3 units, 40 pixels each
    marks = [shape for shape in drawn.shapes if isinstance(shape, Box) and shape.color == SLICE_COLOR][:8]
    places = [round(shape.x - LABEL_WIDTH, 6) for shape in marks]
    assert places == [0, 10 + 2.5, 20 + 5, 30 + 7.5, 40 + 15, 60 + 10, 80 + 5, 100]
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert "mark below an action: which of 4 slices, the first on the left" in texts


@pytest.mark.parametrize(
    ("labels", "expected"), [("auto", {"0", "1", "B0", "B1"}), ("action", {"0B0", "0B1", "1B0", "1B1"}), ("none", set())]
)
def test_labels_are_as_long_as_asked_where_they_fit(labels, expected):
    drawn = figure(Record((two_ranks(),)), width=LABEL_WIDTH + 8 + 110, style=FigureStyle(labels=labels, legend=False))
    texts = {shape.text for shape in drawn.shapes if isinstance(shape, Text)}
    assert texts - {"rank 0", "rank 1", "0", "10", "time"} == expected - {"0"}


def test_width_font_title_and_legend_are_as_asked():
    plain, styled = (
        figure(Record((two_ranks(),)), style=style)
        for style in (FigureStyle(), FigureStyle(width=360, font_size=7, title=True, legend=False))
    )
    assert (plain.width, styled.width) == (720, 360)
    assert styled.height < plain.height
    texts = [shape for shape in styled.shapes if isinstance(shape, Text)]
    assert texts[0].text == two_ranks().name
    assert {shape.text: shape.size for shape in texts}["rank 0"] == pytest.approx(7)
    assert "forward" not in [shape.text for shape in texts]
    assert all(shape.x + shape.width <= 360 for shape in styled.shapes if isinstance(shape, Box))
    with pytest.raises(PenstockError, match="a figure 100 pixels wide has no room at font size 10: use 120 or more"):
        figure(Record((two_ranks(),)), style=FigureStyle(width=100))


def test_a_pdf_has_the_boxes_and_texts_of_the_figure(tmp_path):
    named = Timeline("a (1) \\ µ ∑", two_ranks().rows, two_ranks().message_costs)
    drawn = figure(Record((named,)), style=FigureStyle(title=True))
    save_pdf(drawn, tmp_path / "a.pdf")
    data = (tmp_path / "a.pdf").read_bytes()
    assert data == pdf(drawn)
    assert data.startswith(b"%PDF-1.4\n")
    assert data.endswith(b"%%EOF\n")
    assert b"/MediaBox[0 0 540.00 " in data

    start = int(re.search(rb"startxref\n(\d+)", data)[1])
    assert data[start:].startswith(b"xref\n0 7\n")
    offsets = [int(line.split()[0]) for line in data[start:].splitlines()[3:9]]
    assert [data[offset:].partition(b" ")[0] for offset in offsets] == [b"1", b"2", b"3", b"4", b"5", b"6"]

    length, rest = re.search(rb"/Length (\d+)/Filter/FlateDecode>>stream\n(.*)", data, re.DOTALL).groups()
    content = zlib.decompress(rest[: int(length)]).decode("cp1252")
    boxes = [shape for shape in drawn.shapes if isinstance(shape, Box)]
    assert content.count(" re ") == len(boxes)
    assert f"{boxes[3].x:.2f} {boxes[3].y:.2f} {boxes[3].width:.2f} {boxes[3].height:.2f} re B" in content
    assert r"(a \(1\) \\ µ ?) Tj" in content
    assert content.count("BT ") == sum(isinstance(shape, Text) for shape in drawn.shapes)


def test_texts_of_a_pdf_are_as_wide_as_helvetica_s():
    assert text_width("rank 0", 1000) == 333 + 556 + 556 + 500 + 278 + 556
    assert text_width("", 10) == 0


@pytest.mark.ranks
def test_pictures_need_no_torch():
    code = "import sys, penstock.commands.show, penstock.view.files, penstock.view.html; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forwards_of_a_teacher_have_a_colour_of_their_own_and_the_model_keeps_its_shades():
    drawn = figure(Record((simulate(with_teacher(build("1f1b", 2, 2)), Costs(1, 1, 1)),)))
    colors = [shape.color for shape in drawn.shapes if isinstance(shape, Box)]
    assert colors.count(TEACHER_COLOR) == 4 + 1  # and in the legend
    assert colors.count(KIND_COLORS["F"]) == 4 + 1
    texts = [shape.text for shape in drawn.shapes if isinstance(shape, Text)]
    assert "forward of the teacher" in texts
    assert "stages of a rank, first to last" not in texts
