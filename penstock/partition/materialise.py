"""From the meta device to memory: a module built without memory gets it, and the values that one process would give it.

The random numbers of every submodule are seeded by its name in the uncut model. So the values depend neither on the number of
ranks nor on the cut, and no rank needs memory for more than its own stages.
"""

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comms.topology import CPU
from penstock.digest import hash_bytes
from penstock.errors import MismatchError
from penstock.randomness import mix_seed, preserve_generator_state
from penstock.torch_private import (
    TensorSlot,
    TorchDispatchMode,
    is_persistent_buffer,
    make_weight_contiguous,
    mutated_arguments,
    storage_key,
    swap_tensors,
    tensor_slots,
)
from penstock.trees import map_tensors

META = torch.device("meta")
Init = Callable[[nn.Module], Any]


def has_meta_tensors(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of `module` is on the meta device."""
    return any(slot.tensor.is_meta for slot in tensor_slots(module))


def materialise(
    module: nn.Module,
    names: Mapping[str, str] | None = None,
    device: torch.device = CPU,
    seed: int | None = 0,
    init: Init | None = None,
    only: Container[str] | None = None,
) -> set[str]:
    """Give every parameter and buffer of `module` that is on the meta device memory on `device`, and initialise it.

    As if the module had been built on `device` and `module.apply(init)` called: submodule by submodule, children first, each by
    its own `reset_parameters()`, then by `_init_weights(submodule)` of the model it belongs to, if that has one, as in
    transformers, and then by `init(submodule)`. The random numbers are seeded by `seed` and the submodule's name in the uncut
    model, and the generators' state is restored; `seed=None` draws from them unseeded.

    `names`: the module's names of parameters and buffers -> those in the uncut model, where they differ.
    `only`: names of those to materialise; everything else stays as it is. So a stage can be materialised in the uncut model.
    Parameters remain the same objects, so tied ones stay tied, wherever else they are used; they are initialised with the first
    submodule that has them. What has memory already keeps its values, whatever `init` does to it.
    Returns the names in the uncut model of tensors that nothing writes but a state_dict can. Raises MismatchError, and leaves
    the module as it was, for a buffer that nothing writes and no state_dict has.
    """
    names = names or {}
    slots = tensor_slots(module)
    to_materialise = _slots_to_materialise(slots, only)
    try:
        # Memory, then values.
        for slot in to_materialise.values():
            reallocate_in_place(slot.tensor, device)
        writes, model_inits = _WriteRedirection(slots, to_materialise, device), _model_inits(module)
        for name, submodule in _children_first(module):
            if not any(_is_inside(slot.name, name) for slot in to_materialise.values()):
                continue
            model_name = _name_in_model(name, slots, names)
            with _seeded_generators(device, seed, model_name), torch.no_grad(), writes.redirect_writes_in_init_of(name):
                inits = [_innermost_model_init(name, model_inits), init]
                _initialise(submodule, writes.has_tensors_of(name, submodule), inits)

        # Tensors without a value.
        unwritten = {key: slot for key, slot in to_materialise.items() if key not in writes.written_ids}
        buffers = [slot for slot in unwritten.values() if not isinstance(slot.tensor, nn.Parameter)]
        _check_no_lost_buffers([slot for slot in buffers if not is_persistent_buffer(slot.owner, slot.key)], names, init)
    except BaseException:
        for slot in to_materialise.values():
            if not slot.tensor.is_meta:
                reallocate_in_place(slot.tensor, META)
        raise
    return {names.get(slot.name, slot.name) for slot in slots if id(slot.tensor) in unwritten}


def _slots_to_materialise(slots: Sequence[TensorSlot], only: Container[str] | None) -> dict[int, TensorSlot]:
    """Return the tensors to materialise by id, each with the first of its slots."""
    selected_ids = {id(slot.tensor) for slot in slots if slot.tensor.is_meta and (only is None or slot.name in only)}
    first_slots: dict[int, TensorSlot] = {}
    for slot in slots:
        if id(slot.tensor) in selected_ids:
            first_slots.setdefault(id(slot.tensor), slot)
    return first_slots


def reallocate_in_place(tensor: Tensor, device: torch.device) -> None:
    """Give `tensor` new memory of the same layout on `device`, with undefined values. It remains the same object."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    new.requires_grad_(tensor.requires_grad)
    if tensor.grad_dtype != new.grad_dtype:
        new.grad_dtype = tensor.grad_dtype
    swap_tensors(tensor, new)


# -- submodules and their names ----------------------------------------------------------------------------------------


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule once, in the order in which they are built: its children before it."""
    ancestors: list[tuple[str, nn.Module]] = []  # of the current one
    for name, submodule in module.named_modules():
        while ancestors and not _is_inside(name, ancestors[-1][0]):
            yield ancestors.pop()
        ancestors.append((name, submodule))
    yield from reversed(ancestors)


def _is_inside(name: str, module_name: str) -> bool:
    return not module_name or name.startswith(f"{module_name}.")


def _name_in_model(name: str, slots: Sequence[TensorSlot], names: Mapping[str, str]) -> str:
    """Return the name in the uncut model of the submodule `name`, by that of a tensor in it."""
    for slot in slots:
        if _is_inside(slot.name, name) and slot.name in names:
            suffix = slot.name.removeprefix(name).removeprefix(".")
            return names[slot.name].removesuffix(suffix).removesuffix(".")
    return name


# -- initialisation ----------------------------------------------------------------------------------------------------


def _model_inits(module: nn.Module) -> dict[str, Init]:
    """Return the `_init_weights(submodule)` of the submodules that have one, by their names."""
    methods: dict[str, Any] = {name: getattr(value, "_init_weights", None) for name, value in module.named_modules()}
    parameters = {name: [*inspect.signature(method).parameters] for name, method in methods.items() if callable(method)}
    return {name: methods[name] for name, parameter_names in parameters.items() if parameter_names in (["module"], ["m"])}


def _innermost_model_init(name: str, model_inits: Mapping[str, Init]) -> Init | None:
    """Return the one of the innermost model that the submodule `name` is, or is inside."""
    models = [model for model in model_inits if name == model or _is_inside(name, model)]
    return model_inits[max(models, key=len)] if models else None


def _initialise(submodule: nn.Module, has_tensors: bool, inits: Sequence[Init | None]) -> None:
    reset = getattr(submodule, "reset_parameters", getattr(submodule, "_reset_parameters", None))
    if has_tensors and callable(reset):
        make_weight_contiguous(submodule)
        reset()
    for init in filter(None, inits):
        init(submodule)


class _WriteRedirection(TorchDispatchMode):
    """Notes every write to a tensor. Writes to one that the current submodule must not initialise go to a copy, and are lost.

    So do random numbers for what stays on the meta device: they are drawn, so that those after them are the same. (Not by
    `nn.init.orthogonal_`, `sparse_` and `trunc_normal_`, which skip a meta tensor. That matters only if an `init` of one
    module initialises several inside it so, and a cut goes between them.)

    `slots`: all of the module. `to_materialise`: see `_slots_to_materialise`.
    """

    def __init__(self, slots: Sequence[TensorSlot], to_materialise: Mapping[int, TensorSlot], device: torch.device) -> None:
        super().__init__()
        self.slots, self.to_materialise, self.device = slots, to_materialise, device
        self.written_ids = {key for key, slot in to_materialise.items() if not slot.tensor.numel()}  # ids of tensors
        self._memory = {id(slot.tensor): slot.tensor.detach() for slot in slots}
        self._tensor_with = {storage_key(tensor): key for key, tensor in self._memory.items()}
        self._current = ""  # name of the submodule that is initialised

    def has_tensors_of(self, name: str, submodule: nn.Module) -> bool:
        """Return whether the submodule `name` itself has a tensor to initialise."""
        return any(slot.owner is submodule and self._may_write(id(slot.tensor), name) for slot in self.slots)

    def _may_write(self, key: int, name: str) -> bool:
        return key in self.to_materialise and _is_inside(self.to_materialise[key].name, name)

    @contextmanager
    def redirect_writes_in_init_of(self, submodule_name: str) -> Iterator[None]:
        """During its initialisation, redirect writes to tensors that it must not set; keep the objects that it replaces."""
        self._current = submodule_name
        with self:
            yield
            for slot in self.slots:
                if _is_inside(slot.name, submodule_name):
                    self._copy_into_original(slot)

    def _copy_into_original(self, slot: TensorSlot) -> None:
        current, memory = getattr(slot.owner, slot.key), self._memory[id(slot.tensor)]
        if current is slot.tensor and storage_key(current) == storage_key(memory):
            return
        memory.copy_(current.detach())
        slot.tensor.data = memory
        setattr(slot.owner, slot.key, slot.tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, with copies in the places of the tensors that it must not write."""
        arguments: Any
        args, kwargs = list(args), dict(kwargs or {})
        write_target = partial(self._tensor_or_discarded_copy, is_random=torch.Tag.nondeterministic_seeded in func.tags)
        for position, name in mutated_arguments(func):
            arguments, key = (kwargs, name) if name in kwargs else (args, position)
            arguments[key] = map_tensors(write_target, arguments[key])
        return func(*args, **kwargs)

    def _tensor_or_discarded_copy(self, tensor: Tensor, is_random: bool) -> Tensor:
        """Return what is written instead of `tensor`: itself, or a copy."""
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self.device) if is_random else tensor
        key = self._tensor_with.get(storage_key(tensor))
        if key is None:
            return tensor
        if not self._may_write(key, self._current):
            return tensor.clone()
        self.written_ids.add(key)
        return tensor


