"""Read the actions, receives and profiler steps of one rank from its trace of torch.profiler.

Actions are found by the ranges that a runtime records:

* `2F3` of Penstock, and `PP:2F3`, `PP:(2F3;5B1)OVERLAP_F_B` of torch's schedule runtime
* `Forward 3`, `Backward 3` of torch's GPipe, which name no stage: the rank has one

In its range an action may first wait for a message, and send one at the end; both are not counted as the action. Ranges that
name no microbatch (Megatron's `forward_step` and `backward_step`, DeepSpeed's `_exec_forward_pass`) are counted in each step.
Without ranges (torch's 1F1B) actions are inferred: a backward is what autograd ran between two messages, its forward the
operations with the same sequence numbers. On a GPU an action takes from its first kernel to its last; its kernels are those
launched during its range, by their correlation ids. If torch annotated the kernels of a CUDA graph, they name the range in
which they were captured.
"""

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.integrations.chrome_trace import PROFILE, open_trace
from penstock.integrations.trace_events import ONLY_STAGE, Range, TraceEvents, start_of, within
from penstock.schedule import Action, Kind

_FILE_RANK = re.compile(r"rank[-_]?(\d{1,6})")


class TimedAction(NamedTuple):
    """An action, when it ran, and when its result was sent, in seconds of the rank's clock."""

    action: Action
    start: float
    end: float
    sent: float | None
    host_start: float  # when the host began it; on a GPU this is earlier
    receives: tuple[Range, ...] = ()  # of the messages that it needs, from post to arrival


@dataclass
class RankTrace:
    """The trace of one rank."""

    path: Path
    rank: int
    pipeline: tuple[int, ...]  # the job's ranks in its pipeline, in order; empty if unknown
    host: str  # name of the machine; empty if unknown
    world_size: int = 0  # of the job; 0 if unknown
    names_stages: bool = True
    is_inferred: bool = False
    is_counted: bool = False  # a microbatch is the index of its range in a step
    actions: list[TimedAction] = field(default_factory=list)  # sorted by time
    events: TraceEvents = field(default_factory=lambda: TraceEvents(0.0))
    work_starts: list[float] = field(default_factory=list)  # of actions, receives and messages, sorted
    steps: dict[int, Range] = field(default_factory=dict)  # number of the profiler step -> its range


def read_rank_trace(path: Path, default_rank: int, on_bytes: Callable[[int], object] = lambda count: None) -> RankTrace:
    """Read the trace at `path`. `default_rank` is taken as its rank if neither the trace nor its name says one.

    Raises PenstockError for a file that is no trace, is damaged, or has no action of a pipeline.
    """
    header, json_events = open_trace(path, on_bytes)
    trace, events = _identify_rank(path, header, default_rank), TraceEvents(_base_seconds(header))
    for event in json_events:
        events.add(event)
    events.sort()
    trace.steps = events.steps

    if not events.actions:
        _number_calls(events)
        trace.is_counted = bool(events.actions)
    inferred_actions = list(_infer_actions(events)) if events.posts and not events.actions else []
    timed_actions = inferred_actions or list(_read_ranges(events))
    if not timed_actions:
        raise PenstockError(
            f"{path} has no action of a pipeline, neither ranges (PP:2F3, Forward 3) nor backwards between sends and receives: "
            f"{PROFILE}, with ProfilerActivity.CPU"
        )
    trace.is_inferred, trace.names_stages = bool(inferred_actions), not inferred_actions and not events.lacks_stages
    trace.events = events
    starts = [timed.host_start for timed in timed_actions]
    trace.work_starts = sorted(
        [*starts, *(receive.start for receive in events.receives), *(span.start for span, _ in events.messages)]
    )
    actions = timed_actions if events.graph_launches else [_with_kernel_times(timed, events) for timed in timed_actions]
    trace.actions = sorted(actions, key=lambda timed: timed.start)
    return trace


