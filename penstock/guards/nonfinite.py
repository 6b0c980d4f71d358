"""Find the first value of a step that is NaN or infinite, among outputs of layers and stages, losses and gradients.

The test is `tensor.sum()`: cheap, and not finite if any element is not; only then elements are tested. NaN spreads to all that
is computed from it, so each rank records its first finding only. Of all ranks' findings the earliest that was not in received
data is the origin. Its cause is in the parameters, in the batch, or in the step's own computation.

    rank 0   forward finite   ------------------------------------>  backward received nan
    rank 1                     forward of layers.5 gave nan           loss gave nan
                               ^ the origin
"""

import cmath
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.batch.call import Call
from penstock.comms.control_group import ControlGroup
from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.engine.report import StepResult
from penstock.engine.rollback import StepRollback
from penstock.engine.step import Engine
from penstock.errors import NonFiniteError, warn_user
from penstock.options import OnNonfinite
from penstock.schedule.table import Action, Kind
from penstock.stage.dtensor import local_shard
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage
from penstock.torch_private import is_compiled, storage_key, strip_compiled_prefix
from penstock.trees import tensors

OWN, SHARED, RECEIVED = range(3)  # source: computed here; averaged with other ranks; sent by another rank. The least is blamed
STATE, DATA, COMPUTED = "parameters", "data", "computed"  # causes
CAUSE_TEXTS = {STATE: "and was before the step began", DATA: "which came with the batch", COMPUTED: "and came up in the step"}
LOSS = "the loss"
SMALL_GRADIENT_ELEMENTS = 2**14  # gradients up to this size are tested after each backward, to know the microbatch


class NonFiniteValue(NamedTuple):
    """The first value on a rank that was not finite, and where it was. The smallest of all ranks is the origin."""

    source: int  # OWN, SHARED or RECEIVED
    seconds: float  # on the shared clock
    rank: int
    stage: int
    action: str
    microbatch: int
    description: str  # "layers.3 gave nan"

    def __str__(self) -> str:
        action = f", action {self.action}, microbatch {self.microbatch}" if self.action else ""
        suffix = " at the end of the step" if self.source == SHARED else ""
        return f"rank {self.rank}, stage {self.stage}{action}: {self.description}{suffix}"


def nonfinite_kind(tensor: Tensor, may_be_mask: bool = False) -> str:
    """Return "nan" or "inf" if an element is not finite, else "".

    `may_be_mask`: a tensor of minus infinity and zeros only is a mask, and counts as finite.
    """
    tensor = local_shard(tensor.detach())
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
        return ""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all()):  # the sum of finite elements may overflow
        return ""
    if bool(tensor.isnan().any()):
        return "nan"
    return "" if may_be_mask and bool(((tensor == 0) | (tensor == -torch.inf)).all()) else "inf"


def nonfinite_kind_in_tree(tree: Any, may_be_mask: bool = True) -> str:
    """Return "nan" or "inf" for the first tensor of a tree that is not finite, else ""."""
    return next(filter(None, (nonfinite_kind(tensor, may_be_mask) for tensor in tensors(tree))), "")


