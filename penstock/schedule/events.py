"""Events and timelines: one record for what was planned and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.actions import Action, Kind, dependencies


class Event(NamedTuple):
    """One action of one rank, from `start` to `end` in the time unit of its timeline."""

    rank: int
    action: Action
    start: float
    end: float


def peaks_in_flight(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """For every rank, the most (stage, microbatch) activations held at once: F takes one up, B or W lets it go."""
    return tuple(map(_peak_in_flight, rows))


def _peak_in_flight(row: Sequence[Action]) -> int:
    held = peak = 0
    for action in row:
        if action.kind is Kind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind is not Kind.I:
            held -= 1
    return peak


@dataclass(frozen=True)
class Timeline:
    """When every action of one step ran, or would run.

    Times are in the unit of the costs given to `simulate`, in seconds when measured. `work`, in both bubbles, is the busy
    time of the busiest rank: M T when all stages cost the same.
    """

    name: str
    rows: tuple[tuple[Event, ...], ...]  # rank -> its events, in order
    send: float = 0.0  # what an edge between two ranks costs

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events, rank by rank, each rank's in the order it ran them."""
        return tuple(event for row in self.rows for event in row)

    @property
    def ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.rows)

    @cached_property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min((row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Last end - first start over all ranks: the time of a step that ends in an ordinary optimizer step."""
        return max((row[-1].end for row in self.rows if row), default=0.0) - self.start

    @cached_property
    def span(self) -> float:
        """The longest (last end - first start) of any one rank: what the zero-bubble papers report."""
        return max((row[-1].end - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For every rank, the time it spent in actions."""
        return tuple(sum(event.end - event.start for event in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The idle share of the makespan: (makespan - work) / makespan."""
        return _idle_share(self.makespan, max(self.busy, default=0.0))

    @property
    def bubble_by_span(self) -> float:
        """The idle share of the span: (span - work) / span."""
        return _idle_share(self.span, max(self.busy, default=0.0))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For every rank, the most (stage, microbatch) activations in flight at once."""
        return peaks_in_flight([[event.action for event in row] for row in self.rows])

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events, first to last, that made the step as long as it was: each is what the next waited for."""
        if not self.events:
            return ()
        at = {event.action: event for event in self.events}
        before = {later.action: event for row in self.rows for event, later in pairwise(row)}
        stages = 1 + max(action.stage for action in at)
        event = max(self.events, key=lambda event: event.end)
        path = [event]
        while causes := self._causes(event, at, before, stages):
            event = max(causes, key=lambda cause: cause[:2])[2]
            path.append(event)
        return tuple(reversed(path))

    def _causes(
        self, event: Event, at: dict[Action, Event], before: dict[Action, Event], stages: int
    ) -> list[tuple[float, bool, Event]]:
        """What `event` could not start before, each with the time it allowed the start; on a tie the own rank's last."""
        causes = [(before[event.action].end, True, before[event.action])] if event.action in before else []
        for alternatives in dependencies(event.action, stages):
            for dependency in filter(None, map(at.get, alternatives)):
                here = dependency.rank == event.rank
                causes.append((dependency.end + (0.0 if here else self.send), here, dependency))
        return causes


def _idle_share(time: float, work: float) -> float:
    return (time - work) / time if time else 0.0
