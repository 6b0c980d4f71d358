"""Plain attributes of modules (`self.alpha = 0.5`): restored after a forward was traced or measured, and compared later.

A graph has the values that the forwards around the units read while it was made. Units are called, and read theirs every time.
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
_MODULE_ATTRIBUTES = frozenset(dir(nn.Module()))  # of every module: parameters, buffers, hooks, its mode, methods
_PLAIN_TYPES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()


@contextmanager
def restore_attributes_afterwards(model: nn.Module) -> Iterator[set[Attribute]]:
    """Restore, at the end, the attributes of the model's modules that forwards have changed: counters, lists, caches.

    Lists, dicts, sets and deques get their elements back. Yields a set, which gets the changed attributes at the end.
    """
    modules, changed_attributes = list(model.modules()), set[Attribute]()
    snapshots = {
        (id(module), name): (module, value, _elements(value))
        for module in modules
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES
    }
    try:
        yield changed_attributes
    finally:
        for module in modules:
            for name in vars(module).keys() - _MODULE_ATTRIBUTES:
                if (id(module), name) not in snapshots:
                    del vars(module)[name]

        for (module_id, name), (module, value, elements) in snapshots.items():
            if not _have_same_elements(_elements(value), elements):
                changed_attributes.add((module_id, name))
                _replace_elements(value, elements)
            if (current := vars(module).get(name, _MISSING)) is not value:
                vars(module)[name] = value
                # torch.export puts copies of containers there.
                if not elements or not _have_same_elements(_elements(current), elements):
                    changed_attributes.add((module_id, name))


def _elements(value: Any) -> list[Any]:
    """Return the elements of a container, of a dict its keys and values in turn; none for other values."""
    if isinstance(value, dict):
        return [element for pair in value.items() for element in pair]
    return list(value) if isinstance(value, _CONTAINERS) else []


def _have_same_elements(elements: list[Any], expected: list[Any]) -> bool:
    return len(elements) == len(expected) and all(a is b for a, b in zip(elements, expected, strict=True))


def _replace_elements(container: Any, elements: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(elements[::2], elements[1::2], strict=True))
    else:
        (container.update if isinstance(container, set) else container.extend)(elements)


@contextmanager
def record_attribute_reads(model: nn.Module) -> Iterator[set[Attribute]]:
    """Yield a set to which the attributes of the model's modules are added when they are read."""
    reads = set[Attribute]()
    module_ids = frozenset(map(id, model.modules()))
    classes = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    originals = {cls: (cls.__getattribute__, "__getattribute__" in vars(cls)) for cls in classes}
    for cls, (getattribute, _) in originals.items():
        setattr(cls, "__getattribute__", _recording_getattribute(getattribute, module_ids, reads))  # noqa: B010
    try:
        yield reads
    finally:
        for cls, (getattribute, has_own) in originals.items():
            if has_own:
                setattr(cls, "__getattribute__", getattribute)  # noqa: B010
            else:
                del cls.__getattribute__


def _recording_getattribute(getattribute: Any, module_ids: Collection[int], reads: set[Attribute]) -> Any:
    def recording(self: Any, name: str) -> Any:
        value = getattribute(self, name)
        if id(self) in module_ids and name not in _MODULE_ATTRIBUTES and not name.startswith("__"):
            reads.add((id(self), name))
        return value

    return recording


class AttributeSnapshot:
    """The values of attributes that are constants in a model's graph: those of `reads` whose modules are around the units."""

    def __init__(self, model: nn.Module, units: Collection[str], reads: Collection[Attribute]) -> None:
        inside_units = {id(module) for unit in units for module in model.get_submodule(unit).modules()}
        modules = {id(module): (path, module) for path, module in model.named_modules() if id(module) not in inside_units}
        self._values = [
            (weakref.ref(module), f"{path or type(module).__name__}.{name}", name, _comparable(value))
            for module_id, name in sorted(reads)
            if module_id in modules
            for path, module in [modules[module_id]]
            if (value := _static_attribute(module, name)) is not _MISSING
        ]
        self._layouts = [(weakref.ref(module), path, _children_and_hooks(module)) for path, module in modules.values()]

    def check_unchanged_since_cut(self) -> None:
        """Raise MismatchError if an attribute, or the layers or hooks around the units have changed: steps would ignore it."""
        for reference, path, layout in self._layouts:
            if (module := reference()) is not None and _children_and_hooks(module) != layout:
                raise MismatchError(
                    f"{path or type(module).__name__} has other layers or hooks than when it was cut, and the pipeline has "
                    "those of then: put them back, or make a new Pipeline"
                )
        for reference, attribute, name, value_at_cut in self._values:
            module = reference()
            if module is not None and (value := _comparable(_static_attribute(module, name))) != value_at_cut:
                values = "not what it was" if isinstance(value, _SameObject) else f"{value!r:.80}, and was {value_at_cut!r:.80}"
                raise MismatchError(
                    f"{attribute} is {values} when its forward was cut, which keeps that: set it back, or have it in a buffer "
                    "that is filled in place, or in a layer: those are read in every step"
                )


def _children_and_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the module's children, and the hooks of its forward except Penstock's own."""
    hooks = [id(hook) for hook in forward_hooks(module) if not str(getattr(hook, "__module__", "")).startswith("penstock.")]
    return [(name, id(child)) for name, child in module.named_children()], hooks


class _SameObject:
    """Represents a value that is not plain: equal for the same object. It does not refer to the value, which may be large."""

    def __init__(self, value: Any) -> None:
        self.object_id = id(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other.object_id == self.object_id

    __hash__ = None  # type: ignore[assignment]


def _comparable(value: Any) -> Any:
    """Return a value for later comparison: a copy of a plain value, the identity of any other."""
    return deepcopy(value) if _is_plain(value) else _SameObject(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, tuple | list | set) else isinstance(value, _PLAIN_TYPES)


def _static_attribute(module: nn.Module, name: str) -> Any:
    """Return the attribute of the module or its class, without calling a property."""
    values = (vars(owner)[name] for owner in (module, *type(module).__mro__) if name in vars(owner))
    return next(values, _MISSING)