class NonFiniteMonitor(Observer):
    """Tests what this rank's `stages` compute in a step. `names`: as in `RankParameters`.

    What is tested, in the order of an action:

        forward    received values, output of each layer (by hooks), output of the stage, the loss
        backward   received gradients, gradient of each layer's output (by hooks), sent gradients, small gradients of weights
        at the end all gradients of weights

    Hooks exist during a step only. A compiled module is tested as a whole.
    """

    def __init__(
        self,
        control: ControlGroup,
        stages: Mapping[int, Stage],
        parameters: RankParameters,
        names: Sequence[Mapping[str, str]],
    ) -> None:
        self.first_value: NonFiniteValue | None = None
        self._control, self._rank = control, control.topology.rank
        self._stages, self._parameters, self._names = stages, parameters, names
        renamed = any(
            uncut != strip_compiled_prefix(stage_name) for stage_names in names for stage_name, uncut in stage_names.items()
        )
        self._prefix = {index: f"{index}." if renamed else "" for index in stages}

        # Set for each step.
        self.is_active, self._checks_gradients, self._clock_offset = False, True, 0.0
        self.origin: NonFiniteOrigin | None = None  # of what the last step has found, the same on every rank

        # Set for each action.
        self._action: Action | None = None  # that runs
        self._last_finite = ""  # the layer whose output had the last gradient that was finite
        self._last_output: Callable[[], Any] = lambda: None  # the last output that was tested, while it exists

        for stage in stages.values():
            if stage.loss_fn is not None:
                stage.loss_fn = partial(self._run_loss, stage.loss_fn)

    @contextmanager
    def watch_step(self, check_gradients: bool, clock_offset: float) -> Iterator[None]:
        """Test values during a step. `clock_offset` is added to this rank's times."""
        self.is_active, self.first_value, self.origin = True, None, None
        self._checks_gradients, self._clock_offset = check_gradients, clock_offset
        hooks = [hook for index, stage in self._stages.items() for hook in self._register_hooks(index, stage.module)]
        try:
            yield
        finally:
            self.is_active, self._action = False, None
            for hook in hooks:
                hook.remove()

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Test around each action."""
        if not self.is_active:
            return functions
        actions = {kind: partial(self._run_action, function) for kind, function in functions.actions.items()}
        return functions._replace(actions=actions)

    def end(self, step: ObservedStep) -> float:
        """Test all gradients, which are complete at the end of a step. Return 1 if anything was not finite, else 0."""
        if self.is_active and self.first_value is None:
            self._check_weight_gradients(self._stages, SHARED)
        return float(self.is_active and self.first_value is not None)

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Look for the origin, together with all ranks, if one has found something."""
        if any(numbers):
            batch = {"inputs": step.batch.inputs, "target": step.batch.targets}
            self.origin = find_origin(self._control, self, self._parameters, batch)

    def _register_hooks(self, index: int, module: nn.Module) -> Iterator[Any]:
        """Register a forward hook for every submodule of a stage that is not inside of a compiled one."""
        compiled = [
            name
            for name, submodule in module.named_modules()
            if is_compiled(submodule) or isinstance(submodule, torch.jit.ScriptModule)
        ]
        for name, submodule in module.named_modules():
            is_inside = any(name == outer or not outer or name.startswith(f"{outer}.") for outer in compiled)
            repeats_last_layer = not name and type(module) is nn.Sequential
            if not is_inside and not repeats_last_layer:
                hook = partial(self._check_layer_output, self._prefix[index] + name if name else "")
                yield submodule.register_forward_hook(hook, with_kwargs=True)

    def _run_action(self, function: Callable[..., Any], action: Action, values: Any) -> Any:
        """Run an action. Test what it received, and what it sends."""
        if action.stage not in self._stages:  # a teacher's: the loss shows what it gives
            return function(action, values)
        stage, is_backward = self._stages[action.stage], action.kind is not Kind.F
        is_tested = self._checks_gradients or not is_backward
        self._action, self._last_finite = action, LOSS if stage.loss_fn is not None else ""

        if is_tested and self.first_value is None and (kind := nonfinite_kind_in_tree(values, may_be_mask=not is_backward)):
            self._set_first_value(f"what it received has {kind}", RECEIVED)

        messages = function(action, values)  # hooks test layers inside

        if is_tested and self.first_value is None:
            if is_backward and (kind := nonfinite_kind_in_tree(messages, may_be_mask=False)):
                self._record_backward(kind, "")
            elif is_backward:
                source = SHARED if stage.data_parallel.hooks_gradients else OWN
                self._check_weight_gradients((action.stage,), source, SMALL_GRADIENT_ELEMENTS)
            elif kind := nonfinite_kind_in_tree(messages):
                self._set_first_value(f"the stage gave {kind}")
        self._action = None
        return messages

    def _check_layer_output(self, layer: str, module: nn.Module | None, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook. Only if the output is not finite, inputs are tested too."""
        if self._action is None or self.first_value is not None or not self._is_new_output(output):
            return
        kind = nonfinite_kind_in_tree(output)
        if not kind:
            self._register_gradient_hooks(layer, output)
            return

        inputs = [tensor for tensor in tensors((args, kwargs)) if not _shares_memory(tensor, output)]
        if input_kind := nonfinite_kind_in_tree(inputs):  # computed between layers
            parent = layer.rpartition(".")[0]
            self._set_first_value(f"the forward of {parent or 'the stage'} gave {input_kind} to {layer}")
        else:
            self._set_first_value(f"{layer or 'the stage'} gave {kind}")

    def _run_loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Any:
        """Run the loss. Test the stage's output and the loss."""
        self._check_layer_output("", None, (), {}, output)
        loss = loss_fn(output, target)
        is_tested = self._action is not None and self.first_value is None and isinstance(loss, Tensor)
        if is_tested and (kind := nonfinite_kind(loss)):
            self._set_first_value(f"{LOSS} gave {kind}")
        return loss

    def _is_new_output(self, output: Any) -> bool:
        """Whether it is not the output that was tested last: a container returns that of its last layer."""
        if output is self._last_output():
            return output is None
        self._last_output = weakref.ref(output) if isinstance(output, Tensor) else lambda: None
        return True

    def _register_gradient_hooks(self, layer: str, output: Any) -> None:
        for tensor in tensors(output) if self._checks_gradients else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._check_activation_grad, layer))

    def _check_activation_grad(self, layer: str, grad: Tensor) -> None:
        """A hook for the gradient of a layer's output. Backward, it arises in the layer that was tested before."""
        if self._action is None or self.first_value is not None:
            return
        if kind := nonfinite_kind(grad):
            self._record_backward(kind, f" to {layer}" if layer else "")
        else:
            self._last_finite = layer

    def _record_backward(self, kind: str, receiver: str) -> None:
        """Record that the backward of the layer with the last finite gradient gave a value that is not."""
        self._set_first_value(f"the backward of {self._last_finite or 'the stage'} gave {kind}{receiver}")

    def _check_weight_gradients(self, stages: Iterable[int], source: int, max_elements: float = math.inf) -> None:
        """Test the gradients of parameters of up to `max_elements`. SHARED: those of other ranks may be in them."""
        for index in stages if self._checks_gradients and self.first_value is None else ():
            for own_name, parameter in self._stages[index].module.named_parameters():
                grad = parameter.grad if parameter.numel() <= max_elements else None
                if grad is not None and (kind := nonfinite_kind(grad)):
                    name = self._names[index].get(own_name, own_name)
                    self._set_first_value(f"the gradient of {name} has {kind}", source, index)
                    return

    def _set_first_value(self, description: str, source: int = OWN, stage: int = 0) -> None:
        action = self._action
        location = (stage, "", -1) if action is None else (action.stage, str(action), action.microbatch)
        seconds = time.perf_counter() + self._clock_offset
        self.first_value = NonFiniteValue(source, seconds, self._rank, *location, description)


