"""What one rank did: its actions, receives and profiler steps, read from its trace of torch.profiler.

Actions come from the ranges that a runtime leaves:

* `2F3`, ours, and `PP:2F3`, `PP:(2F3;5B1)OVERLAP_F_B` of torch's runtime of schedules
* `Forward 3`, `Backward 3` of torch's GPipe, which name no stage: a rank has one

In this range a rank may first wait for its message, and send at last; both are left out of the action. Ranges that name no
microbatch (Megatron's `forward_step` and `backward_step`, DeepSpeed's `_exec_forward_pass`) are counted, step by step. Where
there are no ranges (torch's 1F1B), actions are inferred: a backward is what autograd ran between two messages, its forward are
the operations with the same sequence numbers. On a GPU an action takes from its first kernel to its last: the kernels that were
launched, by their correlation ids, while the host was in it. Where torch annotated a CUDA graph's kernels, these name the range
that they were captured in.
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
from penstock.integrations.trace_marks import ONLY_STAGE, Marks, Range, start_of, within
from penstock.schedule import Action, Kind

_FILE_RANK = re.compile(r"rank[-_]?(\d{1,6})")


class TimedAction(NamedTuple):
    """An action, when it ran, and when its rank had handed over what it made, in seconds of the rank's clock."""

    action: Action
    start: float
    end: float
    sent: float | None
    host_start: float  # when the host began it, which on a GPU is earlier
    receives: tuple[Range, ...] = ()  # of the messages that it needed, from post to arrival


@dataclass
class RankTrace:
    """What the trace of one rank says."""

    path: Path
    rank: int
    pipeline: tuple[int, ...]  # the job's ranks in its pipeline, in order; empty: not known
    host: str  # name of the machine; empty: not known
    names_stages: bool = True
    is_inferred: bool = False
    is_counted: bool = False  # microbatches are the places of their ranges in a step
    actions: list[TimedAction] = field(default_factory=list)  # in order of time
    marks: Marks = field(default_factory=lambda: Marks(0.0))
    began: list[float] = field(default_factory=list)  # starts of all that belongs to pipeline steps, in order
    steps: dict[int, Range] = field(default_factory=dict)  # number of the profiler step -> when it was


def read_rank(path: Path, position: int, on_bytes: Callable[[int], object] = lambda count: None) -> RankTrace:
    """Read the trace at `path`. `position`: the rank that it counts as where neither it nor its name says one.

    Raises PenstockError for a file that is no trace, is damaged, or has no action of a pipeline.
    """
    header, events = open_trace(path, on_bytes)
    trace, marks = _described(path, header, position), Marks(_base_seconds(header))
    for event in events:
        marks.add(event)
    marks.sort()
    trace.steps = marks.steps

    if not marks.actions:
        _count_calls(marks)
        trace.is_counted = bool(marks.actions)
    inferred = list(_inferred(marks)) if marks.posts and not marks.actions else []
    timed_actions = inferred or list(_marked(marks))
    if not timed_actions:
        raise PenstockError(
            f"{path} has no action of a pipeline, neither ranges (PP:2F3, Forward 3) nor backwards between sends and receives: "
            f"{PROFILE}, with ProfilerActivity.CPU"
        )
    trace.is_inferred, trace.names_stages = bool(inferred), not inferred and not marks.lacks_stages
    trace.marks = marks
    starts = [timed.host_start for timed in timed_actions]
    trace.began = sorted([*starts, *(receive.start for receive in marks.receives), *(mark.start for mark, _ in marks.messages)])
    actions = timed_actions if marks.graph_launches else [_on_device(timed, marks) for timed in timed_actions]
    trace.actions = sorted(actions, key=lambda timed: timed.start)
    return trace


def _on_device(timed: TimedAction, marks: Marks) -> TimedAction:
    """The action from its first kernel to its last; unchanged where it has none."""
    when = marks.on_device(Range(timed.start, timed.end))
    return timed._replace(start=when.start, end=when.end, sent=None) if when else timed


# ---- which rank it is


def _described(path: Path, header: str, position: int) -> RankTrace:
    """What the header of a trace says of its rank; else its file's name."""
    info = _value(header, "distributedInfo")
    info = info if isinstance(info, dict) else {}
    named = _FILE_RANK.search(path.name)
    rank = info.get("rank")
    if not isinstance(rank, int):
        rank = int(named[1]) if named else position
    host = _value(header, "host_name")
    return RankTrace(path, rank, _pipeline(info.get("pg_config")), host if isinstance(host, str) else "")


def _pipeline(groups: Any) -> tuple[int, ...]:
    """The ranks of the process group that is described as the pipeline's, as `DeviceMesh` and Megatron do; else none."""
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and re.search(r"\bpp\b|_pp|pipeline", str(group.get("pg_desc")).lower()):
            ranks = group.get("ranks")
            if isinstance(ranks, list) and len(ranks) > 1 and all(isinstance(rank, int) for rank in ranks):
                return tuple(ranks)
    return ()


def _base_seconds(header: str) -> float:
    base = _value(header, "baseTimeNanoseconds")
    return base / 1e9 if isinstance(base, int) and abs(base) < 2**63 else 0.0


def _value(header: str, key: str) -> Any:
    """The value of `key` in the text before the events; None if it is not there."""
    place = header.find(f'"{key}":')
    try:
        return json.JSONDecoder(strict=False).raw_decode(header, place + len(key) + 4)[0] if place >= 0 else None
    except (ValueError, RecursionError):
        return None


