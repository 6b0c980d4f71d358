"""Weights and buffers that a forward changes through `.data`, of which autograd does not know.

Autograd raises an error if a forward changes a weight that a backward needs, but not if it changes the weight's `.data`. In a
pipeline other microbatches are in flight then, whose backwards would use the changed weight; in one process each backward comes
before the next forward. With `recompute=` the backward runs the forward once more, which would change the weight once more,
and would begin with a buffer that is changed already. Only some values of each tensor are compared, in new kinds of steps.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.batch.pieces import scalars_to_floats
from penstock.comms.control_group import ControlGroup
from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.errors import MismatchError
from penstock.guards.tensor_snapshot import TensorSnapshot
from penstock.mesh.fsdp import fsdp_modules
from penstock.schedule.table import Action, Kind
from penstock.stage.stage import Stage
from penstock.torch_private import buffer_slots

ActionFunction = Callable[..., Any]
ADVICE = "change it between steps, as optimizers do"


class ChangedWeightsCheck(Observer):
    """Refuses a training step in which a forward of this rank's `stages` has changed what a backward needs.

    `names`: of each stage: its own name of each entry of its state -> the name in the uncut model.
    """

    only_in_new_steps = True

    def __init__(
        self, control: ControlGroup, stages: Mapping[int, Stage], names: Sequence[Mapping[str, str]], recomputes: bool
    ) -> None:
        self._control, self._stages, self._names, self._recomputes = control, stages, names, recomputes
        self._in_flight: dict[int, set[tuple[int, int]]] = defaultdict(set)  # stage -> microbatches and slices
        self._comparisons: list[tuple[str, Tensor]] = []  # what is said if a value has changed -> whether it has

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Prepare for a step."""
        self._in_flight.clear()
        self._comparisons.clear()
        return ()

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Compare around each forward, and around what recomputes one."""
        if not step.call.is_training:
            return functions
        actions: dict[Kind, ActionFunction] = {**functions.actions, Kind.F: partial(self._forward, functions.actions[Kind.F])}
        for kind in {Kind.B, Kind.I} & actions.keys():
            actions[kind] = partial(self._backward, actions[kind], step)
        return functions._replace(actions=actions)

    def _forward(self, run: ActionFunction, action: Action, values: Sequence[Any]) -> Any:
        if action.stage not in self._stages:  # a teacher's, which has no backward
            return run(action, values)
        parameters, buffers = self._parameters(action.stage), self._buffers(action.stage)
        messages = run(action, values)
        others_in_flight = bool(self._in_flight[action.stage])
        self._in_flight[action.stage].add((action.microbatch, action.slice))

        for name, state in parameters.items():
            if others_in_flight and state.tensor.requires_grad and state.has_same_version():
                self._compare(state, self._text(action.stage, f"weight {name}", "while other microbatches need it"))
        for name, state in buffers.items():
            if state.has_same_version():
                reason = "where recompute= does not see it, and would begin with the changed one"
                advice = "leave out .data, under torch.no_grad()"
                self._compare(state, self._text(action.stage, f"buffer {name}", reason, advice))
        return messages

    def _backward(self, run: ActionFunction, step: ObservedStep, action: Action, values: Sequence[Any]) -> Any:
        # After its last backward a sharded stage's gathered parameters are freed, by another thread.
        is_freed = action in step.agreed.program.last_backwards and bool(fsdp_modules(self._stages[action.stage].module))
        parameters = self._parameters(action.stage) if self._recomputes and not is_freed else {}
        messages = run(action, values)
        self._in_flight[action.stage].discard((action.microbatch, action.slice))
        for name, state in parameters.items():
            self._compare(state, self._text(action.stage, f"weight {name}", "and recompute= runs it, and changes it, twice"))
        return messages

    def _compare(self, state: TensorSnapshot, text: str) -> None:
        """Compare on the tensor's device, for which the host waits at the end of the step."""
        self._comparisons.append((text, state.has_other_values()))

    def _parameters(self, stage: int) -> dict[str, TensorSnapshot]:
        return self._states(stage, self._stages[stage].module.named_parameters())

    def _buffers(self, stage: int) -> dict[str, TensorSnapshot]:
        if not self._recomputes:
            return {}
        slots = buffer_slots(self._stages[stage].module)  # running statistics of torch's own layers are not read in training
        own_slots = (slot for slot in slots if not type(slot.owner).__module__.startswith("torch.nn."))
        return self._states(stage, ((slot.name, slot.tensor) for slot in own_slots))

    def _states(self, stage: int, named_tensors: Any) -> dict[str, TensorSnapshot]:
        names = self._names[stage]
        return {
            names.get(name, name): TensorSnapshot.of(tensor)
            for name, tensor in named_tensors
            if not (hasattr(tensor, "placements") or tensor.is_meta or tensor.is_inference() or tensor.layout != torch.strided)
        }

    def _text(self, stage: int, what: str, reason: str, advice: str = ADVICE) -> str:
        return f"a forward of stage {stage} changes its {what} in place, through .data, {reason}: {advice}"

    def end(self, step: ObservedStep) -> float:
        """Return 1 if a value has changed on this rank."""
        return max(self._read_comparisons(), default=0.0)

    def _read_comparisons(self) -> list[float]:
        return scalars_to_floats([is_changed for _, is_changed in self._comparisons])

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Raise MismatchError, the same on every rank, if something was found."""
        if any(numbers):
            values = self._read_comparisons()
            found = [text for (text, _), is_changed in zip(self._comparisons, values, strict=True) if is_changed]
            findings = self._control.all_gather_value(found[:1], "to compare changed weights")
            raise MismatchError(next(chain.from_iterable(findings)))
