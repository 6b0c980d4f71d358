"""From the meta device to memory: a module built without any gets its own, and the values that one process would give it.

Every submodule is initialised with random numbers of its own, seeded by its name in the uncut model. So the values depend
neither on the number of ranks nor on the cut, and no rank needs memory for more than its own stages.
"""

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from penstock.comms.topology import CPU
from penstock.errors import MismatchError
from penstock.randomness import aside, mix

META = torch.device("meta")
Init = Callable[[nn.Module], Any]


def is_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of `module` is on the meta device."""
    return any(place.tensor.is_meta for place in _places(module))


def materialise(
    module: nn.Module,
    names: Mapping[str, str] | None = None,
    device: torch.device = CPU,
    seed: int | None = 0,
    init: Init | None = None,
    only: Container[str] | None = None,
) -> None:
    """Give every parameter and buffer of `module` that is on the meta device memory on `device`, and initialise it.

    As if the module had been built on `device` and `module.apply(init)` called: submodule by submodule, children first,
    each by its own `reset_parameters()` and then by `init(submodule)`. The random numbers are seeded by `seed` and the
    submodule's name in the uncut model, and the generators' state is put back; `seed=None` draws from them as they are.

    `names`: the module's own names of parameters and buffers -> those in the uncut model, where they differ.
    `only`: names of those to materialise, everything else stays as it is; so a stage can be materialised in the uncut model.
    Parameters stay the objects they are: those that are tied stay tied, wherever else they are used, and are initialised
    with the first submodule that has them. What has memory already keeps its values, whatever `init` does to it.
    Raises MismatchError, and leaves the module as it was, if neither `reset_parameters()` nor `init` writes one of them.
    """
    places = _places(module)
    made: dict[int, _Place] = {}  # each by its first name
    wanted = {id(place.tensor) for place in places if place.tensor.is_meta and (only is None or place.name in only)}
    for place in places:
        if id(place.tensor) in wanted:
            made.setdefault(id(place.tensor), place)
    try:
        for place in made.values():
            _move(place, device)
        watch = _Watch(places, made, device)
        for name, submodule in _children_first(module):
            if not any(_is_inside(place.name, name) for place in made.values()):
                continue
            with _seeded(device, seed, _whole_name(name, places, names or {})), torch.no_grad(), watch.inside(name):
                _initialise(submodule, watch.may_write(name, submodule), init)
        _check([place for key, place in made.items() if key not in watch.written], names or {}, init)
    except BaseException:
        for place in made.values():
            if not place.tensor.is_meta:
                _move(place, META)
        raise


@dataclass(frozen=True)
class _Place:
    """Where a module has a parameter or buffer."""

    name: str  # of the tensor
    owner: nn.Module
    key: str  # its name there
    tensor: Tensor


def _places(module: nn.Module) -> list[_Place]:
    """Every parameter and buffer of `module` at every name it has."""
    return [
        _Place(f"{prefix}.{key}".lstrip("."), owner, key, tensor)
        for prefix, owner in module.named_modules()
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]
        if tensor is not None
    ]


def _move(place: _Place, device: torch.device) -> None:
    """Give the tensor new memory of the same layout on `device`, its values undefined; it stays the object it is."""
    old = place.tensor
    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device).requires_grad_(old.requires_grad)
    torch._C._swap_tensor_impl(old, new)  # as torch.utils.swap_tensors, for objects that others know by weak references


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


def _initialise(submodule: nn.Module, has_own: bool, init: Init | None) -> None:
    reset = getattr(submodule, "reset_parameters", getattr(submodule, "_reset_parameters", None))
    if has_own and callable(reset):
        reset()
    if init is not None:
        init(submodule)


class _Watch(TorchDispatchMode):
    """Sees every write. One to a tensor that the current submodule is not to initialise goes to a copy, and is lost.

    So do random numbers for what stays on the meta device: they are drawn, and those that come after are the same. (Not
    by `nn.init.orthogonal_`, `sparse_` and `trunc_normal_`, which leave a meta tensor alone; that matters only where an `init`
    called for one module initialises several inside it so, and a cut goes between them.)
    """

    def __init__(self, places: Sequence[_Place], made: Mapping[int, _Place], device: torch.device) -> None:
        super().__init__()
        self.places, self.made, self.device = places, made, device
        self.written = {key for key, place in made.items() if not place.tensor.numel()}
        self._memory = {id(place.tensor): place.tensor.detach() for place in places}
        self._tensor_of = {_storage(tensor): key for key, tensor in self._memory.items()}
        self._name = ""  # of the current submodule

    def may_write(self, name: str, submodule: nn.Module) -> bool:
        """Whether the submodule `name` has a tensor of its own to initialise."""
        return any(place.owner is submodule and self._is_home(id(place.tensor), name) for place in self.places)

    def _is_home(self, key: int, name: str) -> bool:
        return key in self.made and _is_inside(self.made[key].name, name)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While the submodule `name` is initialised. What took a tensor's place, or its memory's, is copied into it."""
        self._name = name
        with self:
            yield
            for place in self.places:
                if _is_inside(place.name, name):
                    self._put_back(place)

    def _put_back(self, place: _Place) -> None:
        now, memory = getattr(place.owner, place.key), self._memory[id(place.tensor)]
        if now is place.tensor and _storage(now) == _storage(memory):
            return
        memory.copy_(now.detach())
        place.tensor.data = memory
        setattr(place.owner, place.key, place.tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, its writes allowed or lost."""
        args, kwargs = list(args), dict(kwargs or {})
        target = partial(self._target, random=torch.Tag.nondeterministic_seeded in func.tags)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given: Any = kwargs if argument.name in kwargs else args
                where = argument.name if argument.name in kwargs else index
                given[where] = tree_map_only(Tensor, target, given[where])
        return func(*args, **kwargs)

    def _target(self, tensor: Tensor, random: bool) -> Tensor:
        """What is written instead of `tensor`: itself, or a copy."""
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self.device) if random else tensor
        key = self._tensor_of.get(_storage(tensor))
        if key is None:
            return tensor
        if not self._is_home(key, self._name):
            return tensor.clone()
        self.written.add(key)
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _seeded(device: torch.device, seed: int | None, name: str) -> Iterator[None]:
    """Random numbers of their own for the submodule `name` of the uncut model, on `device` and on the CPU."""
    if seed is None:
        yield
        return
    number = mix(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    with aside(CPU) as on_cpu, aside(device) as on_device:
        on_cpu.manual_seed(number)
        on_device.manual_seed(number)
        yield


def _whole_name(name: str, places: Sequence[_Place], names: Mapping[str, str]) -> str:
    """The name in the uncut model of the submodule `name`, by that of a tensor in it."""
    for place in places:
        if _is_inside(place.name, name) and place.name in names:
            rest = place.name.removeprefix(name).removeprefix(".")
            return names[place.name].removesuffix(rest).removesuffix(".")
    return name


def _check(left: Sequence[_Place], names: Mapping[str, str], init: Init | None) -> None:
    """Raises MismatchError if something is `left` without a value."""
    if not left:
        return
    place, kind = left[0], type(left[0].owner).__name__
    what = "parameter" if isinstance(place.tensor, nn.Parameter) else "buffer"
    others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    nobody = "no reset_parameters() writes it" if init is None else "neither reset_parameters() nor init= writes it"
    how = f"give {kind} a reset_parameters() that does, {'pass' if init is None else 'extend'} init="
    raise MismatchError(
        f"{what} {names.get(place.name, place.name)}{others} is on the meta device and {nobody}: "
        f"{how}, or build it on a real device"
    )
