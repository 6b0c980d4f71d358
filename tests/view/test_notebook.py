"""What a notebook shows of a schedule, a timeline and a plan: a small, legible picture over numbers; `repr` is a line."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.explain.explain import MeasuredTimeline
from penstock.plan.result import Plan
from penstock.schedule import Costs, build, from_rows, simulate
from penstock.view.figure.timeline_figure import KIND_COLORS
from penstock.view.notebook import MAX_ACTIONS, MAX_BYTES

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
TABLE = build("1f1b", 4, 8)
CIRCLE = from_rows("mine", [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])


def plan(table=TABLE):
    costs = Costs(0.001, 0.001, 0.001)
    seconds, no_cut = simulate(table, costs).makespan, ("layer",) * (table.stages - 1)
    return Plan(
        table, no_cut, (None,) * table.stages, table.microbatches, seconds, seconds / 2, (1e6,) * table.ranks, "", costs, 8
    )


def svg_of(page):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])


def texts_of(page):
    return [element.text for element in svg_of(page).iter() if element.tag.endswith("text")]


def measured_step():
    timeline = simulate(TABLE, Costs(0.001, 0.001, 0.001))
    return MeasuredTimeline(timeline.name, timeline.rows)


def test_repr_is_a_line():
    timeline, step = simulate(TABLE, Costs(1, 1, 1)), measured_step()
    assert repr(TABLE) == "<Schedule 1f1b: 4 ranks, 4 stages, 8 microbatches>"
    assert repr(build("1f1b", 4, 8, slices=2)) == "<Schedule 1f1b: 4 ranks, 4 stages, 8 microbatches in 2 slices>"
    assert repr(timeline) == "<Timeline 1f1b: 4 ranks, 64 actions, makespan 33, bubble 27.3%>"
    assert repr(step) == "<MeasuredTimeline 1f1b: 4 ranks, 64 actions, makespan 0.033 s, bubble 27.3%>"
    assert repr(plan()) == "<Plan 1f1b: 4 ranks, 8 microbatches, 33 ms a step>"


@pytest.mark.parametrize(
    "shown", [TABLE, simulate(TABLE), measured_step(), plan()], ids=["schedule", "timeline", "measured", "plan"]
)
def test_a_notebook_draws_every_rank_on_a_white_ground_over_numbers(shown):
    page = shown._repr_html_()
    drawn, (_, text) = svg_of(page), page.split("<pre", 1)
    ground = next(iter(drawn.findall("{*}rect")))
    assert (ground.get("fill"), ground.get("width"), ground.get("height")) == (
        "#ffffff",
        drawn.get("width"),
        drawn.get("height"),
    )
    assert [text for text in texts_of(page) if text.startswith("rank")] == [f"rank {rank}" for rank in range(shown.ranks)]
    assert "color:" not in text
    assert "bubble" in text or "ms a step" in text
    assert len(page.encode()) <= MAX_BYTES


def test_times_of_a_measured_step_and_of_a_plan_have_a_unit():
    assert any(text.startswith("time (") for text in texts_of(measured_step()._repr_html_()))
    assert "time (ms)" in texts_of(plan()._repr_html_())
    assert "time" in texts_of(TABLE._repr_html_())


def test_a_table_that_deadlocks_is_drawn_until_where_each_rank_stops_with_the_cycle_in_words():
    page = CIRCLE._repr_html_()
    texts = texts_of(page)
    assert [text for text in texts if "stops" in text] == ["stops before 0B0", "stops before 1F1"]
    assert [text for text in texts if text in ("F0", "F1", "B0", "B1")] == ["F0"]
    assert not [text for text in texts if "idle" in text]
    assert "mine deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0; rank 1 waits for" in page


def test_a_table_that_cannot_be_timed_is_shown_with_its_error_alone():
    page = replace(TABLE, placement=(0, 1, 2, 0))._repr_html_()
    assert "<svg" not in page
    assert "a stage is on one rank: stage 3 is on rank 0, and rank 3 has 3F0" in page


def test_a_name_cannot_write_into_the_notebook():
    page = replace(TABLE, name="<script>alert(1)</script>")._repr_html_()
    assert "<script" not in page
    assert "<script" not in replace(CIRCLE, name="<script>")._repr_html_()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "drawn"), [(16, 64, "svg"), (128, 2, "svg"), (129, 2, "text"), (64, MAX_ACTIONS // 100, "line")]
)
@pytest.mark.costly
def test_it_is_small_however_large_the_table_is(ranks, microbatches, drawn):
    page = build("1f1b", ranks, microbatches)._repr_html_()
    assert len(page.encode()) <= MAX_BYTES
    assert ("<svg" in page, page.count("\n") > ranks // 4) == {
        "svg": (True, True),
        "text": (False, True),
        "line": (False, False),
    }[drawn]
    if drawn == "svg":
        assert all(color in page for color in (KIND_COLORS["F"], KIND_COLORS["B"]))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_the_example_of_a_notebook_runs_and_shows_its_pictures(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, startup_timeout=1000, resources=resources).execute()
    shown = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result" and "text/html" in output.data
    ]
    schedule, cycle, planned, step = shown
    assert all("<svg" in page for page in shown)
    assert "stops before" in cycle
    assert "time (" in step
    assert "time (" not in planned + schedule
