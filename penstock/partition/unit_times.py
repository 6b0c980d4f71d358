"""Measure the seconds of every unit of a model: forward and backward of each alone, on inputs of a real forward.

Measuring leaves no trace: a unit runs with copies of its parameters and buffers, so gradients, running statistics and random
numbers are untouched. Units on the meta device get memory for as long as they run, one at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.comms.topology import CPU
from penstock.errors import MismatchError, first_line
from penstock.partition.materialise import META, has_meta_tensors
from penstock.randomness import preserve_generator_state
from penstock.torch_private import pretend_exporting, tensor_slots, tree_leaves
from penstock.trees import map_tensors, tensors

T = TypeVar("T")

# Rounds go on until the seconds have passed, or the fastest times have been steady for some rounds.
_MIN_ROUNDS, _SECONDS = 3, 2.0
_STEADY_ROUNDS, _STEADY_SHARE = 20, 0.98  # steady: no unit takes less than this share of its fastest time


@dataclass(frozen=True)
class RecordedUnit:
    """A module and the arguments of a call of it. Those of their tensors that require a gradient get one."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def record_unit_inputs(
    model: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[RecordedUnit]:
    """Return `units`, submodules of `model` by name, with the inputs and in the order of their first call in a forward.

    A module with several names is returned once, under the first.
    The forward `model(*args, **kwargs)` keeps no activations but these inputs. They have no graph, and require a gradient if
    they do in training. A model on the meta device is run there: its units' inputs are meta tensors, except the model's own.
    Raises MismatchError for units that were not called, and for a forward that cannot run on the meta device.
    """
    first_names = {module: name for name, module in reversed(list(units.items()))}
    is_meta = has_meta_tensors(model)
    arguments = (tuple(args), dict(kwargs or {}))
    inputs = map_tensors(lambda tensor: tensor.to(META), arguments) if is_meta else arguments
    pairs = zip(tree_leaves(inputs), tree_leaves(arguments), strict=True)
    originals: dict[int, Tensor] = {id(detached): original for detached, original in pairs}
    recorded: dict[nn.Module, RecordedUnit] = {}

    def recorded_input(tensor: Tensor) -> Tensor:
        return _without_graph(originals.get(id(tensor), tensor))

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = map_tensors(recorded_input, (args, kwargs))
        recorded.setdefault(module, RecordedUnit(first_names[module], module, args, kwargs))

    with ExitStack() as stack:
        for module in first_names:
            handle = module.register_forward_pre_hook(record, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(replace_tensors_temporarily(model, lambda tensor: tensor.to(META) if is_meta else tensor))
        stack.enter_context(nullcontext() if is_meta else restore_parameters_after_calls(first_names))
        stack.enter_context(META if is_meta else nullcontext())
        stack.enter_context(pretend_exporting() if is_meta else nullcontext())  # models then do not decide by values
        stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda _: _))  # a graph without activations
        stack.enter_context(torch.enable_grad())
        stack.enter_context(preserve_generator_state(module_device(model)))
        _forward_or_explain_meta_failure(model, inputs, is_meta)

    uncalled = [name for name, module in units.items() if module not in recorded]
    if uncalled:
        raise MismatchError(f"cannot measure {', '.join(uncalled)}: the forward of {type(model).__name__} does not call it")
    return list(recorded.values())


def _forward_or_explain_meta_failure(model: nn.Module, inputs: tuple[Any, Any], is_meta: bool) -> None:
    try:
        model(*inputs[0], **inputs[1])
    except (RuntimeError, NotImplementedError) as error:
        if not is_meta:
            raise
        raise MismatchError(
            f"the forward of {type(model).__name__} cannot run on the meta device, so its layers cannot be measured there "
            f"({first_line(error)}): name the cuts with cuts=, or build the model on a real device"
        ) from error


def measure_unit_seconds(
    units: Sequence[RecordedUnit],
    device: torch.device | None = None,
    rounds: int = _MIN_ROUNDS,
    seconds: float = _SECONDS,
) -> list[float]:
    """Return the seconds that forward and backward of every unit take, in their order: the fastest of several runs.

    All units run in turn, so that a disturbance affects all: `rounds` times, and then until `seconds` have passed or none gets
    faster. The backward starts with ones, and adds its gradients to those of the run before, as in accumulation.
    All run on `device`, by default on their own. Tensors on the meta device get random values.
    """
    fastest = [float("inf")] * len(units)
    deadline = perf_counter() + seconds
    round_number = last_improvement = 0
    while round_number < rounds or (perf_counter() < deadline and round_number - last_improvement < _STEADY_ROUNDS):
        round_number += 1
        previous = fastest
        fastest = [min(seconds, _unit_seconds(unit, device)) for seconds, unit in zip(previous, units, strict=True)]
        if any(seconds < _STEADY_SHARE * longer for seconds, longer in zip(fastest, previous, strict=True)):
            last_improvement = round_number
    return fastest


