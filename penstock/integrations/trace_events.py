"""Collect the events of one rank's trace that matter: ranges of actions and messages, operations, kernels, collectives."""

import contextlib
import math
import re
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

from penstock.schedule import Action, Kind

_ACTION = re.compile(r"(PP:)?(\d{1,9}[FBIW]\d{1,9}(?:\.\d{1,9})?)")
_PAIR = re.compile(r"PP:\((\d{1,9}F\d{1,9});(\d{1,9}[BI]\d{1,9})\)OVERLAP_F_B")
_SINGLE_STAGE = re.compile(r"(Forward|Backward) (\d{1,9})")
_MESSAGE = re.compile(r"(?:PP:)?(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
_SHARDING = re.compile(r"PP:\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)")
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_CALL = re.compile(  # of Megatron, DeepSpeed and torch: a range, or with_stack's "file.py(12): name"
    r"(?:.*: )?(?:(forward_step|_exec_forward_pass|forward_one_chunk)|(?:backward_step|_exec_backward_pass|backward_one_chunk))"
)
_COLLECTIVE = re.compile(r"(?:gloo|nccl):_?(\w+)")
_NCCL_KERNEL = re.compile(r"nccl\w*Kernel_(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce)_.*", re.IGNORECASE | re.DOTALL)
_TRANSFERS = {"send", "recv", "isend", "irecv", "coalesced"}
_BYTES = {
    "double": 8,
    "long": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "half": 2,
    "bfloat16": 2,
}
MAX_ELEMENTS = 2**48  # of a message; a larger number is damaged
ONLY_STAGE = 0  # the stage of actions whose ranges name none, until all traces are read


class Range(NamedTuple):
    """A time range from `start` to `end`, in seconds of the rank's clock."""

    start: float
    end: float


class CollectiveCall(NamedTuple):
    """A collective: when it was posted, began on its device, and ended, in seconds of the rank's clock."""

    name: str
    posted: float
    began: float
    end: float


class OptimizerStep:
    """An optimizer step: its time range, its number of operations, and whether these were fused or foreach."""

    def __init__(self, span: Range) -> None:
        self.span, self.operations, self.is_fused = span, 0, False


class TraceEvents:
    """The events of a trace that matter. `sort` sorts them by start."""

    def __init__(self, base: float) -> None:
        self.base = base  # seconds, added to all times
        self.actions: list[tuple[Range, tuple[Action, ...]]] = []  # a range, and the action or pair of actions that it names
        self.messages: list[tuple[Range, Action | None]] = []  # ranges SEND (None); RECV, and the action that needs it
        self.receives: list[Range] = []  # from post to arrival
        self.posts: list[float] = []  # when sends and receives were posted
        self.sends: list[Range] = []
        self.backwards: list[tuple[Range, int]] = []  # autograd's operations, and their sequence numbers
        self.forwards: dict[int, Range] = {}  # sequence number -> the last operation with it
        self.steps: dict[int, Range] = {}
        self.launches: list[tuple[float, int]] = []  # of kernels: time, correlation id
        self.kernels: dict[int, Range] = {}
        self.calls: list[tuple[Range, Kind]] = []  # forwards and backwards that name no microbatch
        self.collectives: list[CollectiveCall] = []
        self.collective_kernels: list[tuple[int, CollectiveCall]] = []  # correlation id, collective
        self.transfers: list[Range] = []  # sends and receives on the device
        self.loader_calls: list[Range] = []  # `next()` of a data loader
        self.optimizer: list[OptimizerStep] = []
        self.max_message_bytes = 0.0  # of the largest message
        self.lacks_stages = False
        self.is_of_torch_runtime = False
        self.sharding: dict[str, list[Range]] = {
            "UNSHARD": [],
            "RESHARD": [],
            "REDUCE_GRAD": [],
        }  # torch's FSDP actions
        self.labelled_kernels: dict[tuple[str, int], Range] = {}  # of CUDA graphs: (range it was captured in, correlation id)
        self.graph_launches: dict[Range, float] = {}  # action in a CUDA graph -> when the host launched the graph

    def add(self, event: Any) -> None:
        """Collect `event` if it matters; ignore it if it is not of a profiler's form."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, name, args = event.get("cat"), event.get("name"), event.get("args")
        if not isinstance(category, str) or category not in _CATEGORIES or not isinstance(name, str):
            return
        try:
            start = self.base + float(event["ts"]) / 1e6
            span = Range(start, start + float(event["dur"]) / 1e6)
        except (LookupError, TypeError, ValueError, OverflowError):
            return
        if not (math.isfinite(span.end) and span.start <= span.end):
            return
        args = args if isinstance(args, dict) else {}
        if category == "user_annotation":
            self._add_range(name, span, args)
        elif category == "cpu_op":
            self._add_operation(name, span, args)
        elif category == "python_function":
            self._add_call(name, span)
        elif isinstance(correlation := args.get("correlation"), int):
            if category in _LAUNCHES:
                self.launches.append((span.start, correlation))
            else:
                self._add_kernel(name, span, args, correlation)

    def _add_kernel(self, name: str, span: Range, args: dict[str, Any], correlation: int) -> None:
        """Collect a kernel, by its correlation id and by the range it was captured in."""
        label = args.get("name", args.get("annotation"))
        if isinstance(label, str):
            _extend(self.labelled_kernels, (label, correlation), span)
        if "nccl" in name.lower():
            self._add_communication(name, span, args, correlation)
        else:
            _extend(self.kernels, correlation, span)  # all kernels of a CUDA graph have the id of its launch

    def _add_communication(self, kernel: str, span: Range, args: dict[str, Any], correlation: int) -> None:
        """Collect a kernel of NCCL: a collective by its arguments (older torch: by its name), else a message."""
        name, elements = args.get("Collective name"), args.get("In msg nelems")
        if name is None and (match := _NCCL_KERNEL.fullmatch(kernel)):
            name = match[1]
        if isinstance(name, str) and name.lstrip("_") not in _TRANSFERS:
            self.collective_kernels.append((correlation, CollectiveCall(name.lstrip("_"), span.start, *span)))
            return
        self.transfers.append(span)
        if isinstance(elements, int):
            self._update_max_message_bytes(elements, args.get("dtype"))

    def _update_max_message_bytes(self, elements: float, dtype: Any) -> None:
        """Update the bytes of the largest message."""
        if 0 <= elements < MAX_ELEMENTS:
            self.max_message_bytes = max(self.max_message_bytes, float(elements) * _BYTES.get(str(dtype).lower(), 0))

    def _add_call(self, name: str, span: Range) -> None:
        """Collect a forward or backward that a function of Megatron, DeepSpeed or torch runs."""
        if match := _CALL.fullmatch(name):
            self.calls.append((span, Kind.F if match[1] else Kind.B))

    def _add_range(self, name: str, span: Range, args: dict[str, Any]) -> None:
        """Collect a range that the program or torch has named."""
        if match := _ACTION.fullmatch(name):
            self.actions.append((span, (Action.parse(match[2]),)))
            self.is_of_torch_runtime |= match[1] is not None
        elif match := _PAIR.fullmatch(name):
            self.actions.append((span, (Action.parse(match[1]), Action.parse(match[2]))))
        elif match := _SINGLE_STAGE.fullmatch(name):
            kind = Kind.F if match[1] == "Forward" else Kind.B
            self.actions.append((span, (Action(kind, ONLY_STAGE, int(match[2])),)))
            self.lacks_stages = True
        elif match := _MESSAGE.fullmatch(name):
            kind = Kind.F if match[3] == "F" else Kind.B
            self.messages.append((span, Action(kind, int(match[1]), int(match[4])) if match[2] == "RECV" else None))
        elif match := _SHARDING.fullmatch(name):
            self.sharding[match[1]].append(span)
        elif match := _STEP.fullmatch(name):
            self.steps[int(match[1])] = span
        elif name in ("gloo:recv", "nccl:recv"):
            self.receives.append(span)
            self._add_message_size(args)
        elif (match := _COLLECTIVE.fullmatch(name)) and match[1] not in _TRANSFERS:
            self.collectives.append(CollectiveCall(match[1], span.start, *span))
        elif name.startswith("enumerate(DataLoader)#"):
            self.loader_calls.append(span)
        elif name.startswith("Optimizer.step#"):
            self.optimizer.append(OptimizerStep(span))
        else:
            self._add_call(name, span)

    def _add_message_size(self, args: dict[str, Any]) -> None:
        """Collect the size of a message, which a trace with `record_shapes=True` has."""
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):
            self._update_max_message_bytes(math.prod(args["Input Dims"][0]), args["Input type"][0])

    def _add_operation(self, name: str, span: Range, args: dict[str, Any]) -> None:
        """Collect an operation on the CPU: of the optimizer, a send or receive, of autograd, or a forward."""
        if self.optimizer and self.optimizer[-1].span.start <= span.start < self.optimizer[-1].span.end:
            self.optimizer[-1].operations += name.startswith("aten::")
            self.optimizer[-1].is_fused |= name.startswith(("aten::_foreach", "aten::_fused"))
            return
        number = args.get("Sequence number")
        if name == "c10d::send":
            self.sends.append(span)
            self.posts.append(span.start)
        elif name == "c10d::recv_":
            self.posts.append(span.start)
        elif name.startswith("autograd::engine::evaluate_function"):
            self.backwards.append((span, number if isinstance(number, int) else -1))
        elif isinstance(number, int) and args.get("Fwd thread id") == 0:
            earlier = self.forwards.get(number)
            if earlier is None or earlier.start <= span.start:
                self.forwards[number] = span

    def sort(self) -> None:
        """Sort everything by time, once all events are added."""
        if not self.actions:
            self._add_labelled_ranges()
        for ranges in (
            self.actions,
            self.messages,
            self.receives,
            self.posts,
            self.sends,
            self.backwards,
            self.launches,
            self.calls,
        ):
            ranges.sort(key=start_of)
        for ranges_of_kind in self.sharding.values():
            ranges_of_kind.sort()
        self.transfers.sort()
        if self.collective_kernels:  # then the ranges of collectives are only launches by the host
            launch_times = {correlation: span for span, correlation in self.launches}
            self.collectives = [
                collective._replace(posted=launch_times.get(correlation, collective.began))
                for correlation, collective in self.collective_kernels
            ]
        self.collectives.sort(key=lambda collective: collective.began)
        self._launched = [span for span, _ in self.launches]
        self.forward_operations = sorted(self.forwards.values()) if any(len(pair) > 1 for _, pair in self.actions) else []

    def _add_labelled_ranges(self) -> None:
        """Add the ranges that kernels of CUDA graphs were captured in: the launch of a graph has no range."""
        launch_times = {correlation: span for span, correlation in self.launches}
        for (label, correlation), span in self.labelled_kernels.items():
            self._add_range(label, span, {})
            self.graph_launches[span] = launch_times.get(correlation, span.start)

    def on_device(self, span: Range) -> Range | None:
        """Return the range from the first to the last kernel launched in `span`; None if there is none."""
        begin, end = bisect_left(self._launched, span.start), bisect_right(self._launched, span.end)
        ids = (correlation for _, correlation in self.launches[begin:end])
        kernels = [self.kernels[correlation] for correlation in ids if correlation in self.kernels]
        return Range(min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)) if kernels else None


_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_CATEGORIES = _LAUNCHES | {"user_annotation", "python_function", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}


def _extend(ranges: dict[Any, Range], key: Any, span: Range) -> None:
    """Extend the range of `key` so that it includes `span`."""
    earlier = ranges.get(key, span)
    ranges[key] = Range(min(earlier.start, span.start), max(earlier.end, span.end))


def start_of(item: Any) -> float:
    """Return the start of a range, or of the range that a tuple begins with."""
    while isinstance(item, tuple):
        item = item[0]
    return float(item)


def within(ranges: list[Range], outer: Range) -> list[Range]:
    """Return the ranges that start in `outer`. `ranges` must be sorted."""
    return ranges[bisect_left(ranges, outer.start, key=start_of) : bisect_right(ranges, outer.end, key=start_of)]
