"""Write timelines as one HTML file, which needs no network and no other file."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from penstock.view.data.sums import is_huge, sums_data
from penstock.view.data.timeline_data import Data
from penstock.view.record import Record

SCRIPTS = (  # of `page/`; later ones use earlier ones
    "element.js",
    *("data/timeline.js", "data/record.js", "data/format.js"),  # data
    *("chart/colors.js", "chart/dense_lanes.js", "chart/rows.js", "chart/lanes.js", "chart/memory.js"),  # the canvas
    *("chart/labels.js", "chart/critical_path.js", "chart/highlights.js", "chart/overview.js", "chart/chart.js"),
    *("panels/figures.js", "panels/tables.js", "panels/selection.js", "panels/tooltips.js"),  # texts and numbers
    *("query/replay.js", "query/what_if.js", "query/find.js"),  # questions
    *("toolbar.js", "input.js", "page.js"),  # controls, and the page
)


def page(records: Sequence[Record], embed: bool = False) -> str:
    """Return a page with the charts of the records, one above the other on one time axis.

    `embed`: return only the chart, for a frame in another page, whose theme it takes. The content security policy allows only
    the script and style inside the page.
    """
    script, style = "\n".join(map(_read_page_file, SCRIPTS)), _read_page_file("page.css")
    data = json.dumps([_data(record) for record in records], separators=(",", ":"))
    return Template(_read_page_file("page.html")).substitute(
        title=html.escape(" and ".join(record.name for record in records)),
        style=style,
        embed=' class="embed"' if embed else "",
        style_hash=_csp_hash(style),
        script=script,
        script_hash=_csp_hash(script),
        records=data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )


def _data(record: Record) -> Data:
    """Return the record as JSON data, with sums if the step has too many actions."""
    if not is_huge(record.usual):
        return with_event_columns(record.data())
    step = {"label": record.label, "timeline": sums_data(record.usual)}
    return {"name": record.name, "unit": record.unit, "predicted": None, "steps": [step], "usual": 0, "verdict": None}


def with_event_columns(record: Data) -> Data:
    """Return a record's data with the events of each rank as columns, which is half as long and faster to parse."""
    predicted, verdict = record["predicted"], record["verdict"]
    return record | {
        "predicted": predicted and _columnar(predicted),
        "steps": [step | {"timeline": _columnar(step["timeline"])} for step in record["steps"]],
        "verdict": verdict
        and verdict | {"findings": [finding | {"timeline": _columnar(finding["timeline"])} for finding in verdict["findings"]]},
    }


def _columnar(timeline: Data) -> Data:
    return timeline | {"ranks": [row | {"events": _columns(row["events"])} for row in timeline["ranks"]]}


def _columns(events: list[Data]) -> Data:
    """Return the events as columns; the messages of all events in one list, and their number for each event."""
    receives = [event.get("receives", []) for event in events]
    senders = [[message["action"] for message in messages] for messages in receives]
    return {
        "actions": " ".join(event["action"] for event in events),
        **{field: [event[field] for event in events] for field in ("start", "end", "held")},
        "sent": [event.get("sent") for event in events] if any("sent" in event for event in events) else [],
        "waited": [event.get("waited", 0) for event in events],
        "waited_for": [
            names.index(event["waited_for"]) if "waited_for" in event else -1
            for event, names in zip(events, senders, strict=True)
        ],
        "messages": [len(messages) for messages in receives],
        "from": " ".join(name for names in senders for name in names),
        "arrived": [message["arrived"] for messages in receives for message in messages],
    }


def _read_page_file(name: str) -> str:
    return (files("penstock.view") / "page" / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash that allows an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
