"""One timeline as plain data, counted from its first start, and the verdict on it."""

from typing import Any

from penstock.schedule import Explanation, Timeline
from penstock.view.data.messages import ActionStart, begun

Data = dict[str, Any]  # what JSON can say


def timeline_data(timeline: Timeline) -> Data:
    """Return a timeline as data, with times from its first start and everything computed from it."""
    return {
        "makespan": _since(timeline, timeline.end),
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
        "message_bytes": timeline.message_bytes,
        "pairs_send_together": timeline.pairs_send_together,
        "between": [round(time, 9) for time in timeline.between_steps],
        "averaging": [round(time, 9) for time in timeline.averaging],
        "ranks": [_row(timeline, rank) for rank in range(timeline.ranks)],
    }


def _row(timeline: Timeline, rank: int) -> Data:
    """Return a rank's events, its idle times with their causes, and its memory."""
    memory = dict(timeline.memory_after_actions(rank))
    return {
        "events": [_event(timeline, start, memory[start.event.action]) for start in begun(timeline, rank)],
        "idle": [[_since(timeline, start), _since(timeline, end), str(cause)] for start, end, cause in timeline.idle[rank]],
        "memory": [[_since(timeline, time), amount] for time, amount in timeline.memory(rank)],
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


def _event(timeline: Timeline, begun: ActionStart, memory: float) -> Data:
    event, last = begun.event, begun.last
    data: Data = {"action": str(event.action), "start": _since(timeline, event.start), "end": _since(timeline, event.end)}
    if event.sent is not None:
        data["sent"] = _since(timeline, event.sent)
    data["held"] = memory
    if begun.waited:
        data["waited"] = round(begun.waited, 9)
    if last is not None:
        data["waited_for"] = str(last.source.action)
    if begun.messages:
        data["receives"] = [
            {"action": str(source.action), "rank": source.rank, "arrived": _since(timeline, arrival)}
            for source, arrival in begun.messages
        ]
    return data


def _since(timeline: Timeline, time: float) -> float:
    """Return a time from the first start, to the nanosecond; a whole number stays an int."""
    since = round(time - timeline.start, 9)
    return int(since) if since == int(since) else since
