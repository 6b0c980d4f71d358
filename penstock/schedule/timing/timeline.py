"""Events and timelines: one record for what was planned and what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedule.table import Action, Kind, Pair, Skip

if TYPE_CHECKING:
    from penstock.schedule.timing.causes import Cause, Idle
    from penstock.schedule.timing.explanation import Explanation
    from penstock.schedule.timing.measured import Measured


class Event(NamedTuple):
    """One action of one rank, from `start` to `end` in the time unit of its timeline."""

    rank: int
    action: Action
    start: float
    end: float
    sent: float | None = None  # when the rank had handed over what it made, if that was measured


class Border(NamedTuple):
    """What a message costs that passes from one stage to another, or back, where the two live on different ranks."""

    transmission: float = 0.0  # time for which it occupies its channel
    latency: float = 0.0  # time it then travels on, beside others


@dataclass(slots=True)
class Channel:
    """What carries the messages of one rank to another: one at a time, first in, first out."""

    free: float = float("-inf")  # when the last message has left it

    def carry(self, ready: float, border: Border) -> float:
        """When a message over `border` arrives that the rank hands over at the time `ready`."""
        self.free = max(self.free, ready) + border.transmission
        return self.free + border.latency


class Size(NamedTuple):
    """What one activation of a stage takes, in any unit: all of it, and the part that W still needs after I."""

    act: float = 1
    keep: float = 1

    def change(self, kind: Kind) -> float:
        """What an action of `kind` adds to the memory of its rank."""
        if kind is Kind.I:
            return self.keep - self.act
        return self.act if kind is Kind.F else -self.keep if kind is Kind.W else -self.act


def peaks_in_flight(rows: Iterable[Iterable[Action | tuple[Action, ...]]]) -> tuple[int, ...]:
    """For every rank, the most (stage, microbatch) activations held at once: F takes one up, B or W lets it go.

    A place of a row is an action, or a pair of them that overlap: its forward begins before its backward ends.
    """
    return tuple(map(_peak_in_flight, rows))


def _peak_in_flight(row: Iterable[Action | tuple[Action, ...]]) -> int:
    held = peak = 0
    for cell in row:
        kinds = (cell.kind,) if isinstance(cell, Action) else sorted((action.kind for action in cell), key=_frees)
        for kind in kinds:
            held += _RAISES[kind]
            peak = max(peak, held)
    return peak


_RAISES = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}


def _frees(kind: Kind) -> bool:
    return kind is not Kind.F


@dataclass(frozen=True)
class Timeline:
    """When every action of one step ran, or would run.

    Times are in the unit of the costs given to `simulate`, in seconds when measured. Memory is in the unit of `act` and
    `keep`, else in activations; where it was weighed, in bytes. `work`, in both bubbles, is the busy time of the busiest rank:
    M T when all stages cost the same. The actions of an overlapped pair start and end together, and their time counts once.
    """

    name: str
    rows: tuple[tuple[Event, ...], ...]  # rank -> its events, in order
    borders: tuple[Border, ...] = ()  # stage s -> what a message between s and s+1 costs; empty when measured
    sizes: tuple[Size, ...] = ()  # stage -> what its activations take; empty: one each
    overlaps: frozenset[Pair] = frozenset()  # actions that ran as one pair
    skips: Mapping[Skip, Border] = field(default_factory=dict)  # what a message of each skip costs
    memory_unit: str = ""  # "bytes", or "" where it is activations or whatever the sizes were in
    between: tuple[float, ...] = ()  # rank -> time since its step before: optimizer, next batch; empty where not measured
    averaging: tuple[float, ...] = ()  # rank -> time after its last action until gradients were averaged; empty: no replicas

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events, rank by rank, each rank's in the order it ran them."""
        return tuple(event for row in self.rows for event in row)

    @property
    def ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.rows)

    def cells(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """The events of `rank` in order, one at a time or as the two of an overlapped pair."""
        row, firsts = iter(self.rows[rank]), self._begins_pair
        for event in row:
            yield (event, next(row)) if event.action in firsts else (event,)

    @cached_property
    def _begins_pair(self) -> frozenset[Action]:
        return frozenset(first for first, _ in self.overlaps)

    @cached_property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min((row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action of any rank ends."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def makespan(self) -> float:
        """Last end - first start over all ranks: the time of a step that ends in an ordinary optimizer step."""
        return self.end - self.start

    @cached_property
    def span(self) -> float:
        """The longest (last end - first start) of any one rank: what the zero-bubble papers report."""
        return max((row[-1].end - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For every rank, the time it spent in actions; that of a pair counts once."""
        return tuple(map(_busy, self.rows))

    @property
    def bubble(self) -> float:
        """The idle share of the makespan: (makespan - work) / makespan."""
        return _idle_share(self.makespan, max(self.busy, default=0.0))

    @property
    def bubble_by_span(self) -> float:
        """The idle share of the span: (span - work) / span."""
        return _idle_share(self.span, max(self.busy, default=0.0))

    @cached_property
    def idle(self) -> "tuple[tuple[Idle, ...], ...]":
        """For every rank, when it was idle and for which cause, from the first start to the last end of any rank."""
        from penstock.schedule.timing.causes import idle_times

        return idle_times(self)

    @cached_property
    def causes(self) -> "dict[Cause, float]":
        """The share of (ranks x makespan) each cause of idle time took: with the busy share they add up to 1.

        The causes are `fill`, `imbalance`, `drain`, `communication` and `sending`, defined in `timing/causes.py`.
        """
        from penstock.schedule.timing.causes import shares

        return shares(self)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events, first to last, that made the step as long as it was: each is what the next waited for.

        Had one of them taken longer, the step would have taken as much longer. A pair is there with the action that the
        next event waited for; a message that queued leads to the action whose message the queue began with. When measured,
        where messages are not known, an event waited for what ended last.
        """
        from penstock.schedule.timing.causes import critical_path

        return critical_path(self)

    def explain(self, measured: "Measured | None" = None) -> "Explanation":
        """A measured step in words: where its time went, who holds it up, what would make it shorter. `print` it.

        `measured`, and what is raised: as in `penstock.schedule.timing.explain`.
        """
        from penstock.schedule.timing.explain import explain

        return explain(self, measured)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For every rank, the most (stage, microbatch) activations in flight at once."""
        rows = (self.cells(rank) for rank in range(self.ranks))
        return peaks_in_flight((tuple(event.action for event in cell) for cell in row) for row in rows)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For every rank, the most its activations took at once, in the unit of `act` and `keep`."""
        return tuple(max((held for _, held in self._held(rank)), default=0.0) for rank in range(self.ranks))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """The memory curve of `rank`: (time, what its activations take from then on) for every action that changes it.

        F adds `act` when it starts; at their ends I frees `act` - `keep`, W frees `keep`, B frees `act`.
        """
        return list(self._held(rank))

    def held_after(self, rank: int) -> Iterator[tuple[Action, float]]:
        """The actions of `rank`, and what its activations take once each has ended; of a pair the forward counts first."""
        held = 0.0
        for cell in self.cells(rank):
            for event in sorted(cell, key=lambda event: _frees(event.action.kind)):
                held += self._change(event.action)
                yield event.action, held

    def _held(self, rank: int) -> Iterator[tuple[float, float]]:
        at = {event.action: event for event in self.rows[rank]}
        for action, held in self.held_after(rank):
            if self._change(action):
                yield (at[action].end if _frees(action.kind) else at[action].start), held

    def _change(self, action: Action) -> float:
        return (self.sizes[action.stage] if self.sizes else Size()).change(action.kind)


def _busy(row: Sequence[Event]) -> float:
    """The time for which at least one event of `row` ran."""
    busy, free = 0.0, float("-inf")
    for _, _, start, end, _ in row:
        busy += max(0.0, end - max(start, free))
        free = max(free, end)
    return busy


def _idle_share(time: float, work: float) -> float:
    return (time - work) / time if time else 0.0