# ---- actions from ranges


def _marked(marks: Marks) -> Iterator[TimedAction]:
    """The actions that ranges name, without the waits at their beginning and the sends at their end."""
    arrivals, free = sorted(marks.receives, key=_end), -math.inf
    posts = defaultdict[Action | None, list[Range]](list)  # what needs a message -> when its receives were posted or awaited
    for when, needing in marks.messages:
        posts[needing].append(when)
    for when, actions in marks.actions:
        launch = marks.graph_launches.get(when)
        parts = [when] if len(actions) == 1 else _halves(when, marks)
        for action, part in zip(actions, parts, strict=True):
            of_message = action._replace(kind=Kind.F if action.kind is Kind.F else Kind.B)
            of_this = posts[of_message][: bisect_right(posts[of_message], part.start, key=start_of)][-1:]
            receives = [receive for post in of_this for receive in within(marks.receives, post) or [post]]
            receives = receives or within(marks.receives, part)
            if marks.lacks_stages:  # then messages arrive before the ranges of actions
                receives = (
                    receives or arrivals[bisect_right(arrivals, free, key=_end) : bisect_right(arrivals, part.start, key=_end)]
                )
                free = part.end
            receives = receives if action.kind is not Kind.W else []
            start = max([part.start, *(receive.end for receive in receives if receive.end <= part.end)])
            sends = [send for send in within(marks.sends, part) if send.start >= start]
            end = sends[0].start if sends else part.end
            sent = sends[-1].end if sends else _sent(marks, part.end)
            host_start = part.start if launch is None else launch
            yield TimedAction(action, start, end, sent, host_start, tuple(receives))


def _end(when: Range) -> float:
    return when.end


def _halves(when: Range, marks: Marks) -> list[Range]:
    """The two actions that torch runs one after the other in one range: autograd's operations begin the second."""
    backwards = within([operation for operation, _ in marks.backwards], when)
    if not backwards:
        middle = (when.start + when.end) / 2
        return [Range(when.start, middle), Range(middle, when.end)]
    begin = backwards[0].start
    forwards = [operation.end for operation in within(marks.forward_operations, when) if operation.end <= begin]
    return [Range(when.start, max(forwards, default=begin)), Range(begin, when.end)]


def _sent(marks: Marks, end: float) -> float | None:
    """When the send that follows an action that ended at `end` was handed over; None if another action follows."""
    place = bisect_left(marks.messages, end, key=start_of)
    following = bisect_left(marks.actions, end, key=start_of)
    if place == len(marks.messages) or marks.messages[place][1] is not None:
        return None
    send = marks.messages[place][0]
    return send.end if following == len(marks.actions) or send.start < marks.actions[following][0].start else None


def _count_calls(marks: Marks) -> None:
    """Make actions of forwards and backwards that say no microbatch: the first of a kind in a profiler step is microbatch 0."""
    steps = sorted(marks.steps.values()) or [Range(-math.inf, math.inf)]
    for step in steps:
        last_end, counts = dict.fromkeys(Kind, -math.inf), dict.fromkeys(Kind, 0)
        for when, kind in marks.calls:
            if step.start <= when.start < step.end and when.start >= last_end[kind]:  # else it is in one of its own kind
                marks.actions.append((when, (Action(kind, ONLY_STAGE, counts[kind]),)))
                last_end[kind], counts[kind] = when.end, counts[kind] + 1
    marks.actions.sort(key=start_of)
    marks.lacks_stages = bool(marks.actions)


# ---- actions without ranges


def _inferred(marks: Marks) -> Iterator[TimedAction]:
    """Actions of the one stage of a rank, microbatch by microbatch within a profiler step, from its operations."""
    spans, all_groups = list[tuple[Range, Action]](), list(_backwards(marks))
    for step in marks.steps.values():
        groups = [group for group in all_groups if step.start <= group[0][0].start < step.end]
        for microbatch, group in enumerate(groups):
            backward = Range(group[0][0].start, max(operation.end for operation, _ in group))
            linked = [marks.forwards[number] for _, number in group if number in marks.forwards]
            forwards = [operation for operation in linked if operation.end <= backward.start]
            if forwards:
                forward = Range(min(forwards).start, max(operation.end for operation in forwards))
                spans += [(forward, Action(Kind.F, ONLY_STAGE, microbatch)), (backward, Action(Kind.B, ONLY_STAGE, microbatch))]
    spans.sort(key=start_of)

    arrivals, free = sorted(receive.end for receive in marks.receives), -math.inf
    for (when, action), following in zip(spans, [*(later.start for later, _ in spans[1:]), math.inf], strict=False):
        arrived = arrivals[bisect_right(arrivals, free) : bisect_right(arrivals, when.start)]
        sends = within(marks.sends, Range(when.end, following))
        receives = tuple(Range(arrival, arrival) for arrival in arrived)
        start = max(arrived, default=when.start)  # with the host's time until the first operation
        yield TimedAction(action, start, when.end, sends[-1].end if sends else None, start, receives)
        free = when.end


def _backwards(marks: Marks) -> Iterator[list[tuple[Range, int]]]:
    """What autograd ran, cut where messages were posted."""
    group: list[tuple[Range, int]] = []
    for operation in marks.backwards:
        if group and bisect_left(marks.posts, group[-1][0].end) < bisect_left(marks.posts, operation[0].start):
            yield group
            group = []
        group.append(operation)
    if group:
        yield group
