"""Write a timeline as the JSON that Perfetto (ui.perfetto.dev) and Chrome's trace viewer open.

Each rank is a process. Its tracks are: actions (a second one for actions that overlap), idle times with their causes, one or
more for the messages sent to it (from when they were made to when they arrived, as far as is known), and a counter of its
memory, in bytes if that was measured. The time between steps precedes a measured step. An arrow leads from each sender to its
receiver. The predicted timeline, if any, has processes of its own. If the unit of time is not a second, it is shown as a
millisecond.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from penstock.view.data.timeline_data import Data
from penstock.view.record import Record

ACTIONS, OVERLAPPED, IDLE, MESSAGES = 1, 2, 3, 4  # numbers of tracks; messages that overlap use 5, 6, .. too
TRACK_NAMES = {ACTIONS: "actions", OVERLAPPED: "actions, overlapped", IDLE: "idle", MESSAGES: "messages"}
MAX_TRACKS = 1000  # of a process: track numbers are unique in a trace
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward to the input", "W": "backward to the weights"}


def trace(record: Record) -> str:
    """Return the trace of `record`, its steps one after the other with gaps. Equal records give equal texts."""
    data = record.data()
    scale = 1e6 if record.unit == "s" else 1e3  # to microseconds
    ranks = max(step.ranks for step in record.steps)
    events: list[Data] = []
    arrow_ids = count(1)  # Perfetto accepts only integers
    begin = 0.0
    for step in data["steps"]:
        begin += max(step["timeline"]["between"], default=0.0)
        label = f"{record.name}, {step['label']}" if len(data["steps"]) > 1 else record.name
        events += _Writer(step["timeline"], label, "rank", 1, begin, scale, arrow_ids).events()
        begin += 1.1 * step["timeline"]["makespan"]
    if data["predicted"] is not None:
        name = f"{record.name}, predicted"
        events += _Writer(data["predicted"], name, "predicted, rank", 1 + ranks, 0.0, scale, arrow_ids).events()
    metadata = {json.dumps(event, sort_keys=True): event for event in events if event["ph"] == "M"}  # without repetition
    trace_events = [*metadata.values(), *(event for event in events if event["ph"] != "M")]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events}, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class _Writer:
    """Writes one timeline: its ranks as processes from number `first` on, its start at `begin` (in its unit of time)."""

    timeline: Data
    name: str
    process_prefix: str
    first: int
    begin: float
    scale: float
    arrow_ids: Iterator[int]

    def events(self) -> Iterator[Data]:
        """Yield the trace events, rank by rank."""
        event_of_action = {event["action"]: event for row in self.timeline["ranks"] for event in row["events"]}
        tracks: dict[str, int] = {}  # action -> its track
        for row in self.timeline["ranks"]:
            lanes = _lanes((event["start"], event["end"]) for event in row["events"])
            tracks |= {event["action"]: (ACTIONS, OVERLAPPED)[lane] for lane, event in zip(lanes, row["events"], strict=True)}
        counts = self.timeline["memory_unit"] or "activations"
        for rank, row in enumerate(self.timeline["ranks"]):
            yield from self._names(rank, {tracks[event["action"]] for event in row["events"]})
            for event in row["events"]:
                arguments = {"kind": _kind(event), "timeline": self.name, "waited for": event.get("waited_for", "")}
                arguments[f"{counts} held"] = event["held"]
                yield self._slice(rank, tracks[event["action"]], event["action"], event["start"], event["end"], arguments)
            for time in self.timeline["between"][rank : rank + 1]:
                if time:
                    yield self._slice(rank, IDLE, "between steps", -time, 0)
            for start, end, cause in row["idle"]:
                yield self._slice(rank, IDLE, f"idle by {cause}", start, end)
            for time, memory in row["memory"]:
                counter = {"ph": "C", "pid": self.first + rank, "name": "memory", "ts": self._timestamp(time)}
                yield {**counter, "args": {counts: memory}}
            messages = [(message, event) for event in row["events"] for message in event.get("receives", ())]
            yield from self._messages(rank, [(event_of_action[message["action"]], message) for message, _ in messages])
            for message, event in messages:
                sender = self._ids(message["rank"], tracks[message["action"]])
                receiver = self._ids(rank, tracks[event["action"]])
                yield from self._arrow(event_of_action[message["action"]], event, sender, receiver)

    def _names(self, rank: int, tracks: set[int]) -> Iterator[Data]:
        pid = self.first + rank
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{self.process_prefix} {rank}"}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for track in sorted(tracks | {ACTIONS, IDLE, MESSAGES}):
            yield {"ph": "M", **self._ids(rank, track), "name": "thread_name", "args": {"name": TRACK_NAMES[track]}}

    def _messages(self, rank: int, messages: list[tuple[Data, Data]]) -> Iterator[Data]:
        """Yield the messages in the order they were made, each on the first free track."""
        spans = sorted(
            (source["end"], max(source["end"], message["arrived"]), f"{message['action']} from rank {message['rank']}")
            for source, message in messages
        )
        for lane, (start, end, text) in zip(_lanes((start, end) for start, end, _ in spans), spans, strict=True):
            if lane:
                yield {"ph": "M", **self._ids(rank, MESSAGES + lane), "name": "thread_name", "args": {"name": "messages"}}
            yield self._slice(rank, MESSAGES + lane, text, start, end)

    def _arrow(self, source: Data, target: Data, sender: Data, receiver: Data) -> Iterator[Data]:
        """Yield an arrow between two events on their tracks. Perfetto attaches each end to the slice at its time."""
        flow = {"cat": "message", "name": source["action"], "id": next(self.arrow_ids)}
        middle = self._timestamp((source["start"] + source["end"]) / 2)
        yield {"ph": "s", **sender, "ts": middle, **flow}
        yield {"ph": "f", "bp": "e", **receiver, "ts": max(middle, self._timestamp(target["start"])), **flow}

    def _slice(self, rank: int, track: int, text: str, start: float, end: float, args: Data | None = None) -> Data:
        begin = self._timestamp(start)
        duration = round(self._timestamp(end) - begin, 3)
        return {"ph": "X", **self._ids(rank, track), "name": text, "ts": begin, "dur": duration, "args": args or {}}

    def _ids(self, rank: int, track: int) -> Data:
        return {"pid": self.first + rank, "tid": MAX_TRACKS * (self.first + rank) + track}

    def _timestamp(self, time: float) -> float:
        """Return microseconds in the trace."""
        return round((self.begin + time) * self.scale, 3)


def _lanes(spans: Iterable[tuple[float, float]]) -> Iterator[int]:
    """Yield for each (start, end), in order of starts, the first of the lanes 0, 1, .. that is free."""
    free: list[float] = []  # lane -> when it is free
    for start, end in spans:
        lane = next((lane for lane, free_from in enumerate(free) if free_from <= start), len(free))
        free[lane : lane + 1] = [end]
        yield lane


def _kind(event: Data) -> str:
    return next(name for letter, name in KIND_NAMES.items() if letter in event["action"])
