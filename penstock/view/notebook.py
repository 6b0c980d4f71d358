"""What a notebook shows of a schedule, a timeline or a plan: a picture and its numbers, at most 200 kB of HTML.

The picture has a white ground of its own, so it is legible in dark themes too. The text has the notebook's colours.
"""

from html import escape

from penstock.errors import PenstockError, ScheduleError
from penstock.plan.result import Plan
from penstock.schedule.proof import verify
from penstock.schedule.table import Table
from penstock.timing.costs import Costs
from penstock.timing.simulate import simulate_until_deadlock
from penstock.timing.timeline import Timeline
from penstock.view.figure.deadlock import deadlock_figure
from penstock.view.figure.shapes import Figure
from penstock.view.figure.svg import compact_svg, svg
from penstock.view.figure.timeline_figure import figure
from penstock.view.record import Record
from penstock.view.terminal import draw, summary

MAX_BYTES = 200_000
MAX_ACTIONS = 100_000  # of more, only numbers are shown: a picture would take many seconds
TEXT_COLUMNS, MAX_TEXT_LENGTH = 100, 20_000


def schedule_html(schedule: Table) -> str:
    """Return the picture of `schedule`; every forward takes the same time, every backward twice that.

    A table that `verify` refuses is shown with its error, and drawn until where each rank stops, if it can be timed.
    """
    if sum(map(len, schedule.actions)) > MAX_ACTIONS:
        return _text_html(repr(schedule))
    costs = Costs(1, 1, 1)
    try:
        verify(schedule)
    except ScheduleError as error:
        return _refused_table_html(schedule, costs, f"{repr(schedule)[1:-1]}\n{error}")
    timeline = simulate_until_deadlock(schedule, costs)
    return _html(timeline, f"{repr(schedule)[1:-1]}, bubble {timeline.bubble:.1%} if all stages take equally long")


def timeline_html(timeline: Timeline) -> str:
    """Return the picture of `timeline` with its numbers."""
    if len(timeline.events) > MAX_ACTIONS:
        return _text_html(repr(timeline))
    return _html(timeline, summary(timeline, timeline.time_unit))


def plan_html(plan: Plan) -> str:
    """Return the picture of the planned step with the lines of the plan."""
    if sum(map(len, plan.schedule.actions)) > MAX_ACTIONS:
        return _text_html(str(plan))
    return _html(plan.timeline, str(plan), unit="s")


def _refused_table_html(schedule: Table, costs: Costs, text: str) -> str:
    """Return the picture of what runs of a wrong table, with a mark where each rank stops, and `text`."""
    try:
        timeline = simulate_until_deadlock(schedule, costs)
        return _picture_html(deadlock_figure(schedule, timeline), timeline, text)
    except PenstockError:  # an action of no stage, for instance
        return _text_html(text)


def _html(timeline: Timeline, text: str, unit: str = "") -> str:
    """Return the picture of `timeline` over `text`."""
    try:
        drawn = figure(Record((timeline,), unit=unit or timeline.time_unit))
    except PenstockError:  # more ranks than a figure has room for
        return _text_html(f"{draw(timeline, TEXT_COLUMNS)}\n{text}")
    return _picture_html(drawn, timeline, text)


def _picture_html(drawn: Figure, timeline: Timeline, text: str) -> str:
    """Return `drawn` over `text`, without hatches if it is too large for a notebook, or as text if it still is."""
    for write in (svg, compact_svg):
        page = f'<div style="overflow-x:auto">{write(drawn)}</div>{_text_html(text)}'
        if len(page.encode()) <= MAX_BYTES:
            return page
    return _text_html(f"{draw(timeline, TEXT_COLUMNS)}\n{text}")


def _text_html(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}.."
    return f'<pre style="white-space:pre-wrap">{escape(shown)}</pre>'
