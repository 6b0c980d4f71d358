"""From the meta device to memory: a module built without any gets its own, and the values that one process would give it.

Every submodule is initialised with random numbers of its own, seeded by its name in the uncut model. So the values depend
neither on the number of ranks nor on the cut, and no rank needs memory for more than its own stages.
"""

import hashlib
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comms.topology import CPU
from penstock.errors import MismatchError
from penstock.randomness import fork_generator, mix_seed
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
    """Whether a parameter or buffer of `module` is on the meta device."""
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

    As if the module had been built on `device` and `module.apply(init)` called: submodule by submodule, children first,
    each by its own `reset_parameters()`, then by `_init_weights(submodule)` of the model it belongs to, if that has one as
    transformers' models do, and then by `init(submodule)`. The random numbers are seeded by `seed` and the submodule's name
    in the uncut model, and the generators' state is put back; `seed=None` draws from them as they are.

    `names`: the module's own names of parameters and buffers -> those in the uncut model, where they differ.
    `only`: names of those to materialise, everything else stays as it is; so a stage can be materialised in the uncut model.
    Parameters stay the objects they are: those that are tied stay tied, wherever else they are used, and are initialised
    with the first submodule that has them. What has memory already keeps its values, whatever `init` does to it.
    Returns the names in the uncut model of what nothing writes, and a state_dict can give a value. Raises MismatchError, and
    leaves the module as it was, for a buffer that nothing writes and no state_dict has.
    """
    slots = tensor_slots(module)
    made = _wanted(slots, only)
    try:
        for slot in made.values():
            reallocate(slot.tensor, device)
        watch, models = _Watch(slots, made, device), _models(module)
        for name, submodule in _children_first(module):
            if not any(_is_inside(slot.name, name) for slot in made.values()):
                continue
            with _seeded(device, seed, _whole_name(name, slots, names or {})), torch.no_grad(), watch.inside(name):
                _initialise(submodule, watch.may_write(name, submodule), [_model_of(name, models), init])
        left = {key: slot for key, slot in made.items() if key not in watch.written}
        buffers = [slot for slot in left.values() if not isinstance(slot.tensor, nn.Parameter)]
        _check([slot for slot in buffers if not is_persistent_buffer(slot.owner, slot.key)], names or {}, init)
    except BaseException:
        for slot in made.values():
            if not slot.tensor.is_meta:
                reallocate(slot.tensor, META)
        raise
    return {(names or {}).get(slot.name, slot.name) for slot in slots if id(slot.tensor) in left}


def _wanted(slots: Sequence[TensorSlot], only: Container[str] | None) -> dict[int, TensorSlot]:
    """The tensors to materialise, each at the first of its slots."""
    wanted = {id(slot.tensor) for slot in slots if slot.tensor.is_meta and (only is None or slot.name in only)}
    first: dict[int, TensorSlot] = {}
    for slot in slots:
        if id(slot.tensor) in wanted:
            first.setdefault(id(slot.tensor), slot)
    return first


def reallocate(tensor: Tensor, device: torch.device) -> None:
    """Give `tensor` new memory of the same layout on `device`, its values undefined; it stays the object it is."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    swap_tensors(tensor, new.requires_grad_(tensor.requires_grad))


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule once, in the order in which they are built: those inside one before it."""
    below: list[tuple[str, nn.Module]] = []  # modules around the current one
    for name, submodule in module.named_modules():
        while below and not _is_inside(name, below[-1][0]):
            yield below.pop()
        below.append((name, submodule))
    yield from reversed(below)


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _models(module: nn.Module) -> dict[str, Init]:
    """The `_init_weights(submodule)` of those in `module` that have one, by the names of these."""
    own: dict[str, Any] = {name: getattr(each, "_init_weights", None) for name, each in module.named_modules()}
    takes = {name: [*inspect.signature(each).parameters] for name, each in own.items() if callable(each)}
    return {name: own[name] for name, parameters in takes.items() if parameters in (["module"], ["m"])}


def _model_of(name: str, models: Mapping[str, Init]) -> Init | None:
    """That of the innermost model that the submodule `name` is, or is inside."""
    around = [model for model in models if name == model or _is_inside(name, model)]
    return models[max(around, key=len)] if around else None


def _initialise(submodule: nn.Module, has_own: bool, inits: Sequence[Init | None]) -> None:
    reset = getattr(submodule, "reset_parameters", getattr(submodule, "_reset_parameters", None))
    if has_own and callable(reset):
        make_weight_contiguous(submodule)
        reset()
    for init in filter(None, inits):
        init(submodule)


class _Watch(TorchDispatchMode):
    """Sees every write. One to a tensor that the current submodule is not to initialise goes to a copy, and is lost.

    So do random numbers for what stays on the meta device: they are drawn, and those that come after are the same. (Not
    by `nn.init.orthogonal_`, `sparse_` and `trunc_normal_`, which leave a meta tensor alone; that matters only where an `init`
    called for one module initialises several inside it so, and a cut goes between them.)
    """

    def __init__(self, slots: Sequence[TensorSlot], made: Mapping[int, TensorSlot], device: torch.device) -> None:
        super().__init__()
        self.slots, self.made, self.device = slots, made, device
        self.written = {key for key, slot in made.items() if not slot.tensor.numel()}
        self._memory = {id(slot.tensor): slot.tensor.detach() for slot in slots}
        self._tensor_of = {storage_key(tensor): key for key, tensor in self._memory.items()}
        self._name = ""  # of the current submodule

    def may_write(self, name: str, submodule: nn.Module) -> bool:
        """Whether the submodule `name` has a tensor of its own to initialise."""
        return any(slot.owner is submodule and self._is_home(id(slot.tensor), name) for slot in self.slots)

    def _is_home(self, key: int, name: str) -> bool:
        return key in self.made and _is_inside(self.made[key].name, name)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While the submodule `name` is initialised. What took a tensor's place, or its memory's, is copied into it."""
        self._name = name
        with self:
            yield
            for slot in self.slots:
                if _is_inside(slot.name, name):
                    self._put_back(slot)

    def _put_back(self, slot: TensorSlot) -> None:
        now, memory = getattr(slot.owner, slot.key), self._memory[id(slot.tensor)]
        if now is slot.tensor and storage_key(now) == storage_key(memory):
            return
        memory.copy_(now.detach())
        slot.tensor.data = memory
        setattr(slot.owner, slot.key, slot.tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, its writes allowed or lost."""
        given: Any
        args, kwargs = list(args), dict(kwargs or {})
        target = partial(self._target, random=torch.Tag.nondeterministic_seeded in func.tags)
        for place, name in mutated_arguments(func):
            given, where = (kwargs, name) if name in kwargs else (args, place)
            given[where] = map_tensors(target, given[where])
        return func(*args, **kwargs)

    def _target(self, tensor: Tensor, random: bool) -> Tensor:
        """What is written instead of `tensor`: itself, or a copy."""
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self.device) if random else tensor
        key = self._tensor_of.get(storage_key(tensor))
        if key is None:
            return tensor
        if not self._is_home(key, self._name):
            return tensor.clone()
        self.written.add(key)
        return tensor


@contextmanager
def _seeded(device: torch.device, seed: int | None, name: str) -> Iterator[None]:
    """Random numbers of their own for the submodule `name` of the uncut model, on `device` and on the CPU."""
    if seed is None:
        yield
        return
    number = mix_seed(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    with fork_generator(CPU) as on_cpu, fork_generator(device) as on_device:
        on_cpu.manual_seed(number)
        on_device.manual_seed(number)
        yield


def _whole_name(name: str, slots: Sequence[TensorSlot], names: Mapping[str, str]) -> str:
    """The name in the uncut model of the submodule `name`, by that of a tensor in it."""
    for slot in slots:
        if _is_inside(slot.name, name) and slot.name in names:
            rest = slot.name.removeprefix(name).removeprefix(".")
            return names[slot.name].removesuffix(rest).removesuffix(".")
    return name


def _check(left: Sequence[TensorSlot], names: Mapping[str, str], init: Init | None) -> None:
    """Raises MismatchError if buffers that no state_dict has are `left` without a value."""
    if not left:
        return
    slot = left[0]
    kind = type(slot.owner).__name__
    others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    nobody = "no reset_parameters() writes it" if init is None else "neither reset_parameters() nor init= writes it"
    how = f"give {kind} a reset_parameters() that does, {'pass' if init is None else 'extend'} init="
    raise MismatchError(
        f"buffer {names.get(slot.name, slot.name)}{others} is on the meta device and {nobody}: "
        f"{how}, or build it on a real device"
    )
