"""What one rank did: its actions, receives and profiler steps, read from its trace of torch.profiler.

Actions come from the ranges that a runtime leaves:

* `2F3`, ours, and `PP:2F3`, `PP:(2F3;5B1)OVERLAP_F_B` of torch's runtime of schedules
* `Forward 3`, `Backward 3` of torch's GPipe, which name no stage: a rank has one

In such a range a rank may first wait for its message, and send at last; both are left out of the action. Where there are no
ranges (torch's 1F1B), actions are inferred: a backward is what autograd ran between two messages, its forward are the
operations with the same sequence numbers. On a GPU an action takes from its first kernel to its last: the kernels that were
launched, by their correlation ids, while the host was in it.
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
from penstock.schedule import Action, Kind

_ACTION = re.compile(r"(?:PP:)?(\d{1,9}[FBIW]\d{1,9}(?:\.\d{1,9})?)")
_PAIR = re.compile(r"PP:\((\d{1,9}F\d{1,9});(\d{1,9}[BI]\d{1,9})\)OVERLAP_F_B")
_SINGLE_STAGE = re.compile(r"(Forward|Backward) (\d{1,9})")
_MESSAGE = re.compile(r"(?:PP:)?(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_FILE_RANK = re.compile(r"rank[-_]?(\d{1,6})")
ONLY_STAGE = 0  # of a rank whose ranges name no stage, until it is known which rank it is


class Range(NamedTuple):
    """From `start` to `end`, in seconds of the rank's clock."""

    start: float
    end: float


class TimedAction(NamedTuple):
    """An action, when it ran, and when its rank had handed over what it made, in seconds of the rank's clock."""

    action: Action
    start: float
    end: float
    sent: float | None
    host_start: float  # when the host began it, which on a GPU is earlier


@dataclass
class RankTrace:
    """What the trace of one rank says."""

    path: Path
    rank: int
    pipeline: tuple[int, ...]  # the job's ranks in its pipeline, in order; empty: not known
    host: str  # name of the machine; empty: not known
    names_stages: bool = True
    is_inferred: bool = False
    actions: list[TimedAction] = field(default_factory=list)  # in order of time
    received: frozenset[Action] = frozenset()  # actions that waited for a message
    began: list[float] = field(default_factory=list)  # starts of all that belongs to pipeline steps, in order
    steps: dict[int, Range] = field(default_factory=dict)  # number of the profiler step -> when it was


def read_rank(path: Path, position: int, on_bytes: Callable[[int], object] = lambda count: None) -> RankTrace:
    """Read the trace at `path`. `position`: the rank that it counts as where neither it nor its name says one.

    Raises PenstockError for a file that is no trace, is damaged, or has no action of a pipeline.
    """
    header, events = open_trace(path, on_bytes)
    trace, marks = _described(path, header, position), _Marks(_base_seconds(header))
    for event in events:
        marks.add(event)
    marks.sort()
    trace.steps = marks.steps

    inferred = list(_inferred(marks)) if not marks.actions else []
    found = inferred or list(_marked(marks))
    if not found:
        raise PenstockError(
            f"{path} has no action of a pipeline, neither ranges (PP:2F3, Forward 3) nor backwards between messages: "
            f"{PROFILE}, with ProfilerActivity.CPU"
        )
    trace.is_inferred, trace.names_stages = bool(inferred), not inferred and not marks.lacks_stages
    trace.received = frozenset(action for action, receives in marks.receives_of.items() if receives)
    starts = [timed.host_start for timed in found]
    trace.began = sorted([*starts, *(receive.start for receive in marks.receives), *(mark.start for mark, _ in marks.messages)])
    trace.actions = sorted((marks.on_device(timed) for timed in found), key=lambda timed: timed.start)
    return trace


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


# ---- events


