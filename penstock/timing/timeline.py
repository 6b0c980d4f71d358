"""The timeline: one record for simulated and measured steps."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar

from penstock.errors import format_count
from penstock.lazy import lazy_method
from penstock.schedule.memory import (
    ActivationSize,
    changes_memory_at_end,
    memory_after_actions,
    peaks_in_flight,
    waiting_outputs,
)
from penstock.schedule.table import Action
from penstock.timing.causes import Cause, Idle, critical_path, idle_times
from penstock.timing.events import Event, TimelineEvents


class Timeline(TimelineEvents):
    """The times at which every action of one step ran, or would run.

    `idle_share` counts the time of all ranks, `bubble` that of the busiest one: they are equal if all have as much work.

    Times are in the unit of the costs given to `simulate`, in seconds when measured. Memory is in the unit of `act` and
    `keep`, by default in activations, and in bytes when measured. `work`, in both bubbles, is the busy time of the busiest
    rank: M T when all stages cost the same. The actions of an overlapped pair start and end together; their time counts once.
    """

    time_unit: ClassVar[str] = ""  # of the costs; a measured step's is "s"

    def __repr__(self) -> str:
        """Return one line; `.rows` has the events, and a notebook draws them."""
        size = f"{format_count(self.ranks, 'rank')}, {format_count(len(self.events), 'action')}"
        makespan = f"{self.makespan:.4g}{self.time_unit and ' '}{self.time_unit}"
        return f"<{type(self).__name__} {self.name}: {size}, makespan {makespan}, bubble {self.bubble:.1%}>"

    _repr_html_ = lazy_method("penstock.view.notebook", "timeline_html")

    @property
    def bubble(self) -> float:
        """The idle share of the makespan: (makespan - work) / makespan."""
        return self._idle_share(self.makespan)

    @property
    def bubble_by_span(self) -> float:
        """The idle share of the span: (span - work) / span."""
        return self._idle_share(self.span)

    def _idle_share(self, time: float) -> float:
        return (time - max(self.busy, default=0.0)) / time if time else 0.0

    @property
    def idle_share(self) -> float:
        """The share of (ranks x makespan) in which no action ran: the sum of `causes`."""
        total = self.ranks * self.makespan
        return 1 - sum(self.busy) / total if total else 0.0

    @cached_property
    def idle(self) -> tuple[tuple[Idle, ...], ...]:
        """The idle periods of every rank with their causes, from the first start to the last end of any rank."""
        return idle_times(self)

    @cached_property
    def causes(self) -> dict[Cause, float]:
        """The share of (ranks x makespan) of each cause of idle time; with the busy share they add up to 1.

        The causes are `fill`, `order`, `imbalance`, `drain`, `communication` and `sending`, defined in `timing/causes.py`.
        """
        idle_time, total = dict.fromkeys(Cause, 0.0), self.ranks * self.makespan
        for start, end, cause in chain.from_iterable(self.idle):
            idle_time[cause] += end - start
        return {cause: time / total if total else 0.0 for cause, time in idle_time.items()}

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events, first to last, that decides how long the step takes: each is what the next waited for.

        If one of them had taken longer, the step would have taken as much longer. Of a pair, it has the action that the next
        event waited for. A message that queued leads to the action whose message began the queue. When messages are not
        known, as in a measured step, an event waited for what ended last.
        """
        return critical_path(self)

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """The most (stage, microbatch) activations in flight at once on every rank; each of K slices counts 1/K."""
        return peaks_in_flight(map(self._actions, range(self.ranks)), self.slices, self.stage_chains.forward_only)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The peak memory of activations, and of a teacher's outputs, on every rank, in the unit of `act` and `keep`."""
        return tuple(max((memory for _, memory in self.memory_after_actions(rank)), default=0.0) for rank in range(self.ranks))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return the memory curve of `rank`: (time, memory of its activations from then on) for every action that changes it.

        F adds `act` when it starts. At their ends I frees `act` - `keep`, W frees `keep`, B frees `act`. The last F of a
        teacher adds `teacher_output`, and the F that computes the loss frees it.
        """
        at, curve, previous = {event.action: event for event in self.rows[rank]}, [], 0.0
        for action, memory in self.memory_after_actions(rank):
            if memory != previous:
                curve.append((at[action].end if changes_memory_at_end(action) else at[action].start, memory))
            previous = memory
        return curve

    def memory_after_actions(self, rank: int) -> Iterator[tuple[Action, float]]:
        """Yield each action of `rank` with the memory after it: of its activations, and of a teacher's outputs that wait.

        Of a pair the forward counts first.
        """
        after = memory_after_actions(self._actions(rank), self._sizes, self.microbatch_factors, self.slices)
        if not self.teacher_output:
            return after
        waiting = self._waiting_outputs(rank)[1:]
        return ((action, memory + self.teacher_output * count) for (action, memory), count in zip(after, waiting, strict=True))

    @cached_property
    def peak_waiting_outputs(self) -> tuple[int, ...]:
        """The most of a teacher's outputs that wait at once on every rank, each of `teacher_output` memory."""
        if self.stage_chains.teacher is None and not self.teacher_output:
            return (0,) * self.ranks
        return tuple(max(self._waiting_outputs(rank)) for rank in range(self.ranks))

    def _waiting_outputs(self, rank: int) -> Sequence[int]:
        actions = [action for cell in self._actions(rank) for action in sorted(cell, key=changes_memory_at_end)]
        return waiting_outputs(actions, self.stage_chains)

    @cached_property
    def _sizes(self) -> Sequence[ActivationSize]:
        """The sizes of activations by stage; nothing of stages that have F only. Empty: one each."""
        forward_only = self.stage_chains.forward_only
        if not forward_only:
            return self.activation_sizes
        sizes = self.activation_sizes or [ActivationSize()] * self.stage_chains.num_stages
        return [ActivationSize(0, 0) if stage in forward_only else size for stage, size in enumerate(sizes)]

    def _actions(self, rank: int) -> Iterator[tuple[Action, ...]]:
        return (tuple([event.action for event in cell]) for cell in self.cells(rank))
