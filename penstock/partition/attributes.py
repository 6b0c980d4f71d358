"""Plain attributes of modules (`self.alpha = 0.5`): put back after a forward was followed or measured, and compared later.

A graph has the values that the forwards it follows read while it was made; units, which are called, read theirs in every step.
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from penstock.errors import MismatchError
from penstock.torch_private import forward_hooks

Attribute = tuple[int, str]  # id of a module, name
_OF_MODULES = frozenset(dir(nn.Module()))  # what every module has: parameters, buffers, hooks, its mode, methods
_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()


@contextmanager
def restore_attributes(model: nn.Module) -> Iterator[set[Attribute]]:
    """Put back at the end what forwards have changed in the attributes of the model's modules: counters, lists, caches.

    Lists, dicts, sets and deques keep their elements. Yields a set, which is then filled with what had changed.
    """
    modules, changed = list(model.modules()), set[Attribute]()
    before = {
        (id(module), name): (module, value, _elements(value))
        for module in modules
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }
    try:
        yield changed
    finally:
        for module in modules:
            for name in vars(module).keys() - _OF_MODULES:
                if (id(module), name) not in before:
                    del vars(module)[name]
        for (place, name), (module, value, elements) in before.items():
            if not _are_same(_elements(value), elements):
                changed.add((place, name))
                _refill(value, elements)
            if (found := vars(module).get(name, _MISSING)) is not value:
                vars(module)[name] = value
                if not elements or not _are_same(_elements(found), elements):  # torch.export puts copies of containers there
                    changed.add((place, name))


def _elements(value: Any) -> list[Any]:
    """Of a container; of a dict its keys and values in turn."""
    if isinstance(value, dict):
        return [each for pair in value.items() for each in pair]
    return list(value) if isinstance(value, _CONTAINERS) else []


def _are_same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(one is other for one, other in zip(values, others, strict=True))


def _refill(container: Any, elements: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(elements[::2], elements[1::2], strict=True))
    else:
        (container.update if isinstance(container, set) else container.extend)(elements)


@contextmanager
def record_attribute_reads(model: nn.Module) -> Iterator[set[Attribute]]:
    """Meanwhile which attributes of the model's modules are read goes into the set that this yields."""
    read = set[Attribute]()
    modules = frozenset(map(id, model.modules()))
    kinds = {type(each) for each in model.modules() if not type(each).__module__.startswith("torch.")}
    before = {kind: (kind.__getattribute__, "__getattribute__" in vars(kind)) for kind in kinds}
    for kind, (get, _) in before.items():
        setattr(kind, "__getattribute__", _recording(get, modules, read))  # noqa: B010
    try:
        yield read
    finally:
        for kind, (get, own) in before.items():
            if own:
                setattr(kind, "__getattribute__", get)  # noqa: B010
            else:
                del kind.__getattribute__


def _recording(get: Any, modules: Collection[int], read: set[Attribute]) -> Any:
    def getattribute(self: Any, name: str) -> Any:
        value = get(self, name)
        if id(self) in modules and name not in _OF_MODULES and not name.startswith("__"):
            read.add((id(self), name))
        return value

    return getattribute


class AttributeSnapshot:
    """The attributes whose values a model's graph has, as they are now: of those `read`, the ones around its units."""

    def __init__(self, model: nn.Module, units: Collection[str], read: Collection[Attribute]) -> None:
        inside = {id(each) for unit in units for each in model.get_submodule(unit).modules()}
        modules = {id(each): (name, each) for name, each in model.named_modules() if id(each) not in inside}
        self._values = [
            (weakref.ref(module), f"{path or type(module).__name__}.{name}", name, _kept(value))
            for place, name in sorted(read)
            if place in modules
            for path, module in [modules[place]]
            if (value := _static(module, name)) is not _MISSING
        ]

        self._layouts = [(weakref.ref(each), name, _layout(each)) for name, each in modules.values()]

    def check_unchanged(self) -> None:
        """Raises MismatchError if one has changed, which the pipeline's steps would not see, or the layers around the units."""
        for found, name, layout in self._layouts:
            if (module := found()) is not None and _layout(module) != layout:
                told = f"{name or type(module).__name__} has other layers or hooks than when it was cut"
                raise MismatchError(f"{told}, and the pipeline has those of then: put them back, or make a new Pipeline")
        for reference, told, name, before in self._values:
            if (module := reference()) is not None and (now := _kept(_static(module, name))) != before:
                values = "not what it was" if isinstance(now, _Object) else f"{now!r:.80}, and was {before!r:.80}"
                raise MismatchError(
                    f"{told} is {values} when its forward was cut, which keeps that: set it back, or have it in a buffer that "
                    "is filled in place, or in a layer: those are read in every step"
                )


def _layout(module: nn.Module) -> tuple[Any, ...]:
    """Its children, and the hooks of its forward but for Penstock's own."""
    own = [id(hook) for hook in forward_hooks(module) if not str(getattr(hook, "__module__", "")).startswith("penstock.")]
    return [(name, id(child)) for name, child in module.named_children()], own


class _Object:
    """What is no plain value: two are equal if they are one object."""

    def __init__(self, value: Any) -> None:
        self.place = id(value)  # not the value, which may hold the whole model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.place == self.place

    __hash__ = None  # type: ignore[assignment]


def _kept(value: Any) -> Any:
    """What to compare `value` by, later."""
    return deepcopy(value) if _is_plain(value) else _Object(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, tuple | list | set) else isinstance(value, _VALUES)


def _static(module: nn.Module, name: str) -> Any:
    """The attribute of the module or its class, without what a property or a method makes of it."""
    found = (vars(each)[name] for each in (module, *type(module).__mro__) if name in vars(each))
    return next(found, _MISSING)
