"""What every unit of a model costs, measured: forward and backward of each alone, on inputs recorded in a real forward.

Nothing stays behind: a unit runs on stand-ins for its parameters and buffers, so gradients, running statistics and random
numbers are untouched, and units on the meta device get memory for as long as they run, one at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.comms.topology import CPU
from penstock.errors import MismatchError
from penstock.partition.materialise import META, has_meta_tensors
from penstock.randomness import fork_generator
from penstock.torch_private import pretend_exporting, tensor_slots, tree_leaves
from penstock.trees import map_tensors, tensors

_ROUNDS, _SECONDS = 3, 2.0  # measured at least so often, and on until so long
_STEADY, _FASTER = 20, 0.98  # or until in so many rounds no unit took less than this share of its fastest time


@dataclass(frozen=True)
class RecordedUnit:
    """A module and what it is called with; those of the tensors that require a gradient are given one."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def record_unit_inputs(
    model: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[RecordedUnit]:
    """`units`, submodules of `model` by name, in the order and with the inputs of their first call in `model(*args, **kwargs)`.

    The forward keeps no activations but these inputs. They are outside the graph, and require a gradient exactly if they do
    in training. A model on the meta device is run there: its units' inputs are meta tensors, except the model's own.
    Raises MismatchError for units that were not called, and for a forward that cannot run on the meta device.
    """
    meta = has_meta_tensors(model)
    given = (tuple(args), dict(kwargs or {}))
    inputs = map_tensors(lambda tensor: tensor.to(META), given) if meta else given
    originals: dict[int, Tensor] = {
        id(run): original for run, original in zip(tree_leaves(inputs), tree_leaves(given), strict=True)
    }
    found: dict[str, RecordedUnit] = {}

    def input_of(tensor: Tensor) -> Tensor:
        return _leaf(originals.get(id(tensor), tensor))

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = map_tensors(input_of, (args, kwargs))
        found.setdefault(name, RecordedUnit(name, module, args, kwargs))

    with ExitStack() as stack:
        for name, module in units.items():
            handle = module.register_forward_pre_hook(partial(keep, name), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(replace_tensors(model, lambda tensor: tensor.to(META) if meta else tensor))
        stack.enter_context(META if meta else nullcontext())
        stack.enter_context(pretend_exporting() if meta else nullcontext())  # where no value is looked at
        stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))  # the graph, without activations
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fork_generator(module_device(model)))
        _forward(model, inputs, meta)
    missing = [name for name in units if name not in found]
    if missing:
        raise MismatchError(f"cannot measure {', '.join(missing)}: the forward of {type(model).__name__} does not call it")
    return list(found.values())


def _forward(model: nn.Module, inputs: tuple[Any, Any], meta: bool) -> None:
    try:
        model(*inputs[0], **inputs[1])
    except (RuntimeError, NotImplementedError) as error:
        if not meta:
            raise
        told = str(error).partition("\n")[0]
        raise MismatchError(
            f"the forward of {type(model).__name__} cannot run on the meta device, so its layers cannot be measured there "
            f"({told}): name the cuts with cuts=, or build the model on a real device"
        ) from error


def measure_unit_seconds(
    units: Sequence[RecordedUnit], device: torch.device | None = None, rounds: int = _ROUNDS, seconds: float = _SECONDS
) -> list[float]:
    """Seconds that forward and backward of every unit take, in their order: the fastest of several runs each.

    All units run in turn, so that what disturbs one disturbs all: `rounds` times, and then on until `seconds` have passed or
    none gets faster any more. The backward is given ones, and adds its gradients to those of the run before, as in
    accumulation. All run on `device`, by default each where it is; what is on the meta device has random values.
    """
    fastest = [float("inf")] * len(units)
    until = perf_counter() + seconds
    done = last = 0
    while done < rounds or (perf_counter() < until and done - last < _STEADY):
        done += 1
        before, fastest = fastest, [min(least, _time_of(unit, device)) for least, unit in zip(fastest, units, strict=True)]
        if any(now < _FASTER * least for now, least in zip(fastest, before, strict=True)):
            last = done
    return fastest


def _time_of(unit: RecordedUnit, device: torch.device | None) -> float:
    """Seconds of one run, after one to warm up."""
    device = device or module_device(unit.module, (unit.args, unit.kwargs))
    make = partial(with_memory, device=device)
    with (
        replace_tensors(unit.module, partial(make, spread=0.02)),
        fork_generator(CPU),
        fork_generator(device),
        torch.enable_grad(),
    ):
        inputs = map_tensors(make, (unit.args, dict(unit.kwargs or {})))
        gradients: list[Tensor] = []
        _run(unit.module, inputs, device, gradients)
        return _run(unit.module, inputs, device, gradients)


def _run(module: nn.Module, inputs: tuple[Any, Any], device: torch.device, gradients: list[Tensor]) -> float:
    """Seconds of a forward and its backward, which starts with `gradients`; they are made in the first run."""
    args, kwargs = map_tensors(lambda tensor: _leaf(tensor).clone(), inputs)  # the unit may change what it gets
    synchronise = torch.get_device_module(device).synchronize
    synchronise()
    begin = perf_counter()
    output = module(*args, **kwargs)
    ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if not gradients:
        gradients += map(torch.ones_like, ends)
    if ends:
        torch.autograd.backward(ends, gradients)
    synchronise()
    return perf_counter() - begin


@contextmanager
def replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In the place of every parameter what `make` makes of it, and of every buffer a copy of that; tied ones stay one."""
    slots = tensor_slots(module)
    made = {key: _stand_in(tensor, make) for key, tensor in {id(slot.tensor): slot.tensor for slot in slots}.items()}
    try:
        for slot in slots:
            setattr(slot.owner, slot.key, made[id(slot.tensor)])  # not slot.put: recurrent layers keep a list besides
        yield
    finally:
        for slot in slots:
            setattr(slot.owner, slot.key, slot.tensor)


def _stand_in(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    value = make(tensor.detach())
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.clone()


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory outside the graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def with_memory(tensor: Tensor, device: torch.device, spread: float = 1.0) -> Tensor:
    """`tensor` on `device`; if it is on the meta device, one of the same layout there, random or, of whole numbers, 0."""
    if not tensor.is_meta:
        return tensor.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(extent if tensor.numel() else 0, dtype=tensor.dtype, device=device)
    if tensor.is_floating_point():
        memory.normal_(std=spread)
    return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def module_device(module: nn.Module, inputs: Any = ()) -> torch.device:
    """Where `module` is: its parameters or buffers, or else the `inputs` it is called with; on the meta device, the CPU."""
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
    return next((each.device for each in tensors if isinstance(each, Tensor) and not each.is_meta), CPU)
