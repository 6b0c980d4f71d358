"""Turn a timeline, and the verdict on it, into JSON data. Times count from the first start."""

from typing import Any

from penstock.schedule import Explanation, Timeline
from penstock.view.data.messages import ActionStart, action_starts

Data = dict[str, Any]  # a JSON object


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