class _Marks:
    """What is kept of a trace's events, in the order of their starts once `sort` was called."""

    def __init__(self, base: float) -> None:
        self.base = base  # seconds to add to all times
        self.actions: list[tuple[Range, tuple[Action, ...]]] = []  # a range, and the action or the pair that ran in it
        self.messages: list[tuple[Range, Action | None]] = []  # ranges SEND (None) and RECV (the action that needs it)
        self.receives: list[Range] = []  # from the post to the arrival
        self.posts: list[float] = []  # when sends and receives were posted
        self.sends: list[Range] = []
        self.backwards: list[tuple[Range, int]] = []  # what autograd ran, with its sequence number
        self.forwards: dict[int, Range] = {}  # sequence number -> the last operation with it
        self.steps: dict[int, Range] = {}
        self.launches: list[tuple[float, int]] = []  # of kernels: when, and their correlation ids
        self.kernels: dict[int, Range] = {}
        self.receives_of: dict[Action, list[Range]] = {}
        self.lacks_stages = False

    def add(self, event: Any) -> None:
        """Keep what matters of `event`; leave out what is none of a profiler's."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, name, args = event.get("cat"), event.get("name"), event.get("args")
        if category not in _CATEGORIES or not isinstance(name, str):
            return
        try:
            start = self.base + float(event["ts"]) / 1e6
            when = Range(start, start + float(event["dur"]) / 1e6)
        except (LookupError, TypeError, ValueError, OverflowError):
            return
        if not (math.isfinite(when.end) and when.start <= when.end):
            return
        args = args if isinstance(args, dict) else {}
        if category == "user_annotation":
            self._add_range(name, when)
        elif category == "cpu_op":
            self._add_operation(name, when, args)
        elif isinstance(correlation := args.get("correlation"), int):
            if category in _LAUNCHES:
                self.launches.append((when.start, correlation))
            elif "nccl" not in name.lower():
                self.kernels[correlation] = when

    def _add_range(self, name: str, when: Range) -> None:
        if found := _ACTION.fullmatch(name):
            self.actions.append((when, (Action.parse(found[1]),)))
        elif found := _PAIR.fullmatch(name):
            self.actions.append((when, (Action.parse(found[1]), Action.parse(found[2]))))
        elif found := _SINGLE_STAGE.fullmatch(name):
            kind = Kind.F if found[1] == "Forward" else Kind.B
            self.actions.append((when, (Action(kind, ONLY_STAGE, int(found[2])),)))
            self.lacks_stages = True
        elif found := _MESSAGE.fullmatch(name):
            kind = Kind.F if found[3] == "F" else Kind.B
            self.messages.append((when, Action(kind, int(found[1]), int(found[4])) if found[2] == "RECV" else None))
        elif found := _STEP.fullmatch(name):
            self.steps[int(found[1])] = when
        elif name in ("gloo:recv", "nccl:recv"):
            self.receives.append(when)

    def _add_operation(self, name: str, when: Range, args: dict[str, Any]) -> None:
        number = args.get("Sequence number")
        if name == "c10d::send":
            self.sends.append(when)
            self.posts.append(when.start)
        elif name == "c10d::recv_":
            self.posts.append(when.start)
        elif name.startswith("autograd::engine::evaluate_function"):
            self.backwards.append((when, number if isinstance(number, int) else -1))
        elif isinstance(number, int) and args.get("Fwd thread id") == 0:
            before = self.forwards.get(number)
            if before is None or before.start <= when.start:
                self.forwards[number] = when

    def sort(self) -> None:
        """Bring everything into the order of time."""
        for ranges in (self.actions, self.messages, self.receives, self.posts, self.sends, self.backwards, self.launches):
            ranges.sort(key=_start)
        self._launched = [when for when, _ in self.launches]

    def on_device(self, timed: TimedAction) -> TimedAction:
        """`timed` as its kernels ran, those that were launched meanwhile; the same where there are none."""
        first, last = bisect_left(self._launched, timed.start), bisect_right(self._launched, timed.end)
        ids = (correlation for _, correlation in self.launches[first:last])
        kernels = [self.kernels[correlation] for correlation in ids if correlation in self.kernels]
        if not kernels:
            return timed
        start, end = min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)
        return timed._replace(start=start, end=end, sent=None)


_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_CATEGORIES = _LAUNCHES | {"user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}


def _start(item: Any) -> float:
    """The start of a range, alone or with what belongs to it."""
    while isinstance(item, tuple):
        item = item[0]
    return float(item)


def _within(ranges: list[Range], outer: Range) -> list[Range]:
    """Those of `ranges`, sorted, that start in `outer`."""
    return ranges[bisect_left(ranges, outer.start, key=_start) : bisect_right(ranges, outer.end, key=_start)]


# ---- actions from ranges


def _marked(marks: _Marks) -> Iterator[TimedAction]:
    """The actions that ranges name, without the waits at their beginning and the sends at their end."""
    posts = defaultdict[Action | None, list[Range]](list)  # what needs a message -> when its receives were posted or awaited
    for when, needing in marks.messages:
        posts[needing].append(when)
    for when, actions in marks.actions:
        parts = [when] if len(actions) == 1 else _halves(when, marks)
        for action, part in zip(actions, parts, strict=True):
            of_message = action._replace(kind=Kind.F if action.kind is Kind.F else Kind.B)
            of_this = posts[of_message][: bisect_right(posts[of_message], part.start, key=_start)][-1:]
            receives = [receive for post in of_this for receive in _within(marks.receives, post) or [post]]
            receives = receives or _within(marks.receives, part)
            if receives and action.kind is not Kind.W:
                marks.receives_of[action] = receives
            else:
                receives = []
            start = max([part.start, *(receive.end for receive in receives if receive.end <= part.end)])
            sends = [send for send in _within(marks.sends, part) if send.start >= start]
            end = sends[0].start if sends else part.end
            yield TimedAction(action, start, end, sends[-1].end if sends else _sent(marks, part.end), part.start)


def _halves(when: Range, marks: _Marks) -> list[Range]:
    """The two actions that torch runs one after the other in one range: autograd's operations begin the second."""
    backwards = _within([operation for operation, _ in marks.backwards], when)
    if not backwards:
        middle = (when.start + when.end) / 2
        return [Range(when.start, middle), Range(middle, when.end)]
    begin = backwards[0].start
    forwards = [operation.end for operation in _within(sorted(marks.forwards.values()), when) if operation.end <= begin]
    return [Range(when.start, max(forwards, default=begin)), Range(begin, when.end)]


