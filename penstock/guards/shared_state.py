"""Layers that talk through Python: an object that several stages can reach, and that a forward changes.

In one process a layer may leave a value in an object, and a later layer may read it. In a pipeline the other layer has its own
copy of the object on another rank; on the same rank, other microbatches run in between. `reachable_objects.py` finds the
objects by identity. In the first training step and the first evaluation their contents are compared before and after every
forward, and every backward, in which hooks run. If one has changed, all ranks exchange what they saw, and raise the same error.
What is only read raises nothing.

A change is allowed that is the same on every rank and happens once for each shape of microbatch: tables that are filled when
they are needed. Where every stage leaves values of its own, as hooks that collect outputs do, it is a warning.
"""

import inspect
import random
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import CellType, FunctionType, GeneratorType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from penstock.batch.call import LocalBatch
from penstock.comms.control_group import ControlGroup
from penstock.digest import hash_bytes, tensor_crc
from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.errors import MismatchError
from penstock.guards.reachable_objects import (
    ARRAYS,
    BUFFERS,
    CONTEXTS,
    ENVIRONMENT,
    GENERATORS,
    LOSS_PATH,
    NUMPY_GENERATORS,
    GlobalVariable,
    SharedObject,
    cell_contents,
    class_attributes,
    context_variables,
)
from penstock.mesh.position import MeshPosition
from penstock.python_objects import (
    ITERABLES,
    first_elements,
    has_attributes,
    module_attributes,
    object_attributes,
    stored_elements,
)
from penstock.schedule.table import Action, Kind
from penstock.stage.dtensor import local_shard
from penstock.stage.stage import Stage
from penstock.trees import leaves, map_tensors

Entries = dict[str, Any]  # an object's attributes, elements or variables by name -> what tells a change
ActionFunction = Callable[..., Any]  # (action, received values) -> messages
MAX_STEPS_OBSERVED = 8  # of a kind, until each stage has run two microbatches of one shape
MAX_DEPTH = 4  # of containers in containers whose contents are compared
MAX_ITEMS = 200  # of a container
MAX_COMPARED_VALUES = 2**22  # of a tensor
ADVICE = "return the value with the layer's output, as far as the layer that needs it"
COUNTER_ADVICE = (
    "; if no layer reads it, as a counter or a log, have one in each layer, self.calls += 1, and get them with "
    "pipe.gather(lambda: [..])"
)
GRADIENT_ADVICE = (
    "let hooks leave values in an object of each layer, self.norms.append(..), and get them with pipe.gather(lambda: [..])"
)
LOSS_ADVICE = (
    "return the value with the layer's output, as far as the loss, or add it to the loss where it is made: "
    "ps.auxiliary_loss(value)"
)


class ObjectReport(NamedTuple):
    """What one rank saw of an object."""

    kind: str  # "dict", "class", ..
    paths: Mapping[int, str]  # stage -> where it has the object
    changes: Mapping[int, Mapping[str, bool]]  # stage -> entry that its forwards changed -> whether a value was replaced
    in_backward: bool  # whether only backwards changed it
    repeats: bool  # changed by two microbatches of one shape
    digest: int  # of the contents, at the end


class Finding(NamedTuple):
    """An object that a stage changes and another one uses."""

    label: str
    entries: Sequence[str]  # that change
    reader_path: str
    is_collected: bool  # each stage changes entries of its own, and none leaves it as it is
    text: str


