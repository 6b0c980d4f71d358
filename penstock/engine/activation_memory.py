"""The bytes that a microbatch in flight keeps alive on a stage, measured in the first step of every kind of batch.

While a forward runs, the storages of its inputs and of everything its operations return are recorded, by weak reference.
Memory that still exists when the backward begins and is freed by its end counts as kept by the microbatch, once for each
storage. So parameters, the batch, and whatever lives longer count nothing, and what is recomputed counts only while it exists.
Between I and W the same, with the gradients that W still needs. Of slices, also the gradients of keys and values that the
backward of the last slice leaves to the earlier ones. What a loss keeps of a teacher's output belongs to its microbatch.

Not seen: memory that code takes without torch's operations, and what compiled code saves. A stage with a compiled module in
it is not measured; a compiled function inside a stage seems to keep nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.batch.agreement import MAX_KINDS, Agreed
from penstock.engine.actions import ActionFunction
from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.recent import RecentDict
from penstock.schedule.memory import ActivationSize
from penstock.schedule.table import Action, Kind
from penstock.stage.stage import Stage
from penstock.torch_private import TorchDispatchMode, is_compiled, preload_dynamo, storage_key
from penstock.trees import leaves


class StorageSet:
    """The storages of some tensors, each once, by weak reference."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # key -> storage, bytes
        self.add(tensors)

    def add(self, tensors: Iterable[Any]) -> None:
        """Add the storages of those of `tensors` that are tensors; for a wrapper subclass, those of its inner tensors."""
        for tensor in tensors:
            if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
                self.add(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            elif isinstance(tensor, Tensor):
                with suppress(NotImplementedError, RuntimeError):  # a sparse tensor, for one, has no storage
                    if (key := storage_key(tensor)) not in self._storages:
                        storage = tensor.untyped_storage()
                        self._storages[key] = StorageWeakRef(storage), storage.nbytes()

    def alive_subset(self) -> "StorageSet":
        """Return the storages that exist now."""
        subset = StorageSet()
        subset._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return subset

    def num_bytes(self) -> int:
        """Return the bytes of all storages."""
        return sum(size for _, size in self._storages.values())

    def freed_bytes(self) -> int:
        """Return the bytes of the storages that no longer exist."""
        return sum(size for storage, size in self._storages.values() if storage.expired())


class _OutputRecorder(TorchDispatchMode):
    """Adds what every operation returns to a set of storages."""

    def __init__(self, storages: StorageSet) -> None:
        super().__init__()
        self._storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._storages.add(leaves(output))
        return output


class MemoryMeasurement:
    """Measures what microbatches keep on each of a rank's `stages` while a training step runs, with all their `slices`.

    Recording takes time, so only the `microbatches` are slowed.
    """

    def __init__(self, stages: Mapping[int, Stage], slices: int = 1) -> None:
        preload_dynamo()
        self._stages = {index: stage for index, stage in stages.items() if not any(map(is_compiled, stage.module.modules()))}
        self._slices = slices
        self.microbatches: Collection[int] = (0,)
        self._first_measured: int | None = 0  # of the size that the first microbatch with a backward has
        # By stage and slice number.
        self._of_forward: dict[tuple[int, int], StorageSet] = {}  # until its backward
        self._around_input_backward: dict[tuple[int, int], tuple[StorageSet, StorageSet]] = {}  # alive before I, and after it
        self.sizes_by_microbatch: dict[tuple[int, int], ActivationSize] = {}  # the result, by stage and microbatch
        self.teacher_outputs: dict[int, int] = {}  # bytes, by microbatch, on the rank of the loss

    @property
    def sizes(self) -> dict[int, ActivationSize]:
        """The activation size of every stage, as the first microbatch had it."""
        return {stage: size for (stage, number), size in self.sizes_by_microbatch.items() if number == self._first_measured}

    @property
    def teacher_output_bytes(self) -> int:
        """The bytes of the largest output of the teacher that was measured, of one microbatch; 0 on other ranks."""
        return max(self.teacher_outputs.values(), default=0)

    def wrap_actions(
        self, functions: Mapping[Kind, ActionFunction], teacher_outputs_for: ActionFunction = lambda action, values: ()
    ) -> dict[Kind, ActionFunction]:
        """Return the engine's function for each kind of action, with the measurement around it.

        `teacher_outputs_for`: see `StepActions`.
        """
        forward: ActionFunction = partial(self._forward, teacher_outputs_for)
        backward: ActionFunction = self._backward
        wrappers = {Kind.F: forward, Kind.B: backward, Kind.I: backward, Kind.W: self._backward_weight}
        return {kind: partial(wrappers[kind], function) for kind, function in functions.items()}

    def choose_microbatches(self, agreed: Agreed, num_unmeasured: int) -> None:
        """Measure one microbatch of each size among those that have a backward, after some that ran without this."""
        elements = [piece.elements for piece in agreed.pieces[:: self._slices]]
        with_backward = [number for number in range(len(elements)) if number not in agreed.forward_only]
        first_of_size = {elements[number]: number for number in reversed(with_backward) if number >= num_unmeasured}
        self._first_measured = first_of_size.get(elements[with_backward[0]]) if with_backward else None
        self.microbatches = frozenset(first_of_size.values())
        self._of_forward = {
            key: value for key, value in self._of_forward.items() if key[1] // self._slices in self.microbatches
        }

    def _forward(
        self, teacher_outputs_for: ActionFunction, function: ActionFunction, action: Action, values: Sequence[Any]
    ) -> Any:
        if action.stage not in self._stages or action.microbatch not in self.microbatches:
            return function(action, values)
        if teacher_outputs := leaves(teacher_outputs_for(action, values)):
            self.teacher_outputs[action.microbatch] = StorageSet(teacher_outputs).num_bytes()
        if self._stages[action.stage].is_frozen:
            self._add_size(action.stage, action.index_among_slices(self._slices), 0, 0)
            return function(action, values)

        storages = self._of_forward[action.stage, action.index_among_slices(self._slices)] = StorageSet(
            [*leaves(values), *teacher_outputs]
        )
        with _OutputRecorder(storages):
            return function(action, values)

    def _backward(self, function: ActionFunction, action: Action, values: Any) -> Any:
        key = stage, number = action.stage, action.index_among_slices(self._slices)
        if key not in self._of_forward:
            return function(action, values)

        alive_before = self._of_forward.pop(key).alive_subset()
        messages = function(action, values)
        if action.kind is Kind.I:
            alive_after = alive_before.alive_subset()
            alive_after.add(self._stages[stage].saved_for_weight_backward(number))
            self._around_input_backward[key] = alive_before, alive_after
        else:
            freed = alive_before.freed_bytes()
            self._add_size(stage, number, freed, freed)
        if self._slices > 1 and action.slice == self._slices - 1:
            size = self._stages[stage].gradient_bytes_for_earlier_slices(action.microbatch)
            self._add_size(stage, number, size, 0)
        return messages

    def _backward_weight(self, function: ActionFunction, action: Action, values: Any) -> Any:
        messages = function(action, values)
        for stage, number in [key for key in self._around_input_backward if key[0] == action.stage]:
            if not self._stages[stage].saved_for_weight_backward(number):
                alive_before, alive_after = self._around_input_backward.pop((stage, number))
                self._add_size(stage, number, alive_before.freed_bytes(), alive_after.freed_bytes())
        return messages

    def _add_size(self, stage: int, number: int, act: float, keep: float) -> None:
        """Add what one slice keeps to what its microbatch does."""
        key = stage, number // self._slices
        of_others = self.sizes_by_microbatch.get(key, ActivationSize(0, 0))
        self.sizes_by_microbatch[key] = ActivationSize(of_others.act + act, of_others.keep + keep)


class MemoryObserver(Observer):
    """Measures the first training step of each kind, and remembers what it has found of the last kinds."""

    only_in_new_steps = True

    def __init__(self, stages: Mapping[int, Stage], slices: int) -> None:
        self._stages, self._slices = stages, slices
        # By step kind.
        self._sizes = RecentDict[Any, Mapping[int, ActivationSize]](MAX_KINDS)
        self._teacher_output_bytes = RecentDict[Any, int](MAX_KINDS)
        self.measurement: MemoryMeasurement | None = None  # of the last step that was the first of its kind

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Begin to measure, if this rank has not seen such a step."""
        self.measurement = MemoryMeasurement(self._stages, self._slices)
        return ()

    def compare(self, step: ObservedStep, rows: Any) -> None:
        """Begin now if only another rank's part is new: microbatch 0 may have run. Evaluations are not measured."""
        num_unmeasured = 0
        if not step.is_new_on_rank:
            num_unmeasured = step.clock.num_before_rows
            self.measurement = MemoryMeasurement(self._stages, self._slices) if step.call.is_training else None
        if self.measurement is not None:
            self.measurement.choose_microbatches(step.agreed, num_unmeasured)

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Measure around the actions."""
        if self.measurement is None:
            return functions
        return functions._replace(actions=self.measurement.wrap_actions(functions.actions, step.actions.teacher_outputs_for))

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Remember what was found."""
        if self.measurement is not None:
            self._sizes.add(step.agreed.step_kind, self.measurement.sizes)
            self._teacher_output_bytes.add(step.agreed.step_kind, self.measurement.teacher_output_bytes)

    def sizes_of(self, step_kind: Any) -> Mapping[int, ActivationSize]:
        """Return what a microbatch keeps in steps of `step_kind`, by stage; nothing if it was not measured."""
        return self._sizes.get(step_kind, {})

    def teacher_output_bytes_of(self, step_kind: Any) -> int:
        """Return the bytes of a teacher's output of a microbatch in steps of `step_kind`; 0 if it was not measured here."""
        return self._teacher_output_bytes.get(step_kind, 0)
