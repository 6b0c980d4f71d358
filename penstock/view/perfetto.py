"""A timeline as the JSON that Perfetto (ui.perfetto.dev) and Chrome's trace viewer open.

A process for each rank, and in it a track for its actions (a second one for those that overlap), one for why it was idle,
one or more for the messages it was sent (from when they were made to when they were there, as far as is known) and a counter
for its memory, in bytes where that was measured; before a measured step lies the time since the one before. An arrow leads
from each action that sends to the one that receives. The planned timeline, if there is one, has processes of its own. A unit
of time that is no second is shown as a millisecond.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from penstock.view.data.timeline import Data
from penstock.view.record import Record

ACTIONS, OVERLAPPED, IDLE, MESSAGES = 1, 2, 3, 4  # the tracks of a process; further messages that overlap have 5, 6, ..
TRACK_NAMES = {ACTIONS: "actions", OVERLAPPED: "actions, overlapped", IDLE: "idle", MESSAGES: "messages"}
TRACKS = 1000  # of a process: no two of a trace share a number
NAMES = {"F": "forward", "B": "backward", "I": "backward to the input", "W": "backward to the weights"}


def trace(record: Record) -> str:
    """The trace of `record`: each step a while after the one before, the same text for the same record."""
    data = record.data()
    scale = 1e6 if record.unit == "s" else 1e3  # to microseconds
    ranks = max(step.ranks for step in record.steps)
    events: list[Data] = []
    arrows = count(1)  # their ids: Perfetto takes integers alone
    begin = 0.0
    for step in data["steps"]:
        begin += max(step["timeline"]["between"], default=0.0)
        label = f"{record.name}, {step['label']}" if len(data["steps"]) > 1 else record.name
        events += _Writer(step["timeline"], label, "rank", 1, begin, scale, arrows).events()
        begin += 1.1 * step["timeline"]["makespan"]
    if data["planned"] is not None:
        name = f"{record.name}, planned"
        events += _Writer(data["planned"], name, "planned, rank", 1 + ranks, 0.0, scale, arrows).events()
    names = {json.dumps(event, sort_keys=True): event for event in events if event["ph"] == "M"}
    named = [*names.values(), *(event for event in events if event["ph"] != "M")]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": named}, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class _Writer:
    """One timeline, whose ranks are the processes from `first` on; it begins at the time `begin`."""

    timeline: Data
    name: str
    process: str
    first: int
    begin: float
    scale: float
    arrows: Iterator[int]

    def events(self) -> Iterator[Data]:
        """All of it, rank by rank."""
        event_of_action = {event["action"]: event for row in self.timeline["ranks"] for event in row["events"]}
        on: dict[str, int] = {}  # action -> its track
        for row in self.timeline["ranks"]:
            lanes = _lanes((event["start"], event["end"]) for event in row["events"])
            on |= {event["action"]: (ACTIONS, OVERLAPPED)[lane] for lane, event in zip(lanes, row["events"], strict=True)}
        counts = self.timeline["memory_unit"] or "activations"
        for rank, row in enumerate(self.timeline["ranks"]):
            yield from self._names(rank, {on[event["action"]] for event in row["events"]})
            for event in row["events"]:
                arguments = {"kind": _kind(event), "timeline": self.name, "waited for": event.get("waited_for", "")}
                arguments[f"{counts} held"] = event["held"]
                yield self._slice(rank, on[event["action"]], event["action"], event["start"], event["end"], arguments)
            for time in self.timeline["between"][rank : rank + 1]:
                if time:
                    yield self._slice(rank, IDLE, "between steps", -time, 0)
            for start, end, cause in row["idle"]:
                yield self._slice(rank, IDLE, f"idle by {cause}", start, end)
            for time, memory in row["memory"]:
                counter = {"ph": "C", "pid": self.first + rank, "name": "memory", "ts": self._at(time)}
                yield {**counter, "args": {counts: memory}}
            messages = [(message, event) for event in row["events"] for message in event.get("receives", ())]
            yield from self._messages(rank, [(event_of_action[message["action"]], message) for message, _ in messages])
            for message, event in messages:
                tracks = self._on(message["rank"], on[message["action"]]), self._on(rank, on[event["action"]])
                yield from self._arrow(event_of_action[message["action"]], event, *tracks)

    def _names(self, rank: int, tracks: set[int]) -> Iterator[Data]:
        pid = self.first + rank
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{self.process} {rank}"}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for track in sorted(tracks | {ACTIONS, IDLE, MESSAGES}):
            yield {"ph": "M", **self._on(rank, track), "name": "thread_name", "args": {"name": TRACK_NAMES[track]}}

    def _messages(self, rank: int, messages: list[tuple[Data, Data]]) -> Iterator[Data]:
        """The messages in the order they were made, each on the first track that is free."""
        spans = sorted(
            (source["end"], max(source["end"], message["arrived"]), f"{message['action']} from rank {message['rank']}")
            for source, message in messages
        )
        for lane, (start, end, text) in zip(_lanes((start, end) for start, end, _ in spans), spans, strict=True):
            if lane:
                yield {"ph": "M", **self._on(rank, MESSAGES + lane), "name": "thread_name", "args": {"name": "messages"}}
            yield self._slice(rank, MESSAGES + lane, text, start, end)

    def _arrow(self, source: Data, taker: Data, begin: Data, end: Data) -> Iterator[Data]:
        """From the action that made a message to the one that needed it: an end belongs to the slice of its track then."""
        flow = {"cat": "message", "name": source["action"], "id": next(self.arrows)}
        middle = self._at((source["start"] + source["end"]) / 2)
        yield {"ph": "s", **begin, "ts": middle, **flow}
        yield {"ph": "f", "bp": "e", **end, "ts": max(middle, self._at(taker["start"])), **flow}

    def _slice(self, rank: int, track: int, text: str, start: float, end: float, args: Data | None = None) -> Data:
        begin = self._at(start)
        duration = round(self._at(end) - begin, 3)
        return {"ph": "X", **self._on(rank, track), "name": text, "ts": begin, "dur": duration, "args": args or {}}

    def _on(self, rank: int, track: int) -> Data:
        return {"pid": self.first + rank, "tid": TRACKS * (self.first + rank) + track}

    def _at(self, time: float) -> float:
        return round((self.begin + time) * self.scale, 3)


def _lanes(spans: Iterable[tuple[float, float]]) -> Iterator[int]:
    """For each span from start to end, in order of their starts, the first of the lanes 0, 1, .. that is free."""
    free: list[float] = []
    for start, end in spans:
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        yield lane


def _kind(event: Data) -> str:
    return next(name for letter, name in NAMES.items() if letter in event["action"])