class SharedStateCheck(Observer):
    """Observes this rank's forwards, and checks that none changes an object that other stages use.

    It observes the first training step and the first evaluation; longer, if no two microbatches of these had one shape.
    """

    def __init__(
        self,
        control: ControlGroup,
        objects: Sequence[SharedObject],
        position: MeshPosition,
        placement: Sequence[int],
        stages: Mapping[int, Stage],
    ) -> None:
        self._control = control
        last_stage = len(placement) - 1
        self._objects, self._position, self._placement = [*objects], position, placement
        self._local_stages, self._last_stage = set(stages), last_stage
        self._numbers: dict[int, int] = {}  # id of an object -> its number
        self._steps_observed = {True: 0, False: 0}  # of training, of evaluation
        self._training: bool | None = None  # whether the step that is observed trains
        self._batch: LocalBatch | None = None  # of this step
        self._shapes: dict[tuple[bool, int], list[Any]] = defaultdict(list)  # of microbatches, by kind of step and stage
        self._changes: dict[int, dict[int, dict[str, bool]]] = {}  # number -> stage -> entry -> whether a value was replaced
        self._changed_in_forward = set[int]()  # numbers
        self._piece_shapes: dict[tuple[int, int, int], Any] = {}  # stage, microbatch and slice, in this step
        self._changing_shapes: dict[tuple[int, int], list[Any]] = defaultdict(list)  # number, stage

        self._loss_stage = (
            stages.get(last_stage) if any(LOSS_PATH in found.paths.get(last_stage, "") for found in objects) else None
        )
        self._warned = set[str]()  # labels of objects
        self._loss_call: tuple[Any, Any, Any] | None = None  # the loss, its output and target of one microbatch

    # -- while a step runs ---------------------------------------------------------------------------------------------

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Prepare for a step."""
        training = step.call.is_training
        is_observed = bool(self._objects) and self._steps_observed[training] < MAX_STEPS_OBSERVED
        self._training, self._batch = training if is_observed else None, step.batch
        if is_observed:
            values = [(number, found.value(next(iter(found.paths)))) for number, found in enumerate(self._objects)]
            self._numbers = {id(value): number for number, value in values if value is not None}
        return ()

    @property
    def is_observing(self) -> bool:
        """Whether the step that runs is observed."""
        return self._training is not None

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Compare around each action."""
        if not self.is_observing:
            return functions
        actions = {kind: partial(self._action, run) for kind, run in functions.actions.items()}
        return functions._replace(actions=actions)

    def _action(self, run: ActionFunction, action: Action, values: Sequence[Any]) -> Any:
        numbers = [number for number, found in enumerate(self._objects) if action.stage in found.paths]
        entries_before = [self._entries(number, action.stage) for number in numbers]
        shape = self._shape(action, values)
        with self._record_loss_call(action):
            messages = run(action, values)

        for number, before in zip(numbers, entries_before, strict=True):
            if changes := _changes(before, self._entries(number, action.stage)):
                if action.kind is Kind.F:
                    self._changed_in_forward.add(number)
                self._changing_shapes[number, action.stage].append(shape)
                self._changes.setdefault(number, {}).setdefault(action.stage, {}).update(changes)
        return messages

    def _shape(self, action: Action, values: Sequence[Any]) -> Any:
        """Return the shape of the microbatch's inputs; that of its forward, if this is a backward."""
        assert self._batch is not None
        assert self._training is not None
        piece = action.stage, action.microbatch, action.slice
        if action.kind is Kind.F:
            self._piece_shapes[piece] = _shapes(values if action.stage else [self._batch.inputs_of(action)])
            self._shapes[self._training, action.stage].append(self._piece_shapes[piece])
        return action.kind, self._piece_shapes.get(piece)

    @contextmanager
    def _record_loss_call(self, action: Action) -> Iterator[None]:
        """Record the loss' arguments of a first microbatch, to call it once more in `_loss_reads`."""
        loss_stage, loss_call = self._loss_stage, self._loss_call
        if (
            action.kind is not Kind.F
            or action.stage != self._last_stage
            or loss_stage is None
            or loss_stage.loss_fn is None
            or loss_call is not None
        ):
            yield
            return
        loss_fn = loss_stage.loss_fn

        def record(output: Any, target: Any) -> Tensor:
            self._loss_call = loss_fn, map_tensors(Tensor.detach, output), target
            return loss_fn(output, target)

        loss_stage.loss_fn = record
        try:
            yield
        finally:
            loss_stage.loss_fn = loss_fn

    def end(self, step: ObservedStep) -> float:
        """Return 1 if an action of this rank has changed an object that another stage uses, else 0."""
        return float(self.is_observing and bool(self._changes))

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Raise MismatchError, the same on every rank, if a stage uses what another one's action changes.

        `numbers`: what `end` has returned on every rank. No further step is observed once each stage has run one shape twice.
        """
        if any(numbers):
            self._compare_ranks()
        if self._training is None:
            return
        has_repeated = all(_repeats(shapes) for (training, _), shapes in self._shapes.items() if training == self._training)
        self._steps_observed[self._training] += MAX_STEPS_OBSERVED if has_repeated else 1
        self._training, self._batch, self._numbers, self._loss_call = None, None, {}, None
        self._piece_shapes.clear()
        if all(steps >= MAX_STEPS_OBSERVED for steps in self._steps_observed.values()):
            self._objects = []  # no longer kept alive

    # -- what an object holds ------------------------------------------------------------------------------------------

    def _entries(self, number: int, stage: int) -> Entries:
        found = self._objects[number]
        value = found.value(stage)
        items = _items(value, with_buffers=len(found.registered_stages) > 1)
        return {name: self._content(item, int(item is not value)) for name, item in items}

    def _content(self, value: Any, depth: int) -> Any:
        """Return what tells whether a value has changed, the same in every process."""
        if depth and id(value) in self._numbers:
            return "object", self._objects[self._numbers[id(value)]].label  # its contents are compared by themselves
        if isinstance(value, Tensor):
            return _tensor_content(value)
        if isinstance(value, ARRAYS):
            return "array", value.shape, str(value.dtype), hash_bytes(value.tobytes())
        if isinstance(value, BUFFERS):
            return "buffer", hash_bytes(bytes(value))
        if isinstance(value, GENERATORS):
            return "generator", _generator_state(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum):
            return type(value).__name__, repr(value)
        is_opaque = isinstance(value, type | nn.Module) or callable(value) or depth >= MAX_DEPTH
        if not is_opaque and (isinstance(value, (dict, *ITERABLES)) or has_attributes(value)):
            return type(value).__name__, {name: self._content(item, depth + 1) for name, item in _items(value)}
        return getattr(value, "__qualname__", type(value).__name__)

    # -- after the step, if a rank has seen a change -------------------------------------------------------------------

    def _compare_ranks(self) -> None:
        """Raise as `after`; warn on rank 0, once, where each stage changes entries of its own."""
        control, reason = self._control, "to compare shared objects"
        reports_by_rank: list[dict[str, ObjectReport]] = control.all_gather_value(self._reports(), reason)
        findings = list[Finding]()
        for label in dict.fromkeys(label for reports in reports_by_rank for label in reports):
            reports_of_object = {rank: reports[label] for rank, reports in enumerate(reports_by_rank) if label in reports}
            if finding := self._find(label, reports_of_object):
                findings.append(finding)

        by_loss = [finding for finding in findings if LOSS_PATH in finding.reader_path]
        reads: list[list[bool]] = []
        if by_loss:
            reads = control.all_gather_value([self._loss_reads(finding) for finding in by_loss], reason)
        for finding, *read_by_rank in zip(by_loss, *reads, strict=True):
            if not any(read_by_rank):
                findings.remove(finding)

        for finding in sorted(findings, key=lambda finding: finding.is_collected):
            if not finding.is_collected:
                raise MismatchError(finding.text)
            if control.topology.rank == 0 and finding.label not in self._warned:
                warnings.warn(finding.text, RuntimeWarning, stacklevel=2)
            self._warned.add(finding.label)

    def _reports(self) -> dict[str, ObjectReport]:
        reports = {}
        for number, found in enumerate(self._objects):
            stage = next(iter(found.paths.keys() & self._local_stages), None)
            changes = self._changes.get(number, {})
            value = None if stage is None else found.value(stage)
            if value is not None and stage is not None:
                repeats = any(_repeats(self._changing_shapes[number, stage]) for stage in changes)
                digest = hash_bytes(repr(sorted(self._entries(number, stage).items())).encode())
                in_backward = bool(changes) and number not in self._changed_in_forward
                reports[found.label] = ObjectReport(_kind(value), dict(found.paths), changes, in_backward, repeats, digest)
        return reports

    def _find(self, label: str, reports: Mapping[int, ObjectReport]) -> Finding | None:
        """Return what is wrong with an object, of which the ranks tell `reports`; None if nothing is."""
        paths = {stage: path for report in reports.values() for stage, path in report.paths.items()}
        changes: dict[int, dict[str, bool]] = {}
        for report in reports.values():
            for stage, entries in report.changes.items():
                changes.setdefault(stage, {}).update(entries)
        if not changes or len(paths) < 2:
            return None
        if not any(report.repeats for report in reports.values()) and self._is_equal_in_each_pipeline(reports):
            return None  # a table, filled where it is needed
        in_backward = all(report.in_backward for report in reports.values() if report.changes)
        if in_backward and len({self._placement[stage] for stage in paths}) == 1:
            return None  # what hooks count or collect on one rank

        writer = min(changes)
        readers = [stage for stage in paths if stage not in changes] or [stage for stage in changes if stage != writer]
        reader = min(
            readers,
            key=lambda stage: (LOSS_PATH in paths[stage], self._placement[stage] == self._placement[writer], stage),
        )
        num_writers = Counter(entry for entries in changes.values() for entry in entries)
        replaced = {entry for entries in changes.values() for entry, is_replaced in entries.items() if is_replaced}
        replaced |= {entry for entry in num_writers if not entry.startswith("[")}  # not what stages append to a list
        is_collected = reader in changes and not any(num_writers[entry] > 1 for entry in replaced)
        names = [*changes[writer]]
        kind = next(iter(reports.values())).kind
        text = self._text(kind, paths, writer, reader, names, is_collected, "backward" if in_backward else "forward")
        return Finding(label, names, paths[reader], is_collected, text)

    def _is_equal_in_each_pipeline(self, reports: Mapping[int, ObjectReport]) -> bool:
        pipelines = [ranks for shards in self._position.pipelines for ranks in shards]
        return all(len({reports[rank].digest for rank in ranks if rank in reports}) <= 1 for ranks in pipelines)

    def _text(
        self,
        kind: str,
        paths: Mapping[int, str],
        writer: int,
        reader: int,
        entries: Sequence[str],
        is_collected: bool,
        direction: str,
    ) -> str:
        names = ", ".join(entries[:3]) + ", .." * (len(entries) > 3)
        if LOSS_PATH in paths[reader]:
            what = f"loss_fn reads {names or kind}, which the forward of {kind} {paths[writer]} sets"
            return f"{what}, but that runs on another rank or stage: {LOSS_ADVICE}"
        which = f" ({names})" if names else ""
        places = f"{paths[writer]} of stage {writer} and {paths[reader]} of stage {reader} use one {kind}"
        if is_collected:
            return (
                f"{places}, in which the {direction}s of each stage leave values of their own{which}, and a rank has those of "
                f"its own stages only: if a layer or the loss reads them, {ADVICE}; if only you do, pipe.gather(..) gets them"
            )
        if self._placement[writer] == self._placement[reader]:
            reason = f"other microbatches run before stage {reader} would read it"
        else:
            reason = f"stage {reader} is on another rank, which has a copy of its own"
        advice = GRADIENT_ADVICE if direction == "backward" else ADVICE + COUNTER_ADVICE
        return f"{places}, and a {direction} of stage {writer} changes it{which}, but {reason}: {advice}"

    def _loss_reads(self, finding: Finding) -> bool:
        """Whether the loss, called once more, uses what another stage has changed."""
        found = next((found for found in self._objects if found.label == finding.label), None)
        value = None if found is None else found.value(self._last_stage)
        if self._loss_call is None or value is None:
            return False
        loss_fn, output, target = self._loss_call
        random_state = torch.get_rng_state()
        try:
            with torch.no_grad(), _made_unreadable(value, finding.entries) as irreplaceable:
                loss_fn(output, target)
            return bool(irreplaceable)
        except Exception:  # _UnreadableError, or what the loss made of it
            return True
        finally:
            torch.set_rng_state(random_state)


# -- contents --------------------------------------------------------------------------------------------------------------

_MISSING = object()


def _items(value: Any, with_buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name; a tensor, an array or a generator itself."""
    if value is ENVIRONMENT:
        yield from ENVIRONMENT.items()
    elif isinstance(value, (Tensor, *ARRAYS, *BUFFERS, *GENERATORS)):
        yield "", value
    elif isinstance(value, GeneratorType):
        yield from inspect.getgeneratorlocals(value).items()
    elif isinstance(value, GlobalVariable):
        yield value.name, value.namespace.get(value.name)
    elif isinstance(value, CellType):
        yield from (("", content) for content in cell_contents(value))
    elif isinstance(value, CONTEXTS):
        yield from context_variables(value).items()
    elif isinstance(value, FunctionType):
        yield from vars(value).items()
    elif isinstance(value, nn.Module):
        yield from module_attributes(value).items()
        yield from value.named_buffers(recurse=False) if with_buffers else ()
    elif isinstance(value, type):
        yield from class_attributes(value).items()
    elif isinstance(value, dict):
        yield from ((repr(key)[:80], item) for key, item in first_elements(value, MAX_ITEMS))
    elif isinstance(value, set | frozenset):
        yield from sorted((repr(item)[:80], item) for item in stored_elements(value))[:MAX_ITEMS]
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", item) for index, item in enumerate(first_elements(value, MAX_ITEMS)))
    elif value is not None:
        yield from object_attributes(value).items()


