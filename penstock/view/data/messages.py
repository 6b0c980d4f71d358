"""Find the messages of a timeline: which actions of other ranks an event needed, and when their messages arrived."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.schedule import Event, Timeline


class Message(NamedTuple):
    """A message to another rank: `source` made it, and it arrived at the time `arrival`."""

    source: Event
    arrival: float


class ActionStart(NamedTuple):
    """An event, how long its rank was idle before it, and the messages that it needed from other ranks."""

    event: Event
    waited: float
    messages: tuple[Message, ...]

    @property
    def last_message(self) -> Message | None:
        """Return the message that arrived last; None if the rank was not idle before the event."""
        return max(self.messages, key=lambda message: message.arrival) if self.waited and self.messages else None


def action_starts(timeline: Timeline, rank: int) -> Iterator[ActionStart]:
    """Yield the events of `rank` in order, with the messages that they needed.

    If message costs are known, the simulator gives arrivals. A measured timeline only has events. There a message that was made
    while its receiver was idle counts as arrived when the receiver began, any other when it was made.
    """
    free = timeline.start
    for cell in timeline.cells(rank):
        for event in cell:
            yield ActionStart(event, max(0.0, event.start - free), tuple(_messages(timeline, event, free)))
        free = max(free, cell[0].end, cell[-1].end)


def _messages(timeline: Timeline, receiver: Event, idle_since: float) -> list[Message]:
    """Return the messages that `receiver` needed from other ranks; its rank was idle from `idle_since`."""
    remote = [source for source in timeline.needed_events(receiver) if source.rank != receiver.rank]
    if timeline.message_costs:
        return [Message(source, timeline.arrivals[source.action, receiver.action.stage].time) for source in remote]
    last_end = max((source.end for source in remote), default=idle_since)
    return [
        Message(source, max(last_end, receiver.start) if source.end == last_end >= idle_since else source.end)
        for source in remote
    ]
