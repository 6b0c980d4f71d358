"""Plain attributes of modules (`self.alpha = 0.5`): restored after a forward was traced or measured, and compared later.

A graph has the values that the forwards around the units read while it was made. Units are called, and read theirs every time.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

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
def hidden_attribute(module: nn.Module, name: str) -> Iterator[None]:
    """Hide an attribute of a module, so that code that reads it raises."""
    value = vars(module).pop(name, _MISSING)
    if hasattr(type(module), name):
        vars(module)[name] = _Unreadable()
    try:
        yield
    finally:
        vars(module).pop(name, None)
        if value is not _MISSING:
            vars(module)[name] = value


def _refuse_use(*_: Any, **__: Any) -> NoReturn:
    raise AttributeError


_Unreadable = type(
    "_Unreadable", (), dict.fromkeys(("__bool__", "__eq__", "__hash__", "__getattr__", "__call__", "__iter__"), _refuse_use)
)


class AttributeSnapshot:
    """The attributes of the modules around the units, which are constants in a model's graph if its forward reads them.

    `changed`: those that forwards change themselves. `is_read(module, name)`: whether the graph depends on an attribute; asked
    once for each that has changed. None: there is no such graph.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Collection[str],
        changed: Collection[Attribute],
        is_read: Callable[[nn.Module, str], bool] | None,
    ) -> None:
        inside_units = {id(module) for unit in units for module in model.get_submodule(unit).modules()}
        modules = [(path, module) for path, module in model.named_modules() if id(module) not in inside_units]
        self._is_read, self._unread = is_read, set[Attribute]()
        self._values = [
            (weakref.ref(module), f"{path or type(module).__name__}.{name}", name, _comparable(_static_attribute(module, name)))
            for path, module in (modules if is_read else ())
            for name in _attribute_names(module)
            if (id(module), name) not in changed
        ]
        self._layouts = [(weakref.ref(module), path, _children_and_hooks(module)) for path, module in modules]

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
                if not self._depends_on(module, name):
                    continue
                values = "not what it was" if isinstance(value, _SameObject) else f"{value!r:.80}, and was {value_at_cut!r:.80}"
                raise MismatchError(
                    f"{attribute} is {values} when its forward was cut, which keeps that: set it back, or have it in a buffer "
                    "that is filled in place, or in a layer: those are read in every step"
                )

    def _depends_on(self, module: nn.Module, name: str) -> bool:
        if (id(module), name) in self._unread:
            return False
        if self._is_read is not None and self._is_read(module, name):
            return True
        self._unread.add((id(module), name))
        return False


def _attribute_names(module: nn.Module) -> set[str]:
    """Return the names of a module's attributes, and of the numbers and texts of its classes."""
    names = vars(module).keys() - _MODULE_ATTRIBUTES
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch."):
            names |= {
                name for name, value in vars(cls).items() if isinstance(value, _PLAIN_TYPES) and not name.startswith("__")
            }
    return names - _MODULE_ATTRIBUTES


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
