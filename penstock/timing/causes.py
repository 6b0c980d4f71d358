"""Why a rank is idle, and which chain of events decides how long the step takes.

Between the first start and the last end of any rank, a rank is either busy or idle, and idle for one of six causes:

* `fill`: before the rank's first backward; the pipeline is not full yet.
* `drain`: after its last forward, unless that is `fill`; the pipeline runs empty, up to the end of the slowest rank.
* `imbalance`: in between; another rank still computes what this one needs next. It is the part of such waits that goes if
  all stages take the same time (`even_stages.py`): another cut helps.
* `order`: in between, all else. The table has the rank wait even if all stages take the same: only another table helps.
* `communication`, which has precedence over these four: the rank's next input is computed and on its way. It begins when
  the last of the needed actions on other ranks has ended, so it is what messages without cost would save here.
* `sending`, which has precedence over all: the rank itself hands over its last result. Only measured steps have it.

A pair needs the inputs of both its actions. On a rank without a backward, `fill` ends with its first action; a rank without
actions is idle by `order`. In a measured timeline only the events are known: `communication` is then the time until
a message has arrived and the rank has noticed it. The engine's time before an action that waits for no other rank
counts as `fill`, `order` or `drain`.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.table import Action, Kind
from penstock.timing.even_stages import ROUNDING, imbalance_before_actions
from penstock.timing.events import Event, TimelineEvents

NOTABLE_SHARE = 0.01  # of a step; a smaller gain is not suggested
Cell = tuple[Event, ...]  # one event, or the two of a pair


class Cause(enum.StrEnum):
    """The cause of idle time; defined in the module's docstring."""

    FILL = "fill"
    ORDER = "order"
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


def idle_times(step: TimelineEvents) -> tuple[tuple[Idle, ...], ...]:
    """Return the idle periods of every rank with their causes, in order."""
    rows = [list(step.cells(rank)) for rank in range(step.ranks)]
    causes = [list(_causes_without_communication(row)) for row in rows]
    between_fill_and_drain = [
        cell[0].action
        for row, row_causes in zip(rows, causes, strict=True)
        for cell, cause in zip(row, row_causes, strict=True)
        if cause is Cause.ORDER
    ]
    imbalance = imbalance_before_actions(step, between_fill_and_drain)
    return tuple(tuple(_idle_times(step, *row, imbalance)) for row in zip(rows, causes, strict=True))


def _idle_times(
    step: TimelineEvents, row: Sequence[Cell], causes: Sequence[Cause], imbalance: Mapping[Action, float]
) -> Iterator[Idle]:
    """Yield the idle periods of the rank that runs `row`. `imbalance`: action -> that part of the wait before it."""
    free, sent_until = step.start, step.start
    for cell, cause in zip(row, causes, strict=True):
        for event in cell:
            if free < event.start:
                awaited = step.last_remote_need(cell)
                computed_until = awaited.end if awaited else event.start
                uneven = imbalance.get(cell[0].action, 0.0)
                yield from _split_by_cause(free, sent_until, computed_until, event.start, cause, uneven)
            free, sent_until = max(free, event.end), max(sent_until, event.sent or event.end)
    yield from _split_by_cause(free, sent_until, step.end, step.end, Cause.DRAIN if row else Cause.ORDER)


def _split_by_cause(
    start: float, sent_until: float, computed_until: float, end: float, cause: Cause, imbalance: float = 0.0
) -> Iterator[Idle]:
    """Yield the idle time from `start` to `end` in parts: the rank sends, then its input is computed, then that travels.

    The last `imbalance` of the time in which the input is computed is imbalance.
    """
    sent_until = min(max(start, sent_until), end)
    computed_until = min(max(sent_until, computed_until), end)
    even_until = max(sent_until, computed_until - imbalance)
    even_until = sent_until if even_until - sent_until <= ROUNDING * (computed_until - sent_until) else even_until

    parts = (sent_until, Cause.SENDING), (even_until, cause), (computed_until, Cause.IMBALANCE), (end, Cause.COMMUNICATION)
    for part_end, part_cause in parts:
        if start < part_end:
            yield Idle(start, part_end, part_cause)
        start = max(start, part_end)


def _causes_without_communication(cells: Sequence[Cell]) -> Iterator[Cause]:
    """Yield the cause of idle time before each of `cells` (the row of one rank), if it is not communication."""
    kinds = [{event.action.kind for event in cell} for cell in cells]
    first_backward = next((index for index, cell_kinds in enumerate(kinds) if cell_kinds != {Kind.F}), 0)
    last_forward = max((index for index, cell_kinds in enumerate(kinds) if Kind.F in cell_kinds), default=0)
    for index in range(len(cells)):
        if index <= first_backward:
            yield Cause.FILL
        else:
            yield Cause.DRAIN if index > last_forward else Cause.ORDER


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