@contextmanager
def _seeded_generators(device: torch.device, seed: int | None, name: str) -> Iterator[None]:
    """Temporarily seed the generators of `device` and of the CPU for the submodule `name` of the uncut model."""
    if seed is None:
        yield
        return
    number = mix_seed(seed, hash_bytes(name.encode(), size=8))
    with preserve_generator_state(CPU) as on_cpu, preserve_generator_state(device) as on_device:
        on_cpu.manual_seed(number)
        on_device.manual_seed(number)
        yield


def _check_no_lost_buffers(lost_slots: Sequence[TensorSlot], names: Mapping[str, str], init: Init | None) -> None:
    """Raise MismatchError if buffers that no state_dict has are without a value."""
    if not lost_slots:
        return
    slot = lost_slots[0]
    class_name = type(slot.owner).__name__
    more_text = f" (and {len(lost_slots) - 1} more)" if len(lost_slots) > 1 else ""
    reason = "no reset_parameters() writes it" if init is None else "neither reset_parameters() nor init= writes it"
    advice = f"give {class_name} a reset_parameters() that does, {'pass' if init is None else 'extend'} init="
    raise MismatchError(
        f"buffer {names.get(slot.name, slot.name)}{more_text} is on the meta device and {reason}: "
        f"{advice}, or build it on a real device"
    )