def _unit_seconds(unit: RecordedUnit, device: torch.device | None) -> float:
    """Return the seconds of one run, after one to warm up."""
    with copy_on_device(unit, device) as (device, copy):
        inputs = map_tensors(copy, (unit.args, dict(unit.kwargs or {})))
        gradients: list[Tensor] = []
        _run_seconds(unit.module, inputs, device, gradients)
        return _run_seconds(unit.module, inputs, device, gradients)


@contextmanager
def copy_on_device(
    unit: RecordedUnit, device: torch.device | None
) -> Iterator[tuple[torch.device, Callable[[Tensor], Tensor]]]:
    """Run a unit inside with copies on `device`, or its own. Yield the device, and a function that copies tensors there."""
    device = device or module_device(unit.module, (unit.args, unit.kwargs))
    copy = partial(materialise_meta_tensor, device=device)
    with (
        replace_tensors_temporarily(unit.module, partial(copy, spread=0.02)),
        preserve_generator_state(CPU),
        preserve_generator_state(device),
        torch.enable_grad(),
    ):
        yield device, copy


def _run_seconds(module: nn.Module, inputs: tuple[Any, Any], device: torch.device, gradients: list[Tensor]) -> float:
    """Return the seconds of a forward and its backward. `gradients`: of the outputs; the first run adds them to the list."""
    args, kwargs = map_tensors(lambda tensor: _without_graph(tensor).clone(), inputs)  # the unit may change its inputs

    def run() -> None:
        outputs = [tensor for tensor in tensors(module(*args, **kwargs)) if tensor.requires_grad]
        if not gradients:
            gradients.extend(map(torch.ones_like, outputs))
        if outputs:
            torch.autograd.backward(outputs, gradients)

    return timed(run, device)[0]


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds of a call, until the device has done it, and its result."""
    synchronise = torch.get_device_module(device).synchronize
    synchronise()
    begin = perf_counter()
    result = run()
    synchronise()
    return perf_counter() - begin, result


@contextmanager
def restore_parameters_after_calls(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore after each call of a module the parameters that its forward has changed, as an initialisation by data does.

    A module's copies live for its call only, because copies of all parameters may not fit.
    """
    copies: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def copy_parameters(module: nn.Module, _: Any) -> None:
        copies[module] = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]

    def restore_parameters(module: nn.Module, *_: Any) -> None:
        for parameter, value in copies.pop(module, ()):
            if not torch.equal(parameter, value):
                parameter.detach().copy_(value)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(copy_parameters).remove)
            stack.callback(module.register_forward_hook(restore_parameters, always_call=True).remove)
        yield


@contextmanager
def replace_tensors_temporarily(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Temporarily replace every parameter by its `replacement`, and every buffer by a copy of its own. Tied ones stay tied."""
    slots = tensor_slots(module)
    originals = {id(slot.tensor): slot.tensor for slot in slots}
    replacements = {key: _make_replacement(tensor, replacement) for key, tensor in originals.items()}
    try:
        for slot in slots:
            setattr(slot.owner, slot.key, replacements[id(slot.tensor)])  # not slot.replace: recurrent layers also keep a list
        yield
    finally:
        for slot in slots:
            setattr(slot.owner, slot.key, slot.tensor)


def _make_replacement(tensor: Tensor, replacement: Callable[[Tensor], Tensor]) -> Tensor:
    value = replacement(tensor.detach())
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.clone()


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a leaf with the same memory."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def materialise_meta_tensor(tensor: Tensor, device: torch.device, spread: float = 1.0) -> Tensor:
    """Return a copy of `tensor` on `device`; for a meta tensor random values of the same layout, or zeros of integers.

    `spread`: the standard deviation.
    """
    if not tensor.is_meta:
        return tensor.to(device, copy=True)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(extent if tensor.numel() else 0, dtype=tensor.dtype, device=device)
    if tensor.is_floating_point():
        memory.normal_(std=spread)
    return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def module_device(module: nn.Module, inputs: Any = ()) -> torch.device:
    """Return the device of the module's parameters or buffers, else of the `inputs`; the CPU if all are on the meta device."""
    leaves = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta), CPU)
