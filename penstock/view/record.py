"""Hold the timelines of a run's steps, or of a schedule, and save them. Every picture is drawn from a record."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path

from penstock.schedule import Explanation, Improvement, MeasuredTimeline, Measurement, ScheduleError, Timeline
from penstock.view.data.timeline_data import Data, timeline_data, verdict_data

FORMAT = "penstock timeline 1"
TIMELINE_FILE = "timeline.json"  # in the folder of a run


@dataclass(frozen=True)
class Record:
    """The timelines of one or several steps in order, and a predicted timeline to compare them with."""

    steps: tuple[Timeline, ...]
    predicted: Timeline | None = None
    unit: str = ""  # of time: "s", or "" for the unit of the costs
    labels: tuple[str, ...] = ()  # the names of the steps
    layers: tuple[float, ...] = ()  # share of the model on each stage; empty if equal
    findings: tuple[Improvement, ...] = ()  # what a trace shows of the usual step besides its timeline

    @property
    def name(self) -> str:
        """Return the name of the timelines."""
        return self.steps[-1].name

    @property
    def label(self) -> str:
        """Return the label of the usual step."""
        return self._labels()[self._usual]

    @property
    def usual(self) -> Timeline:
        """Return the step of median length, which is drawn and explained."""
        return self.steps[self._usual]

    @cached_property
    def _usual(self) -> int:
        return sorted(range(len(self.steps)), key=lambda index: self.steps[index].makespan)[len(self.steps) // 2]

    @cached_property
    def explanation(self) -> Explanation | None:
        """Explain the usual step with the costs of all steps; None if it was not measured, or did not train."""
        if self.unit != "s" or not isinstance(self.usual, MeasuredTimeline):
            return None
        try:
            explanation = self.usual.explain(Measurement.from_timelines(*self.steps, layers=self.layers))
            return replace(explanation, findings=self.findings)
        except ScheduleError:
            return None

    def _labels(self) -> tuple[str, ...]:
        return self.labels or tuple(f"step {number}" for number in range(1, len(self.steps) + 1))

    def data(self) -> Data:
        """Return the record as JSON data, in the form that the docstring of `data/` describes."""
        return {
            "format": FORMAT,
            "name": self.name,
            "unit": self.unit,
            "layers": self.layers,
            "predicted": None if self.predicted is None else timeline_data(self.predicted),
            "steps": [
                {"label": label, "timeline": timeline_data(step)}
                for label, step in zip(self._labels(), self.steps, strict=True)
            ],
            "usual": self._usual,
            "verdict": None if self.explanation is None else verdict_data(self.explanation),
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record to the JSON file `path`."""
        Path(path).write_text(json.dumps(self.data(), separators=(",", ":")) + "\n", encoding="utf-8")


def save(
    timeline: Timeline | Sequence[Timeline],
    predicted: Timeline | None,
    path: str | PathLike[str],
    labels: Sequence[str] = (),
    layers: Sequence[float] = (),
) -> None:
    """Write the measured timelines of one or several steps, in seconds, to the JSON file `path`.

    `predicted`: a timeline in seconds to compare them with. `labels`: names of the steps. `layers`: the share of the model on
    each stage, if they differ.
    """
    steps = (timeline,) if isinstance(timeline, Timeline) else tuple(timeline)
    Record(steps, predicted, "s", tuple(labels), tuple(layers)).save(path)