def _with_kernel_times(timed: TimedAction, events: TraceEvents) -> TimedAction:
    """Return the action from its first to its last kernel; unchanged if it has none."""
    span = events.on_device(Range(timed.start, timed.end))
    return timed._replace(start=span.start, end=span.end, sent=None) if span else timed


# ---- which rank it is


def _identify_rank(path: Path, header: str, default_rank: int) -> RankTrace:
    """Return an empty trace, with its rank from the header, else from the file's name, else `default_rank`."""
    info = _header_value(header, "distributedInfo")
    info = info if isinstance(info, dict) else {}
    match = _FILE_RANK.search(path.name)
    rank = info.get("rank")
    if not isinstance(rank, int):
        rank = int(match[1]) if match else default_rank
    host, world_size = _header_value(header, "host_name"), info.get("world_size")
    return RankTrace(
        path,
        rank,
        _pipeline_ranks(info.get("pg_config")),
        host if isinstance(host, str) else "",
        world_size if isinstance(world_size, int) else 0,
    )


def _pipeline_ranks(groups: Any) -> tuple[int, ...]:
    """Return the ranks of the process group described as the pipeline's, as in `DeviceMesh` and Megatron; else none."""
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and re.search(r"\bpp\b|_pp|pipeline", str(group.get("pg_desc")).lower()):
            ranks = group.get("ranks")
            if isinstance(ranks, list) and len(ranks) > 1 and all(isinstance(rank, int) for rank in ranks):
                return tuple(ranks)
    return ()


def _base_seconds(header: str) -> float:
    base = _header_value(header, "baseTimeNanoseconds")
    return base / 1e9 if isinstance(base, int) and abs(base) < 2**63 else 0.0


def _header_value(header: str, key: str) -> Any:
    """Return the value of `key` in the text before the events; None if it has none."""
    index = header.find(f'"{key}":')
    try:
        return json.JSONDecoder(strict=False).raw_decode(header, index + len(key) + 4)[0] if index >= 0 else None
    except (ValueError, RecursionError):
        return None


# ---- actions from ranges


def _read_ranges(events: TraceEvents) -> Iterator[TimedAction]:
    """Yield the actions that ranges name, without the waits at their beginning and the sends at their end."""
    arrivals, last_end = sorted(events.receives, key=_end), -math.inf
    posts = defaultdict[Action | None, list[Range]](list)  # action -> when the receives of its message were posted or awaited
    for span, receiver in events.messages:
        posts[receiver].append(span)
    for span, actions in events.actions:
        launch = events.graph_launches.get(span)
        parts = [span] if len(actions) == 1 else _split_pair(span, events)
        for action, part in zip(actions, parts, strict=True):
            action_posts = posts[action._replace(kind=Kind.F if action.kind is Kind.F else Kind.B)]
            last_post = action_posts[: bisect_right(action_posts, part.start, key=start_of)][-1:]
            receives = [receive for post in last_post for receive in within(events.receives, post) or [post]]
            receives = receives or within(events.receives, part)
            if events.lacks_stages:  # then messages arrive before the ranges of actions
                receives = (
                    receives
                    or arrivals[bisect_right(arrivals, last_end, key=_end) : bisect_right(arrivals, part.start, key=_end)]
                )
                last_end = part.end
            receives = receives if action.kind is not Kind.W else []
            start = max([part.start, *(receive.end for receive in receives if receive.end <= part.end)])
            sends = [send for send in within(events.sends, part) if send.start >= start]
            end = sends[0].start if sends else part.end
            sent = sends[-1].end if sends else _send_end(events, part.end)
            host_start = part.start if launch is None else launch
            yield TimedAction(action, start, end, sent, host_start, tuple(receives))


def _end(span: Range) -> float:
    return span.end


