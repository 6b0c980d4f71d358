"""What is kept of the events in one rank's trace: ranges of actions and messages, operations, kernels, what else took time."""

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
MAX_ELEMENTS = 2**48  # of a message; beyond that the number is damaged
ONLY_STAGE = 0  # of a rank whose ranges name no stage, until it is known which rank it is


class Range(NamedTuple):
    """From `start` to `end`, in seconds of the rank's clock."""

    start: float
    end: float


class CollectiveCall(NamedTuple):
    """A collective, in seconds of the rank's clock: when it was posted, when it began on its device, and when it ended."""

    name: str
    posted: float
    began: float
    end: float


class OptimizerStep:
    """A range of an optimizer's step, how many operations ran in it, and whether those were of many tensors each."""

    def __init__(self, when: Range) -> None:
        self.when, self.operations, self.is_fused = when, 0, False


class Marks:
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
        self.calls: list[tuple[Range, Kind]] = []  # forwards and backwards that say no microbatch
        self.collectives: list[CollectiveCall] = []
        self.collective_kernels: list[tuple[int, CollectiveCall]] = []  # with correlation ids; posted when they are launched
        self.transfers: list[Range] = []  # sends and receives on the device
        self.loading: list[Range] = []  # a data loader's next()
        self.optimizer: list[OptimizerStep] = []
        self.message_bytes = 0.0  # of the largest message
        self.lacks_stages = False
        self.is_of_torch_runtime = False
        self.sharding: dict[str, list[Range]] = {"UNSHARD": [], "RESHARD": [], "REDUCE_GRAD": []}  # what torch's runtime calls
        self.labelled_kernels: dict[tuple[str, int], Range] = {}  # a CUDA graph's, by the range they were captured in
        self.graph_launches: dict[Range, float] = {}  # an action that a CUDA graph ran -> when the host launched the graph

    def add(self, event: Any) -> None:
        """Keep what matters of `event`; leave out what is none of a profiler's."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, name, args = event.get("cat"), event.get("name"), event.get("args")
        if not isinstance(category, str) or category not in _CATEGORIES or not isinstance(name, str):
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
            self._add_range(name, when, args)
        elif category == "cpu_op":
            self._add_operation(name, when, args)
        elif category == "python_function":
            self._add_call(name, when)
        elif isinstance(correlation := args.get("correlation"), int):
            if category in _LAUNCHES:
                self.launches.append((when.start, correlation))
            else:
                self._add_kernel(name, when, args, correlation)

    def _add_kernel(self, name: str, when: Range, args: dict[str, Any], correlation: int) -> None:
        label = args.get("name", args.get("annotation"))
        if isinstance(label, str):
            _extend(self.labelled_kernels, (label, correlation), when)
        if "nccl" in name.lower():
            self._add_communication(name, when, args, correlation)
        else:
            _extend(self.kernels, correlation, when)  # all of a CUDA graph have the id of its launch

    def _add_communication(self, kernel: str, when: Range, args: dict[str, Any], correlation: int) -> None:
        """Keep a kernel of NCCL: a collective by its arguments, of an older torch by its own name; else a message."""
        name, elements = args.get("Collective name"), args.get("In msg nelems")
        if name is None and (match := _NCCL_KERNEL.fullmatch(kernel)):
            name = match[1]
        if isinstance(name, str) and name.lstrip("_") not in _TRANSFERS:
            self.collective_kernels.append((correlation, CollectiveCall(name.lstrip("_"), when.start, *when)))
            return
        self.transfers.append(when)
        if isinstance(elements, int):
            self._add_message(elements, args.get("dtype"))

    def _add_message(self, elements: float, dtype: Any) -> None:
        if 0 <= elements < MAX_ELEMENTS:
            self.message_bytes = max(self.message_bytes, float(elements) * _BYTES.get(str(dtype).lower(), 0))

    def _add_call(self, name: str, when: Range) -> None:
        if match := _CALL.fullmatch(name):
            self.calls.append((when, Kind.F if match[1] else Kind.B))

    def _add_range(self, name: str, when: Range, args: dict[str, Any]) -> None:
        if match := _ACTION.fullmatch(name):
            self.actions.append((when, (Action.parse(match[2]),)))
            self.is_of_torch_runtime |= match[1] is not None
        elif match := _PAIR.fullmatch(name):
            self.actions.append((when, (Action.parse(match[1]), Action.parse(match[2]))))
        elif match := _SINGLE_STAGE.fullmatch(name):
            kind = Kind.F if match[1] == "Forward" else Kind.B
            self.actions.append((when, (Action(kind, ONLY_STAGE, int(match[2])),)))
            self.lacks_stages = True
        elif match := _MESSAGE.fullmatch(name):
            kind = Kind.F if match[3] == "F" else Kind.B
            self.messages.append((when, Action(kind, int(match[1]), int(match[4])) if match[2] == "RECV" else None))
        elif match := _SHARDING.fullmatch(name):
            self.sharding[match[1]].append(when)
        elif match := _STEP.fullmatch(name):
            self.steps[int(match[1])] = when
        elif name in ("gloo:recv", "nccl:recv"):
            self.receives.append(when)
            self._add_shape(args)
        elif (match := _COLLECTIVE.fullmatch(name)) and match[1] not in _TRANSFERS:
            self.collectives.append(CollectiveCall(match[1], when.start, *when))
        elif name.startswith("enumerate(DataLoader)#"):
            self.loading.append(when)
        elif name.startswith("Optimizer.step#"):
            self.optimizer.append(OptimizerStep(when))
        else:
            self._add_call(name, when)

    def _add_shape(self, args: dict[str, Any]) -> None:
        """Keep the size of a message, which is in the trace with `record_shapes=True`."""
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):
            self._add_message(math.prod(args["Input Dims"][0]), args["Input type"][0])

    def _add_operation(self, name: str, when: Range, args: dict[str, Any]) -> None:
        if self.optimizer and self.optimizer[-1].when.start <= when.start < self.optimizer[-1].when.end:
            self.optimizer[-1].operations += name.startswith("aten::")
            self.optimizer[-1].is_fused |= name.startswith(("aten::_foreach", "aten::_fused"))
            return
        number = args.get("Sequence number")
        if name == "c10d::send":
            self.sends.append(when)
            self.posts.append(when.start)
        elif name == "c10d::recv_":
            self.posts.append(when.start)
        elif name.startswith("autograd::engine::evaluate_function"):
            self.backwards.append((when, number if isinstance(number, int) else -1))
        elif isinstance(number, int) and args.get("Fwd thread id") == 0:
            earlier = self.forwards.get(number)
            if earlier is None or earlier.start <= when.start:
                self.forwards[number] = when

    def sort(self) -> None:
        """Bring everything into the order of time."""
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
        for of_name in self.sharding.values():
            of_name.sort()
        self.transfers.sort()
        if self.collective_kernels:  # then the ranges are the host's launches alone
            launched = {correlation: when for when, correlation in self.launches}
            self.collectives = [
                collective._replace(posted=launched.get(correlation, collective.began))
                for correlation, collective in self.collective_kernels
            ]
        self.collectives.sort(key=lambda collective: collective.began)
        self._launched = [when for when, _ in self.launches]
        self.forward_operations = sorted(self.forwards.values()) if any(len(pair) > 1 for _, pair in self.actions) else []

    def _add_labelled_ranges(self) -> None:
        """Keep as ranges what kernels of CUDA graphs say that they were captured in, as the graphs' launches have none."""
        launched = {correlation: when for when, correlation in self.launches}
        for (label, correlation), when in self.labelled_kernels.items():
            self._add_range(label, when, {})
            self.graph_launches[when] = launched.get(correlation, when.start)

    def on_device(self, when: Range) -> Range | None:
        """From the first to the last kernel that was launched in `when`; None where there are none."""
        begin, end = bisect_left(self._launched, when.start), bisect_right(self._launched, when.end)
        ids = (correlation for _, correlation in self.launches[begin:end])
        kernels = [self.kernels[correlation] for correlation in ids if correlation in self.kernels]
        return Range(min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)) if kernels else None


_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_CATEGORIES = _LAUNCHES | {"user_annotation", "python_function", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}


def _extend(ranges: dict[Any, Range], key: Any, when: Range) -> None:
    earlier = ranges.get(key, when)
    ranges[key] = Range(min(earlier.start, when.start), max(earlier.end, when.end))


def start_of(item: Any) -> float:
    """The start of a range, alone or with what belongs to it."""
    while isinstance(item, tuple):
        item = item[0]
    return float(item)


def within(ranges: list[Range], outer: Range) -> list[Range]:
    """Those of `ranges`, sorted, that start in `outer`."""
    return ranges[bisect_left(ranges, outer.start, key=start_of) : bisect_right(ranges, outer.end, key=start_of)]
