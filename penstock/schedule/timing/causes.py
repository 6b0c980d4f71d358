"""Why a rank is idle, and which chain of events makes the step as long as it is.

Between the first start and the last end of any rank, a rank is either busy or idle, and idle for one of five causes:

* `fill`: before the rank's first backward; the pipeline is not full yet.
* `drain`: after its last forward, unless that is `fill`; the pipeline runs empty, up to the end of the slowest rank.
* `imbalance`: in between; another rank still computes what this one needs next.
* `communication`, which goes before the other three: what the rank needs next is computed and on its way. It begins when
  the last of the needed actions on other ranks has ended, so it is what messages that cost nothing would save here.
* `sending`, which goes before all: the rank itself hands over what its last action made. Only measured steps have it.

A pair needs what both its actions need. Where a rank has no backward, `fill` ends with its first action; where it has no
action at all, it is idle by `imbalance`. In a measured timeline only the events are known: `communication` is then how long
a message took to arrive and the rank to notice, and what its engine spends before an action that waits for no other rank
counts as `fill`, `imbalance` or `drain`.
"""

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.table import Action, Kind, dependencies
from penstock.schedule.timing.timeline import Border, Channel, Event, Timeline

Cell = tuple[Event, ...]  # one event, or the two of a pair


class Cause(enum.StrEnum):
    """Why a rank is idle; defined in the module's docstring."""

    FILL = "fill"
    IMBALANCE = "imbalance"
    DRAIN = "drain"
    COMMUNICATION = "communication"
    SENDING = "sending"

    __repr__ = str.__repr__


class Idle(NamedTuple):
    """A time in which a rank ran nothing, for one cause, in the time unit of its timeline."""

    start: float
    end: float
    cause: Cause


class _Needs:
    """Which events an event of a timeline could not start before."""

    def __init__(self, timeline: Timeline) -> None:
        self._at = {event.action: event for event in timeline.events}
        self._stages, self._skips = _stages(timeline), timeline.skips

    def of(self, event: Event) -> Iterator[Event]:
        for alternatives in dependencies(event.action, self._stages, self._skips):
            yield from (self._at[action] for action in alternatives if action in self._at)


def _stages(timeline: Timeline) -> int:
    return 1 + max((event.action.stage for event in timeline.events), default=-1)


# ---- idle time


def shares(timeline: Timeline) -> dict[Cause, float]:
    """The share of (ranks x makespan) that each cause of idle time takes."""
    lost = dict.fromkeys(Cause, 0.0)
    for row in timeline.idle:
        for start, end, cause in row:
            lost[cause] += end - start
    total = timeline.ranks * timeline.makespan
    return {cause: time / total if total else 0.0 for cause, time in lost.items()}


def idle_times(timeline: Timeline) -> tuple[tuple[Idle, ...], ...]:
    """For every rank, when it was idle and for which cause, in order."""
    needs = _Needs(timeline)
    return tuple(tuple(_idle_of(rank, timeline, needs)) for rank in range(timeline.ranks))


def _idle_of(rank: int, timeline: Timeline, needs: _Needs) -> Iterator[Idle]:
    cells, free, sent = list(timeline.cells(rank)), timeline.start, timeline.start
    for cell, cause in zip(cells, _without_communication(cells), strict=True):
        for event in cell:
            if free < (until := min(sent, event.start)):
                yield Idle(free, until, Cause.SENDING)
                free = until
            if free < event.start:
                elsewhere = (needed.end for each in cell for needed in needs.of(each) if needed.rank != rank)
                yield from _split(free, event.start, max(elsewhere, default=event.start), cause)
            free, sent = max(free, event.end), max(sent, event.sent or event.end)
    if free < (until := min(sent, timeline.end)):
        yield Idle(free, until, Cause.SENDING)
        free = until
    if free < timeline.end:
        yield Idle(free, timeline.end, Cause.DRAIN if cells else Cause.IMBALANCE)


def _split(start: float, end: float, computed: float, cause: Cause) -> Iterator[Idle]:
    """The idle time from `start` to `end` before something that was `computed` then: from that time on it travelled."""
    computed = min(max(start, computed), end)
    if start < computed:
        yield Idle(start, computed, cause)
    if computed < end:
        yield Idle(computed, end, Cause.COMMUNICATION)


def _without_communication(cells: Sequence[Cell]) -> Iterator[Cause]:
    """The cause of an idle time before each of `cells`, the row of one rank, if it is not communication."""
    kinds = [{event.action.kind for event in cell} for cell in cells]
    first_backward = next((index for index, here in enumerate(kinds) if here != {Kind.F}), 0)
    last_forward = max((index for index, here in enumerate(kinds) if Kind.F in here), default=0)
    for index in range(len(cells)):
        if index <= first_backward:
            yield Cause.FILL
        else:
            yield Cause.DRAIN if index > last_forward else Cause.IMBALANCE


# ---- the critical path


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """The chain of events, first to last, that made the step as long as it was: see `Timeline.critical_path`."""
    if not timeline.events:
        return ()
    needs, arrivals, places = _Needs(timeline), _arrivals(timeline), _places(timeline)
    path = [max(timeline.events, key=lambda event: event.end)]
    while waited_for := list(_waited_for(path[-1], needs, arrivals, places)):
        path.append(max(waited_for, key=lambda each: each[0])[1])  # on a tie the first, which is its own rank's
    return tuple(reversed(path))


Arrivals = dict[tuple[Action, int], tuple[float, Event]]


def _waited_for(
    event: Event, needs: _Needs, arrivals: Arrivals, places: dict[Action, tuple[Cell, Cell]]
) -> Iterator[tuple[float, Event]]:
    """What `event` could not start before, each with the time at which it allowed the start."""
    before, cell = places[event.action]
    for last in before[-1:]:
        yield last.end, last
    for member in cell:
        for needed in needs.of(member):
            yield (needed.end, needed) if needed.rank == event.rank else arrivals[needed.action, member.action.stage]


def _places(timeline: Timeline) -> dict[Action, tuple[Cell, Cell]]:
    """For every action, the cell before it on its rank (if any) and its own."""
    rows = [[(), *timeline.cells(rank)] for rank in range(timeline.ranks)]
    return {event.action: (before, cell) for row in rows for before, cell in pairwise(row) for event in cell}


def _arrivals(timeline: Timeline) -> Arrivals:
    """For what every action sends to each stage: when that message arrives, and the event at whose end its queue began."""
    home = {event.action.stage: event.rank for event in timeline.events}
    channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
    queue_began: dict[tuple[int, int], Event] = {}
    arrivals = {}
    ways = _ways(timeline)
    for event in timeline.events:
        for taker, border in ways[event.action.kind, event.action.stage]:
            ends = event.rank, home.get(taker, event.rank)
            if ends[0] == ends[1]:
                continue
            if channels[ends].free <= event.end:
                queue_began[ends] = event
            arrivals[event.action, taker] = channels[ends].carry(event.end, border), queue_began[ends]
    return arrivals


def _ways(timeline: Timeline) -> dict[tuple[Kind, int], list[tuple[int, Border]]]:
    """Kind, stage -> the stages that such an action sends to, in order, and what a message there costs."""
    chain = list(pairwise(range(_stages(timeline))))
    borders = dict(zip(chain, timeline.borders or [Border()] * len(chain), strict=False))
    ways: dict[tuple[Kind, int], list[tuple[int, Border]]] = defaultdict(list)
    for (start, end), border in sorted((borders | dict(timeline.skips)).items()):
        ways[Kind.F, start].append((end, border))
        ways[Kind.B, end].append((start, border))
        ways[Kind.I, end].append((start, border))
    return ways
