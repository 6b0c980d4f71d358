"""The messages of a timeline: which action of which rank an event needed, and when that arrived."""

from typing import NamedTuple

from penstock.schedule import Action, Event, Timeline


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
    idle_since = _idle_since(timeline)
    found = {}
    for taker in timeline.events:
        away = [source for source in timeline.needs(taker) if source.rank != taker.rank]
        arrived = {source: source.end for source in away}
        if timeline.borders:
            arrived = {source: timeline.arrivals[source.action, taker.action.stage].when for source in away}
        elif away and idle_since[taker.action] < taker.start:
            last = max(away, key=lambda source: source.end)
            arrived[last] = max(last.end, taker.start)
        if away:
            found[taker.action] = tuple(Message(source, taker, when) for source, when in arrived.items())
    return found


def waits(timeline: Timeline, received: dict[Action, tuple[Message, ...]]) -> dict[Action, tuple[float, Message | None]]:
    """For every action before which its rank was idle: for how long, and the message that came last, if it needs one."""
    idle_since = _idle_since(timeline)
    return {
        event.action: (event.start - since, max(received.get(event.action, ()), key=_arrival, default=None))
        for event in timeline.events
        if event.start > (since := idle_since[event.action])
    }


def _idle_since(timeline: Timeline) -> dict[Action, float]:
    """For every action, when its rank had ended all it ran before."""
    since: dict[Action, float] = {}
    for rank in range(timeline.ranks):
        free = timeline.start
        for cell in timeline.cells(rank):
            since.update((event.action, free) for event in cell)
            free = max(free, *(event.end for event in cell))
    return since


def _arrival(message: Message) -> float:
    return message.arrival