def _shares_memory(tensor: Tensor, output: Any) -> bool:
    """Whether `tensor` has the storage of a part of `output`: an in-place layer has overwritten its input."""
    key = storage_key(tensor)
    return any(storage_key(part) == key for part in tensors(output))


# -- the origin, from all ranks' findings ---------------------------------------------------------------------------------


class NonFiniteOrigin(NamedTuple):
    """The origin of the first value that was not finite: the same on every rank."""

    cause: str  # STATE, DATA or COMPUTED
    text: str


def find_origin(
    control: ControlGroup, monitor: NonFiniteMonitor, parameters: RankParameters, batch: Mapping[str, Sequence[Any]]
) -> NonFiniteOrigin:
    """Return the origin, once a rank has found a value that is not finite. All ranks call it, at the end of the step.

    `batch`: microbatches of inputs and of the target, as far as this rank reads them.
    """
    prefix = f"rank {control.topology.rank}: "
    state = [prefix + text for text in _nonfinite_parameters(parameters)]
    data = [prefix + text for text in _nonfinite_inputs(batch)]
    findings = control.all_gather_value((monitor.first_value, state, data), "to tell what is not finite")
    first = min((value for value, *_ in findings if value), key=lambda value: (value.source, value.seconds))

    all_state = [text for _, state, _ in findings for text in state]
    all_data = [text for *_, data in findings for text in data]
    for cause, texts in ((STATE, all_state), (DATA, all_data)):
        if texts:
            count = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
            return NonFiniteOrigin(cause, f"{texts[0]}{count}; first seen in {first}")
    return NonFiniteOrigin(COMPUTED, str(first))


def _nonfinite_parameters(parameters: RankParameters) -> Iterator[str]:
    """Yield a description of every parameter that is not finite. Steps do not change parameters: it was so before the step."""
    for name, parameter in parameters.named_parameters():
        if kind := nonfinite_kind(parameter):
            yield f"{name} has {kind} since the last optimizer step, or was loaded so"


def _nonfinite_inputs(batch: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    for name, microbatches in batch.items():
        for number, part in enumerate(microbatches):
            if kind := nonfinite_kind_in_tree(part):
                yield f"the batch's {name} in microbatch {number} have {kind}"


# -- what becomes of the step ---------------------------------------------------------------------------------------------


def step_with_monitor(engine: Engine, monitor: NonFiniteMonitor, on_nonfinite: OnNonfinite, call: Call) -> StepResult:
    """Run one step as `Engine.step`; if something of a training step is not finite, raise or skip, as `on_nonfinite` says.

    Raises NonFiniteError, the same on every rank, once all have ended the step.
    """
    if not call.is_training:
        return engine.step(call)
    engine.discard_step_state()  # reads the stages' parameters
    check_gradients = call.scaler is None or not call.scaler.is_enabled()  # a scaler expects them to overflow

    with StepRollback(engine.stages.values(), engine.device) as rollback:
        with monitor.watch_step(check_gradients, engine.clock_skew.offset):
            result = engine.step(call)
        origin = monitor.origin
        if origin is None:
            return result

        prefix = f"step {call.steps_before}: something is not finite"
        if on_nonfinite == "raise" or origin.cause == STATE:  # skipping helps no parameter
            raise NonFiniteError(f"{prefix}, {CAUSE_TEXTS[origin.cause]}: {origin.text}")
        rollback.restore()

    if engine.position.world.rank == 0:
        warn_user(f"{prefix}, and the step is skipped: {origin.text}", RuntimeWarning)
    return result._replace(nonfinite=origin.text)
