"""Timelines as one HTML file that needs nothing else: no network, no other file."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from penstock.view.data.sums import is_huge, sums_data
from penstock.view.data.timeline import Data
from penstock.view.record import Record

SCRIPTS = (  # of `page/`, in the order they build on each other
    "element.js",
    *("data/timeline.js", "data/record.js", "data/words.js"),  # what is shown
    *("chart/colors.js", "chart/strip.js", "chart/rows.js", "chart/lanes.js", "chart/memory.js"),  # the canvas
    *("chart/labels.js", "chart/path.js", "chart/marks.js", "chart/overview.js", "chart/chart.js"),
    *("reading/figures.js", "reading/tables.js", "reading/selection.js", "reading/tooltips.js"),  # words and numbers around it
    *("asking/replay.js", "asking/whatif.js", "asking/find.js"),  # questions
    *("tools.js", "input.js", "page.js"),  # what a person does, and what holds all of it together
)


def page(records: Sequence[Record], embed: bool = False) -> str:
    """The page that shows one record, or several one above the other on one time axis.

    With `embed` it is the chart alone, to stand in the frame of another page, whose theme it takes.

    What is inside is all that the page may use: its content security policy allows only its own script and style.
    """
    script, style = "\n".join(map(_part, SCRIPTS)), _part("page.css")
    data = json.dumps([_data(record) for record in records], separators=(",", ":"))
    return Template(_part("page.html")).substitute(
        title=html.escape(" and ".join(record.name for record in records)),
        style=style,
        embed=' class="embed"' if embed else "",
        style_hash=_allowed(style),
        script=script,
        script_hash=_allowed(script),
        records=data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )


def _data(record: Record) -> Data:
    """The record as JSON; of a huge step, which no page could show action by action, the sums."""
    if not is_huge(record.usual):
        return packed(record.data())
    step = {"label": record.label, "timeline": sums_data(record.usual)}
    return {"name": record.name, "unit": record.unit, "planned": None, "steps": [step], "usual": 0, "verdict": None}


def packed(record: Data) -> Data:
    """A record as JSON, the events of each rank as columns: half the text, and read as much faster."""
    planned, verdict = record["planned"], record["verdict"]
    return record | {
        "planned": planned and _packed(planned),
        "steps": [step | {"timeline": _packed(step["timeline"])} for step in record["steps"]],
        "verdict": verdict
        and verdict | {"findings": [each | {"timeline": _packed(each["timeline"])} for each in verdict["findings"]]},
    }


def _packed(timeline: Data) -> Data:
    return timeline | {"ranks": [row | {"events": _columns(row["events"])} for row in timeline["ranks"]]}


def _columns(events: list[Data]) -> Data:
    """One text or list for each thing that events have; messages, of all events in a row, and how many each event received."""
    receives = [event.get("receives", []) for event in events]
    froms = [[message["action"] for message in each] for each in receives]
    return {
        "actions": " ".join(event["action"] for event in events),
        **{what: [event[what] for event in events] for what in ("start", "end", "held")},
        "sent": [event.get("sent") for event in events] if any("sent" in event for event in events) else [],
        "waited": [event.get("waited", 0) for event in events],
        "waited_for": [
            each.index(event["waited_for"]) if "waited_for" in event else -1 for event, each in zip(events, froms, strict=True)
        ],
        "messages": [len(each) for each in receives],
        "from": " ".join(name for each in froms for name in each),
        "arrived": [message["arrived"] for each in receives for message in each],
    }


def _part(name: str) -> str:
    return (files("penstock.view") / "page" / name).read_text(encoding="utf-8")


def _allowed(text: str) -> str:
    """How a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
