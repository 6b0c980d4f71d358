"""The messages of a timeline: which action of which rank an event needed, and when that arrived."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.schedule import Event, Timeline


class Message(NamedTuple):
    """What one rank hands to another: made by `source`, there at `arrival`."""

    source: Event
    arrival: float


class ActionStart(NamedTuple):
    """An event, for how long its rank was idle before it, and the messages that it needed, from other ranks."""

    event: Event
    waited: float
    messages: tuple[Message, ...]

    @property
    def last(self) -> Message | None:
        """What came last of what the rank was idle for."""
        return max(self.messages, key=lambda message: message.arrival) if self.waited and self.messages else None


def begun(timeline: Timeline, rank: int) -> Iterator[ActionStart]:
    """The events of `rank`, in order.

    Where what messages cost is known, their arrival is what the simulator says. In a measured timeline the events alone are
    known: a message that was made while its taker stood idle arrived, at the latest, when the taker began, and any other
    counts as there when it was made.
    """
    free = timeline.start
    for cell in timeline.cells(rank):
        for event in cell:
            yield ActionStart(event, max(0.0, event.start - free), tuple(_messages(timeline, event, free)))
        free = max(free, cell[0].end, cell[-1].end)


def _messages(timeline: Timeline, taker: Event, free: float) -> list[Message]:
    """What `taker` needed from other ranks, on a rank that had nothing to run since `free`."""
    remote = [source for source in timeline.needed_events(taker) if source.rank != taker.rank]
    if timeline.message_costs:
        return [Message(source, timeline.arrivals[source.action, taker.action.stage].time) for source in remote]
    last_end = max((source.end for source in remote), default=free)
    return [Message(source, max(last_end, taker.start) if source.end == last_end >= free else source.end) for source in remote]
