"""Why a rank is idle, and which chain of events decides how long the step takes.

Between the first start and the last end of any rank, a rank is either busy or idle, and idle for one of five causes:

* `fill`: before the rank's first backward; the pipeline is not full yet.
* `drain`: after its last forward, unless that is `fill`; the pipeline runs empty, up to the end of the slowest rank.
* `imbalance`: in between; another rank still computes what this one needs next.
* `communication`, which has precedence over these three: the rank's next input is computed and on its way. It begins when
  the last of the needed actions on other ranks has ended, so it is what messages without cost would save here.
* `sending`, which has precedence over all: the rank itself hands over its last result. Only measured steps have it.

A pair needs the inputs of both its actions. On a rank without a backward, `fill` ends with its first action; a rank without
actions is idle by `imbalance`. In a measured timeline only the events are known: `communication` is then the time until
a message has arrived and the rank has noticed it. The engine's time before an action that waits for no other rank
counts as `fill`, `imbalance` or `drain`.
"""

import enum
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.table import Action, Kind
from penstock.timing.events import Event, TimelineEvents

Cell = tuple[Event, ...]  # one event, or the two of a pair


class Cause(enum.StrEnum):
    """The cause of idle time; defined in the module's docstring."""

    FILL = "fill"
    IMBALANCE = "imbalance"
    DRAIN = "drain"
    COMMUNICATION = "communication"
    SENDING = "sending"

    __repr__ = str.__repr__


class Idle(NamedTuple):
    """A period in which a rank ran nothing, with its cause, in the time unit of its timeline."""

    start: float
    end: float
    cause: Cause


def idle_times(rank: int, step: TimelineEvents) -> Iterator[Idle]:
    """Yield the idle periods of `rank` with their causes, in order."""
    cells, free, sent_until = list(step.cells(rank)), step.start, step.start
    for cell, cause in zip(cells, _causes_without_communication(cells), strict=True):
        for event in cell:
            if free < event.start:
                awaited = step.last_remote_need(cell)
                yield from _split_by_cause(free, sent_until, awaited.end if awaited else event.start, event.start, cause)
            free, sent_until = max(free, event.end), max(sent_until, event.sent or event.end)
    yield from _split_by_cause(free, sent_until, step.end, step.end, Cause.DRAIN if cells else Cause.IMBALANCE)


def _split_by_cause(start: float, sent_until: float, computed_until: float, end: float, cause: Cause) -> Iterator[Idle]:
    """Yield the idle time from `start` to `end` in parts: the rank sends, then its input is computed, then that travels."""
    sent_until = min(max(start, sent_until), end)
    computed_until = min(max(sent_until, computed_until), end)

    if start < sent_until:
        yield Idle(start, sent_until, Cause.SENDING)
    if sent_until < computed_until:
        yield Idle(sent_until, computed_until, cause)
    if computed_until < end:
        yield Idle(computed_until, end, Cause.COMMUNICATION)


def _causes_without_communication(cells: Sequence[Cell]) -> Iterator[Cause]:
    """Yield the cause of idle time before each of `cells` (the row of one rank), if it is not communication."""
    kinds = [{event.action.kind for event in cell} for cell in cells]
    first_backward = next((index for index, cell_kinds in enumerate(kinds) if cell_kinds != {Kind.F}), 0)
    last_forward = max((index for index, cell_kinds in enumerate(kinds) if Kind.F in cell_kinds), default=0)
    for index in range(len(cells)):
        if index <= first_backward:
            yield Cause.FILL
        else:
            yield Cause.DRAIN if index > last_forward else Cause.IMBALANCE


# ---- the critical path


def critical_path(step: TimelineEvents) -> tuple[Event, ...]:
    """Return the chain of events, first to last, that decides how long the step takes: see `Timeline.critical_path`."""
    if not step.events:
        return ()
    places = _cells_of_actions(step)
    path = [max(step.events, key=lambda event: event.end)]
    while waited_for := list(_limiting_events(path[-1], step, *places[path[-1].action])):
        path.append(max(waited_for, key=lambda value: value[0])[1])  # on a tie the first, which is its own rank's
    return tuple(reversed(path))


def _limiting_events(event: Event, step: TimelineEvents, previous_cell: Cell, cell: Cell) -> Iterator[tuple[float, Event]]:
    """Yield the events that `event` of `cell` waited for, each with the time at which it allowed the start."""
    for previous in previous_cell[-1:]:
        yield previous.end, previous
    for member in cell:
        for needed in step.needed_events(member):
            yield (needed.end, needed) if needed.rank == event.rank else step.arrivals[needed.action, member.action.stage]


def _cells_of_actions(step: TimelineEvents) -> dict[Action, tuple[Cell, Cell]]:
    """Return action -> (the cell before it on its rank, or an empty one; its own cell)."""
    rows = [[(), *step.cells(rank)] for rank in range(step.ranks)]
    return {event.action: (previous, cell) for row in rows for previous, cell in pairwise(row) for event in cell}