def _split_pair(span: Range, events: TraceEvents) -> list[Range]:
    """Split the range of two actions that torch runs one after the other; the second begins with autograd's operations."""
    backwards = within([operation for operation, _ in events.backwards], span)
    if not backwards:
        middle = (span.start + span.end) / 2
        return [Range(span.start, middle), Range(middle, span.end)]
    begin = backwards[0].start
    forwards = [operation.end for operation in within(events.forward_operations, span) if operation.end <= begin]
    return [Range(span.start, max(forwards, default=begin)), Range(begin, span.end)]


def _send_end(events: TraceEvents, end: float) -> float | None:
    """Return the end of the send after an action that ended at `end`; None if another action comes first."""
    index = bisect_left(events.messages, end, key=start_of)
    next_action = bisect_left(events.actions, end, key=start_of)
    if index == len(events.messages) or events.messages[index][1] is not None:
        return None
    send = events.messages[index][0]
    return send.end if next_action == len(events.actions) or send.start < events.actions[next_action][0].start else None


def _number_calls(events: TraceEvents) -> None:
    """Number the calls that name no microbatch: the first of a kind in a profiler step is microbatch 0."""
    for step in _profiler_steps(events):
        last_end, counts = dict.fromkeys(Kind, -math.inf), dict.fromkeys(Kind, 0)
        for span, kind in events.calls:
            if step.start <= span.start < step.end and span.start >= last_end[kind]:  # else it is inside a call of its kind
                events.actions.append((span, (Action(kind, ONLY_STAGE, counts[kind]),)))
                last_end[kind], counts[kind] = span.end, counts[kind] + 1
    events.actions.sort(key=start_of)
    events.lacks_stages = bool(events.actions)


def _profiler_steps(events: TraceEvents) -> list[Range]:
    """Return the profiler's steps; without a `schedule=`, torch.profiler marks none, and the whole trace is one."""
    return sorted(events.steps.values()) or [Range(-math.inf, math.inf)]


# ---- actions without ranges


def _infer_actions(events: TraceEvents) -> Iterator[TimedAction]:
    """Infer the actions of a rank with one stage from its operations; microbatches count up in each profiler step."""
    ranges, all_groups = list[tuple[Range, Action]](), list(_group_backwards(events))
    for step in _profiler_steps(events):
        groups = [group for group in all_groups if step.start <= group[0][0].start < step.end]
        for microbatch, group in enumerate(groups):
            backward = Range(group[0][0].start, max(operation.end for operation, _ in group))
            linked_forwards = [events.forwards[number] for _, number in group if number in events.forwards]
            forwards = [operation for operation in linked_forwards if operation.end <= backward.start]
            if forwards:
                forward = Range(min(forwards).start, max(operation.end for operation in forwards))
                ranges += [
                    (forward, Action(Kind.F, ONLY_STAGE, microbatch)),
                    (backward, Action(Kind.B, ONLY_STAGE, microbatch)),
                ]
    ranges.sort(key=start_of)

    arrivals, last_end = sorted(receive.end for receive in events.receives), -math.inf
    for (span, action), next_start in zip(ranges, [*(later.start for later, _ in ranges[1:]), math.inf], strict=False):
        new_arrivals = arrivals[bisect_right(arrivals, last_end) : bisect_right(arrivals, span.start)]
        sends = within(events.sends, Range(span.end, next_start))
        receives = tuple(Range(arrival, arrival) for arrival in new_arrivals)
        start = max(new_arrivals, default=span.start)  # includes the host's time until the first operation
        yield TimedAction(action, start, span.end, sends[-1].end if sends else None, start, receives)
        last_end = span.end


def _group_backwards(events: TraceEvents) -> Iterator[list[tuple[Range, int]]]:
    """Yield autograd's operations in groups: a new one begins where a message was posted."""
    group: list[tuple[Range, int]] = []
    for operation in events.backwards:
        if group and bisect_left(events.posts, group[-1][0].end) < bisect_left(events.posts, operation[0].start):
            yield group
            group = []
        group.append(operation)
    if group:
        yield group