def _changes(before: Entries, after: Entries) -> dict[str, bool]:
    """Return the entries that differ -> whether an old value was replaced, not only by the tensor of a later forward."""
    names = [name for name in {**before, **after} if before.get(name, _MISSING) != after.get(name, _MISSING)]
    return {name: not _is_left_by_forward(name, before.get(name, _MISSING), after.get(name, _MISSING)) for name in names}


def _is_left_by_forward(name: str, before: Any, after: Any) -> bool:
    is_new = before is _MISSING or before == ("NoneType", "None")
    return is_new or (bool(name) and all(isinstance(content, tuple) and content[0] == "tensor" for content in (before, after)))


def _tensor_content(tensor: Tensor) -> Any:
    local = local_shard(tensor.detach())
    if local.is_meta or local.layout != torch.strided:
        return "tensor", tuple(tensor.shape), str(tensor.dtype)
    if local.numel() > MAX_COMPARED_VALUES:
        local = local.flatten()[:: local.numel() // MAX_COMPARED_VALUES]
    return "tensor", tuple(tensor.shape), str(tensor.dtype), tensor_crc(local)


def _generator_state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(tensor_crc(generator.get_state()))
    if isinstance(generator, random.Random):
        return str(hash_bytes(repr(generator.getstate()).encode()))
    if isinstance(generator, NUMPY_GENERATORS):
        is_new_style = hasattr(generator, "bit_generator")  # a Generator; a RandomState has `get_state`
        return repr(generator.bit_generator.state if is_new_style else generator.get_state())
    return repr(generator)


def _kind(value: Any) -> str:
    if value is ENVIRONMENT:
        return "environment"
    if isinstance(value, GlobalVariable):
        return f"global variable {value.name}"
    if isinstance(value, CellType):
        return "variable of a closure"
    if isinstance(value, FunctionType):
        return f"function {value.__name__}"
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _shapes(values: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves(values))


def _repeats(shapes: Sequence[Any]) -> bool:
    return len(shapes) > len(set(shapes))


# -- does the loss read it? ------------------------------------------------------------------------------------------------


class _UnreadableError(Exception):
    """Raised when the value of an entry is used."""


def _refuse_use(*_: Any, **__: Any) -> NoReturn:
    raise _UnreadableError


_UNREADABLE_METHODS = (
    *("__bool__", "__len__", "__iter__", "__getitem__", "__call__", "__float__", "__int__", "__index__", "__eq__", "__ne__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__getattr__", "__contains__", "__torch_function__"),
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul") for side in ("", "r", "i")),
)
_Unreadable = type("_Unreadable", (), dict.fromkeys(_UNREADABLE_METHODS, _refuse_use))


@contextmanager
def _made_unreadable(value: Any, entries: Iterable[str]) -> Iterator[list[str]]:
    """Replace the entries of an object by one that raises when it is used. Yields those that cannot be replaced."""
    places: list[tuple[Any, Any]] = []  # a dict or list, and a key
    if isinstance(value, GlobalVariable):
        places = [(value.namespace, value.name)]
    elif isinstance(value, dict):
        places = [(value, key) for key in value if repr(key)[:80] in entries]
    elif isinstance(value, list):
        places = [(value, index) for index in range(len(value)) if f"[{index}]" in entries]
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        places = [(vars(value), name) for name in entries]

    before = [(container, key, _value_at(container, key)) for container, key in places]
    try:
        for container, key in places:
            container[key] = _Unreadable()
        yield [*entries][len(places) :]
    finally:
        for container, key, item in before:
            if item is _MISSING:
                del container[key]
            else:
                container[key] = item


def _value_at(container: Any, key: Any) -> Any:
    return container.get(key, _MISSING) if isinstance(container, dict) else container[key]
