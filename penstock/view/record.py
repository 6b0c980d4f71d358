"""A timeline as plain data: the one form that is kept in a file and that every picture is drawn from.

    {"format": "penstock timeline 1", "name": "1f1b", "unit": "s", "layers": [],
     "planned": TIMELINE or null, "steps": [{"label": "step 7", "timeline": TIMELINE}, ..], "usual": 0,
     "verdict": null or {"text": "rank 1 is slow: ..", "findings": [{"about": "straggler", "text": "rank 1 is slow: ..",
                 "gain": 0.1, "rank": 1, "name": "1f1b, predicted", "timeline": TIMELINE}, ..]}}

A TIMELINE counts from its first start, and says of every rank what it ran, why it was idle and what it held:

    {"makespan": 9, "bubble": 0.33, ..., "critical_path": ["0F0", ..],
     "ranks": [{"events": [{"action": "1F0", "start": 1, "end": 2, "held": 1, "waited": 1, "waited_for": "0F0",
                            "receives": [{"action": "0F0", "rank": 0, "arrived": 1}]}, ..],
                "idle": [[0, 1, "fill"], ..], "memory": [[1, 1], ..]}, ..]}

`usual` is the place of the step that stands for all, the middle one by its length. `waited` is how long the rank was idle
before the event, `waited_for` what came last of what it needed from other ranks, `held` what its activations take once it
has ended, in `memory_unit`: "bytes", or "" for activations. Measured events say when what they made was `sent`; `between`
is how long each rank was out of the pipeline before the step. What follows from the events is worked out again when a file
is read, and so is the verdict on a run: what would make its steps shorter.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Action, Border, Event, Explanation, MeasuredTimeline, Measurement, ScheduleError, Size, Timeline
from penstock.schedule.table import dependencies
from penstock.view.messages import Message, messages, waits

FORMAT = "penstock timeline 1"
LARGEST = 2**28  # bytes of a file
MOST_WORDS = 300  # characters of what is wrong with one
FILE = "timeline.json"  # its name in the folder of a run
Data = dict[str, Any]  # what JSON can say


@dataclass(frozen=True)
class Record:
    """The timelines of one or several steps, in order, and the planned one to hold beside them, if there is one."""

    steps: tuple[Timeline, ...]
    planned: Timeline | None = None
    unit: str = ""  # of time: "s", or "" where it is whatever the costs were in
    labels: tuple[str, ...] = ()  # what each step is called
    layers: tuple[float, ...] = ()  # how much of the model each stage has; empty: the same

    @property
    def name(self) -> str:
        """What was drawn: the name of its timelines."""
        return self.steps[-1].name

    @property
    def label(self) -> str:
        """What the usual step is called."""
        return self._labels()[self._usual]

    @property
    def usual(self) -> Timeline:
        """The step that stands for all, the middle one by its length: it is drawn, told and explained."""
        return self.steps[self._usual]

    @cached_property
    def _usual(self) -> int:
        return sorted(range(len(self.steps)), key=lambda place: self.steps[place].makespan)[len(self.steps) // 2]

    @cached_property
    def explanation(self) -> Explanation | None:
        """The usual step of a run, explained at the costs of all its steps; None for what was not measured, or not trained."""
        if self.unit != "s" or not isinstance(self.usual, MeasuredTimeline):
            return None
        try:
            return self.usual.explain(Measurement.of(*self.steps, layers=self.layers))
        except ScheduleError:
            return None

    def _labels(self) -> tuple[str, ...]:
        return self.labels or tuple(f"step {number}" for number in range(1, len(self.steps) + 1))

    def data(self) -> Data:
        """The record as JSON, in the form that this module's docstring describes."""
        return {
            "format": FORMAT,
            "name": self.name,
            "unit": self.unit,
            "layers": self.layers,
            "planned": None if self.planned is None else timeline_data(self.planned),
            "steps": [
                {"label": label, "timeline": timeline_data(step)}
                for label, step in zip(self._labels(), self.steps, strict=True)
            ],
            "usual": self._usual,
            "verdict": None if self.explanation is None else verdict_data(self.explanation),
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to the JSON file at `path`."""
        Path(path).write_text(json.dumps(self.data(), separators=(",", ":")) + "\n", encoding="utf-8")


def save(
    timeline: Timeline | Sequence[Timeline],
    planned: Timeline | None,
    path: str | PathLike[str],
    labels: Sequence[str] = (),
    layers: Sequence[float] = (),
) -> None:
    """Write measured timelines, in seconds, of one step or of several, to the JSON file at `path`.

    `planned`, in seconds as well, is what they are held against; `labels` are what the steps are called, `layers` how much
    of the model each stage has, if they differ.
    """
    steps = (timeline,) if isinstance(timeline, Timeline) else tuple(timeline)
    Record(steps, planned, "s", tuple(labels), tuple(layers)).save(path)


def load(path: str | PathLike[str]) -> Record:
    """Read what `save` wrote, from the file or from the folder of its run.

    Raises PenstockError if there is no such file, or it is none of Penstock's timelines.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PenstockError(f"{path} has no timeline: there is no file {file}")
    with file.open("rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise PenstockError(f"{file} has more than {LARGEST:,} bytes, the most that a timeline may have")
    return read(data, str(file))


def read(text: str | bytes, file: str) -> Record:
    """The record that is written as `text`. Raises PenstockError, about the `file` it came from, if it is none."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        if data.get("format") != FORMAT:
            raise ValueError(_other_format(data))
        name, planned = str(data["name"]), data["planned"]
        steps = tuple(_timeline(name, step["timeline"]) for step in data["steps"])
        if not steps:
            raise ValueError("it has no steps")
        labels = tuple(str(step["label"]) for step in data["steps"])
        layers = tuple(map(float, data.get("layers", ())))
        return Record(steps, None if planned is None else _timeline(name, planned), str(data["unit"]), labels, layers)
    except RecursionError as error:
        raise PenstockError(f"{file} is not a timeline that Penstock wrote: it is nested too deeply") from error
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, ScheduleError) as error:
        why = (str(error) if isinstance(error, ValueError) else repr(error))[:MOST_WORDS]
        raise PenstockError(f"{file} is not a timeline that Penstock wrote: {why}") from error


def _other_format(data: Data) -> str:
    if "traceEvents" in data:
        return "it is a trace, for ui.perfetto.dev; what Penstock reads is the timeline.json of a run"
    return f"its format is {data.get('format')!r}, not {FORMAT!r}"


# ---- to JSON


def timeline_data(timeline: Timeline) -> Data:
    """One timeline, counted from its first start, with all that follows from it."""
    received = messages(timeline)
    waited = waits(timeline, received)
    held = {action: held for rank in range(timeline.ranks) for action, held in timeline.held_after(rank)}
    return {
        "makespan": _since(timeline, timeline.end),
        "span": timeline.span,
        "idle_share": timeline.idle_share,
        "bubble": timeline.bubble,
        "bubble_by_span": timeline.bubble_by_span,
        "busy": timeline.busy,
        "causes": {str(cause): share for cause, share in timeline.causes.items()},
        "peak_in_flight": timeline.peak_in_flight,
        "peak_memory": timeline.peak_memory,
        "critical_path": [str(event.action) for event in timeline.critical_path],
        "overlaps": sorted([str(action) for action in pair] for pair in timeline.overlaps),
        "borders": timeline.borders,
        "skips": [[*skip, *border] for skip, border in sorted(timeline.skips.items())],
        "sizes": timeline.sizes,
        "memory_unit": timeline.memory_unit,
        "between": [round(time, 9) for time in timeline.between],
        "averaging": [round(time, 9) for time in timeline.averaging],
        "ranks": [
            {
                "events": [_event(timeline, event, held[event.action], received, waited) for event in row],
                "idle": [[_since(timeline, idle.start), _since(timeline, idle.end), str(idle.cause)] for idle in idles],
                "memory": [[_since(timeline, time), held] for time, held in timeline.memory(rank)],
            }
            for rank, (row, idles) in enumerate(zip(timeline.rows, timeline.idle, strict=True))
        ],
    }


def verdict_data(told: Explanation) -> Data:
    """What would make the step shorter, in one line and finding by finding, each with the step as it would be."""
    findings = [
        {"about": each.about, "text": each.text, "gain": each.gain, "rank": each.rank}
        | {"name": each.timeline.name, "timeline": timeline_data(each.timeline)}
        for each in told.verdict
    ]
    return {"text": told.verdict_told, "findings": findings}


def _event(
    timeline: Timeline,
    event: Event,
    held: float,
    received: dict[Action, tuple[Message, ...]],
    waited: dict[Action, tuple[float, Message | None]],
) -> Data:
    data: Data = {"action": str(event.action), "start": _since(timeline, event.start), "end": _since(timeline, event.end)}
    if event.sent is not None:
        data["sent"] = _since(timeline, event.sent)
    data["held"] = held
    if event.action in waited:
        time, last = waited[event.action]
        data["waited"] = round(time, 9)
        if last is not None:
            data["waited_for"] = str(last.source.action)
    if event.action in received:
        data["receives"] = [
            {"action": str(source.action), "rank": source.rank, "arrived": _since(timeline, arrival)}
            for source, _, arrival in received[event.action]
        ]
    return data


def _since(timeline: Timeline, time: float) -> float:
    """To the nanosecond, where the unit is a second; a whole number stays one."""
    since = round(time - timeline.start, 9)
    return int(since) if since == int(since) else since


# ---- from JSON


def _timeline(name: str, data: Data) -> MeasuredTimeline:
    rows = tuple(tuple(_read_event(rank, event) for event in row["events"]) for rank, row in enumerate(data["ranks"]))
    overlaps = frozenset((Action.parse(first), Action.parse(second)) for first, second in data["overlaps"])
    borders = tuple(Border(*map(float, border)) for border in data["borders"])
    skips = {(int(lower), int(upper)): Border(float(time), float(on)) for lower, upper, time, on in data["skips"]}
    sizes = tuple(Size(*map(float, size)) for size in data["sizes"])
    unit = str(data.get("memory_unit", ""))  # this and the next two are not in older files
    between, averaging = (tuple(map(float, data.get(key, ()))) for key in ("between", "averaging"))
    timeline = MeasuredTimeline(name, rows, borders, sizes, overlaps, skips, unit, between, averaging)
    _check(timeline)
    return timeline


def _check(timeline: Timeline) -> None:
    """Raises ValueError for what no step can be: the chains that are followed through its events would not end."""
    homes: dict[int, int] = {}
    needs: dict[Action, set[Action]] = {}
    stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    for event in timeline.events:
        if homes.setdefault(event.action.stage, event.rank) != event.rank:
            raise ValueError(f"stage {event.action.stage} is on rank {homes[event.action.stage]} and on rank {event.rank}")
        if event.action in needs:
            raise ValueError(f"{event.action} is there twice")
        needs[event.action] = {each for one in dependencies(event.action, stages, timeline.skips) for each in one}
    neighbours = [pair for row in timeline.rows for pair in pairwise(row)]
    for before, event in neighbours:
        if event.start < before.start or event.end < before.end:
            raise ValueError(f"rank {event.rank} has {event.action} out of order")
        needs[event.action].add(before.action)
    TopologicalSorter(needs).prepare()  # a CycleError is a ValueError
    for one, other in timeline.overlaps - {(before.action, event.action) for before, event in neighbours}:
        raise ValueError(f"{one} and {other} are no pair, they do not follow each other")
    numbers = chain(*timeline.borders, *timeline.sizes, *timeline.skips.values(), timeline.between, timeline.averaging)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("it has a time or a size that is no finite number")
    if timeline.borders and len(timeline.borders) != stages - 1:
        raise ValueError(f"there are {len(timeline.borders)} borders between {stages} stages")
    if timeline.sizes and len(timeline.sizes) != stages:
        raise ValueError(f"there are {len(timeline.sizes)} sizes for {stages} stages")
    if timeline.memory_unit not in ("", "bytes"):
        raise ValueError(f"its memory is in {timeline.memory_unit!r}, not in bytes")
    for what, times in (("between steps", timeline.between), ("of averaging", timeline.averaging)):
        if times and (len(times) != timeline.ranks or not min(times) >= 0):
            raise ValueError(f"the times {what} are {list(times)} on {timeline.ranks} ranks")
    if any(not 0 <= lower < upper < stages for lower, upper in timeline.skips):
        raise ValueError(f"there is a skip between other than the {stages} stages")


def _read_event(rank: int, data: Data) -> Event:
    start, end = float(data["start"]), float(data["end"])
    if not 0 <= start <= end < float("inf"):
        raise ValueError(f"{data['action']} runs from {start} to {end}")
    sent = float(data["sent"]) if "sent" in data else None
    if sent is not None and not end <= sent < float("inf"):
        raise ValueError(f"{data['action']} ends at {end} and was sent at {sent}")
    return Event(rank, Action.parse(data["action"]), start, end, sent)
