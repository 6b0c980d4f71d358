"""Turn a timeline, and the verdict on it, into JSON data. Times count from the first start.

Of an event, the data has the messages that it needed from other ranks, and when they arrived.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.schedule import Event, Explanation, Timeline

Data = dict[str, Any]  # a JSON object


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


def timeline_data(timeline: Timeline) -> Data:
    """Return a timeline as data, with everything that is computed from its events."""
    return {
        "makespan": _offset(timeline, timeline.end),
        "span": timeline.span,
        "idle_share": timeline.idle_share,
        "bubble": timeline.bubble,
        "bubble_by_span": timeline.bubble_by_span,
        "busy": timeline.busy,
        "causes": {str(cause): share for cause, share in timeline.causes.items()},
        "peak_in_flight": timeline.peak_in_flight,
        "peak_memory": timeline.peak_memory,
        "critical_path": [str(event.action) for event in timeline.critical_path],
        "overlaps": sorted([str(action) for action in pair] for pair in timeline.overlaps),
        "borders": timeline.message_costs,
        "skips": [[*skip, *border] for skip, border in sorted(timeline.skips.items())],
        "sizes": timeline.activation_sizes,
        "memory_unit": timeline.memory_unit,
        "microbatch_factors": timeline.microbatch_factors,
        "microbatch_sizes": timeline.microbatch_sizes,
        "message_bytes": timeline.message_bytes,
        "pairs_send_together": timeline.pairs_send_together,
        "chains": timeline.chains and timeline.chains._asdict() | {"forward_only": sorted(timeline.chains.forward_only)},
        "teacher_output": timeline.teacher_output,
        "between": [round(time, 9) for time in timeline.between_steps],
        "averaging": [round(time, 9) for time in timeline.averaging],
        "ranks": [_rank_data(timeline, rank) for rank in range(timeline.ranks)],
    }


def _rank_data(timeline: Timeline, rank: int) -> Data:
    """Return a rank's events, its idle times with their causes, and its memory."""
    memory = dict(timeline.memory_after_actions(rank))
    return {
        "events": [_event(timeline, start, memory[start.event.action]) for start in action_starts(timeline, rank)],
        "idle": [[_offset(timeline, start), _offset(timeline, end), str(cause)] for start, end, cause in timeline.idle[rank]],
        "memory": [[_offset(timeline, time), amount] for time, amount in timeline.memory(rank)],
    }


def verdict_data(explanation: Explanation) -> Data:
    """Return the verdict in one line, its findings with the changed steps, and the result of every other schedule."""
    findings = [
        {"about": finding.kind, "text": finding.text, "gain": finding.gain, "rank": finding.rank}
        | {"name": finding.timeline.name, "timeline": timeline_data(finding.timeline)}
        | ({"from_trace": True} if finding in explanation.findings else {})
        for finding in explanation.verdict
    ]
    alternatives = explanation.alternative_texts
    return {"text": explanation.verdict_text, "basis": explanation.verdict_basis, "findings": findings, "others": alternatives}


def _event(timeline: Timeline, start: ActionStart, memory: float) -> Data:
    event, last_message = start.event, start.last_message
    data: Data = {"action": str(event.action), "start": _offset(timeline, event.start), "end": _offset(timeline, event.end)}
    if event.sent is not None:
        data["sent"] = _offset(timeline, event.sent)
    data["held"] = memory
    if start.waited:
        data["waited"] = round(start.waited, 9)
    if last_message is not None:
        data["waited_for"] = str(last_message.source.action)
    if start.messages:
        data["receives"] = [
            {"action": str(source.action), "rank": source.rank, "arrived": _offset(timeline, arrival)}
            for source, arrival in start.messages
        ]
    return data


def _offset(timeline: Timeline, time: float) -> float:
    """Return a time from the first start, to the nanosecond; a whole number stays an int."""
    offset = round(time - timeline.start, 9)
    return int(offset) if offset == int(offset) else offset


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
    remote = list(timeline.remote_needs([receiver]))
    if timeline.message_costs:
        return [Message(source, timeline.arrivals[source.action, receiver.action.stage].time) for source in remote]
    last_end = max((source.end for source in remote), default=idle_since)
    return [
        Message(source, max(last_end, receiver.start) if source.end == last_end >= idle_since else source.end)
        for source in remote
    ]
