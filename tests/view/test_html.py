"""The page: what is in the file."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from timelines import COSTS, measured, two_ranks

from penstock.schedule import Costs, Timeline, build, simulate
from penstock.view.data import sums
from penstock.view.html import page, with_event_columns
from penstock.view.record import Record

EMPTY = {"meta", "link"}  # elements without an end


class Outline(HTMLParser):
    """Elements in order; checks that they close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.texts = [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def unpacked(data):
    """What a page says of a record, its columns of events one by one again."""
    if isinstance(data, list):
        return [unpacked(batch) for batch in data]
    if not isinstance(data, dict):
        return data
    if "ranks" not in data:
        return {name: unpacked(value) for name, value in data.items()}
    homes = {name: rank for rank, row in enumerate(data["ranks"]) for name in row["events"]["actions"].split()}
    return data | {"ranks": [row | {"events": list(events_of(row["events"], homes))} for row in data["ranks"]]}


def events_of(columns, homes):
    came = zip(columns["from"].split(), columns["arrived"], strict=True)
    for place, action in enumerate(columns["actions"].split()):
        event = {"action": action, **{what: columns[what][place] for what in ("start", "end", "held")}}
        receives = [next(came) for _ in range(columns["messages"][place])]
        if columns["sent"] and columns["sent"][place] is not None:
            event["sent"] = columns["sent"][place]
        if columns["waited"][place]:
            event["waited"] = columns["waited"][place]
        if columns["waited_for"][place] >= 0:
            event["waited_for"] = receives[columns["waited_for"][place]][0]
        if receives:
            event["receives"] = [{"action": name, "rank": homes[name], "arrived": when} for name, when in receives]
        yield event


def test_the_page_is_one_well_formed_file_that_points_nowhere():
    text = page([Record((two_ranks(),))])
    outline = Outline(text)
    assert [tag for tag, _ in outline.seen][:2] == ["html", "head"]
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|\beval\(|innerHTML", text)
    for tag, attributes in outline.seen:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,", tag


def test_its_policy_allows_its_own_script_and_style_and_nothing_else():
    outline = Outline(page([Record((two_ranks(),))]))
    policy = next(attributes["content"] for _, attributes in outline.seen if "http-equiv" in attributes)
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    script, style = outline.texts["script"][-1], outline.texts["style"][0]
    for directive, text in (("script-src", script), ("style-src", style)):
        assert allowed[directive] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert (allowed["default-src"], allowed["img-src"]) == ("'none'", "data:")


def test_the_records_are_in_it_whole_and_cannot_break_out():
    timeline = two_ranks()
    name = "</script><script>alert(1)</script><!--&"
    record = Record((Timeline(name, timeline.rows, timeline.message_costs),), labels=("<b>\u2028",))
    text = page([record])
    outline = Outline(text)
    assert text.count("<script") == 2
    assert unpacked(json.loads(outline.texts["script"][0])) == json.loads(json.dumps([record.data()]))
    assert "".join(outline.texts["h1"]) == name


def test_columns_of_events_say_what_the_events_say():
    for name in ("1f1b", "zb-v", "dualpipe-v"):
        step = measured(build(name, ranks=4, microbatches=8), 1)
        sent = replace(
            step,
            rows=tuple(
                tuple(event._replace(sent=event.end + 1e-4) if event.action.microbatch % 2 else event for event in row)
                for row in step.rows
            ),
        )
        for timeline in (step, sent):
            data = json.loads(json.dumps(Record((timeline,), None, "s").data()))
            assert unpacked(json.loads(json.dumps(with_event_columns(data)))) == data


def test_the_same_records_make_the_same_text():
    schedule = build("1f1b", ranks=4, microbatches=8)
    made = [page([Record((measured(schedule, 1),), simulate(schedule, COSTS), "s")]) for _ in range(2)]
    assert made[0] == made[1]


def test_a_huge_step_is_there_as_sums_that_add_up(monkeypatch):
    monkeypatch.setattr(sums, "MAX_PAGE_ACTIONS", 10)
    timeline = simulate(build("dualpipe-v", 2, 6), Costs(1, 1, 2, send=0.5))
    [record] = json.loads(Outline(page([Record((timeline,))])).texts["script"][0])
    data = record["steps"][0]["timeline"]
    assert data["counts"]["actions"] == len(timeline.events)
    assert sum(data["kinds"].values()) == pytest.approx(1 - timeline.idle_share, abs=1e-3)
    for row, busy in zip(data["ranks"], timeline.busy, strict=True):
        parts = row["sums"]["parts"]
        assert sum(sum(parts.get(kind, ())) for kind in "FBIW") / sums.NUM_BINS == pytest.approx(
            busy / timeline.makespan, abs=1e-3
        )
        assert [sum(slices) for slices in zip(*parts.values(), strict=True)] == pytest.approx([1] * sums.NUM_BINS, abs=4e-3)


def test_a_page_for_a_frame_is_the_chart_alone():
    bodies = [attributes for tag, attributes in Outline(page([Record((two_ranks(),))], embed=True)).seen if tag == "body"]
    assert bodies == [{"class": "embed"}]