def _sent(marks: _Marks, end: float) -> float | None:
    """When the send that follows an action that ended at `end` was handed over; None if another action follows."""
    place = bisect_left(marks.messages, end, key=_start)
    following = bisect_left(marks.actions, end, key=_start)
    if place == len(marks.messages) or marks.messages[place][1] is not None:
        return None
    send = marks.messages[place][0]
    return send.end if following == len(marks.actions) or send.start < marks.actions[following][0].start else None


# ---- actions without ranges


def _inferred(marks: _Marks) -> Iterator[TimedAction]:
    """Actions of the one stage of a rank, microbatch by microbatch within a profiler step, from its operations."""
    ran, all_groups = list[tuple[Range, Action]](), list(_backwards(marks))
    for step in marks.steps.values():
        groups = [group for group in all_groups if step.start <= group[0][0].start < step.end]
        for microbatch, group in enumerate(groups):
            backward = Range(group[0][0].start, max(operation.end for operation, _ in group))
            linked = [marks.forwards[number] for _, number in group if number in marks.forwards]
            forwards = [operation for operation in linked if operation.end <= backward.start]
            if forwards:
                forward = Range(min(forwards).start, max(operation.end for operation in forwards))
                ran += [(forward, Action(Kind.F, ONLY_STAGE, microbatch)), (backward, Action(Kind.B, ONLY_STAGE, microbatch))]
    ran.sort(key=_start)

    arrivals, free = sorted(receive.end for receive in marks.receives), -math.inf
    for (when, action), following in zip(ran, [*(later.start for later, _ in ran[1:]), math.inf], strict=False):
        arrived = arrivals[bisect_right(arrivals, free) : bisect_right(arrivals, when.start)]
        sends = _within(marks.sends, Range(when.end, following))
        marks.receives_of[action] = [Range(arrival, arrival) for arrival in arrived]
        start = max(arrived, default=when.start)  # with the host's time until the first operation
        yield TimedAction(action, start, when.end, sends[-1].end if sends else None, start)
        free = when.end


def _backwards(marks: _Marks) -> Iterator[list[tuple[Range, int]]]:
    """What autograd ran, cut where messages were posted."""
    group: list[tuple[Range, int]] = []
    for operation in marks.backwards:
        if group and bisect_left(marks.posts, group[-1][0].end) < bisect_left(marks.posts, operation[0].start):
            yield group
            group = []
        group.append(operation)
    if group:
        yield group
