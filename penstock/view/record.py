"""The record: the timelines of a run's steps, or of a schedule, as `data/` has them; everything that draws takes one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

from penstock.schedule import Explanation, MeasuredTimeline, Measurement, ScheduleError, Timeline
from penstock.view.data.timeline import Data, timeline_data, verdict_data

FORMAT = "penstock timeline 1"
FILE = "timeline.json"  # its name in the folder of a run


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
            return self.usual.explain(Measurement.from_timelines(*self.steps, layers=self.layers))
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
