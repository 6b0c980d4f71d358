"""The messages of a timeline: which action of which rank an event needed, and when that arrived."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule import Action, Border, Event, Kind, Timeline
from penstock.schedule.table import dependencies
from penstock.schedule.timing.events import Channel


class Message(NamedTuple):
    """What one rank hands to another: made by `source`, needed by `taker`, there at `arrival`."""

    source: Event
    taker: Event
    arrival: float


def messages(timeline: Timeline) -> dict[Action, tuple[Message, ...]]:
    """For every action that needs something from another rank, the messages it needs.

    Where what messages cost is known, the arrival is what the simulator says. In a measured timeline the events alone are
    known: a message that its taker stood idle for arrived, at the latest, when the taker began, and any other counts as
    there when it was made.
    """
    borders = _borders(timeline)
    arrivals = _arrivals(timeline, borders) if timeline.borders else {}
    idle_since = _idle_since(timeline)
    found = {}
    for taker, sources in _needed(timeline):
        away = [source for source in sources if source.rank != taker.rank]
        last = max(away, key=lambda source: source.end, default=None)
        if last is not None:
            found[taker.action] = tuple(
                Message(source, taker, arrivals[source.action, taker.action.stage])
                if arrivals
                else Message(source, taker, _seen(source, taker, source is last and idle_since[taker.action] < taker.start))
                for source in away
            )
    return found


def _seen(source: Event, taker: Event, waited: bool) -> float:
    return max(source.end, taker.start) if waited else source.end


def _needed(timeline: Timeline) -> Iterator[tuple[Event, list[Event]]]:
    """Every event with those it could not start before."""
    at = {event.action: event for event in timeline.events}
    stages = 1 + max((action.stage for action in at), default=-1)
    for event in timeline.events:
        needs = dependencies(event.action, stages, timeline.skips)
        yield event, [at[action] for alternatives in needs for action in alternatives if action in at]


def _idle_since(timeline: Timeline) -> dict[Action, float]:
    """For every action, when its rank had ended all it ran before."""
    since: dict[Action, float] = {}
    for rank in range(timeline.ranks):
        free = timeline.start
        for cell in timeline.cells(rank):
            since.update((event.action, free) for event in cell)
            free = max(free, *(event.end for event in cell))
    return since


def waits(timeline: Timeline, received: dict[Action, tuple[Message, ...]]) -> dict[Action, tuple[float, Message | None]]:
    """For every action before which its rank was idle: for how long, and the message that came last, if it needs one."""
    idle_since = _idle_since(timeline)
    return {
        event.action: (event.start - since, max(received.get(event.action, ()), key=_arrival, default=None))
        for event in timeline.events
        if event.start > (since := idle_since[event.action])
    }


def _arrival(message: Message) -> float:
    return message.arrival


def _borders(timeline: Timeline) -> dict[tuple[int, int], Border]:
    """Stage, later stage -> what a message between the two costs."""
    stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    return dict(zip(pairwise(range(stages)), timeline.borders, strict=False)) | dict(timeline.skips)


def _arrivals(timeline: Timeline, borders: dict[tuple[int, int], Border]) -> dict[tuple[Action, int], float]:
    """(what sends, stage it sends to) -> when that message arrives; channels carry one after the other."""
    home = {event.action.stage: event.rank for event in timeline.events}
    channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
    ways: dict[tuple[bool, int], list[tuple[int, Border]]] = defaultdict(list)  # forward?, stage -> whom it sends to
    for (lower, upper), border in sorted(borders.items()):
        ways[True, lower].append((upper, border))
        ways[False, upper].append((lower, border))
    arrivals = {}
    for event in timeline.events:
        kind, stage, _ = event.action
        for taker, border in ways[kind is Kind.F, stage]:
            if kind is not Kind.W and home.get(taker, event.rank) != event.rank:
                arrivals[event.action, taker] = channels[event.rank, home[taker]].carry(event.end, border)
    return arrivals
