"""Python objects that hold values: attributes of modules and of users' objects, elements of containers."""

import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import is_
from typing import Any

from torch import nn

MODULE_ATTRIBUTES = frozenset(dir(nn.Module()))  # of every module: parameters, buffers, hooks, its mode, methods
CONTAINERS = (dict, list, set, deque)  # whose elements can be replaced
ITERABLES = (list, tuple, set, frozenset, deque)
_STANDARD_CLASSES_WITH_ATTRIBUTES = (types.SimpleNamespace, Namespace)
_FRAMEWORKS = {*sys.stdlib_module_names, "torch", "numpy", "penstock", "triton"} - {"__main__"}


def is_of_framework(module_name: Any) -> bool:
    """Whether a Python module is of the standard library, torch, NumPy, Triton or Penstock: their state is not looked at."""
    return not isinstance(module_name, str) or module_name.partition(".")[0] in _FRAMEWORKS


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module: neither parameters, buffers and submodules, nor what every module has."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def has_attributes(value: Any) -> bool:
    """Whether an object has attributes of its own, and is of a class that is looked at."""
    if isinstance(value, _STANDARD_CLASSES_WITH_ATTRIBUTES):
        return True
    return not is_of_framework(type(value).__module__) and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def object_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots too."""
    slots = (name for cls in type(value).__mro__ for name in _slot_names(cls))
    in_slots = {name: getattr(value, name) for name in slots if name != "__weakref__" and hasattr(value, name)}
    return in_slots | dict(getattr(value, "__dict__", {}))


def _slot_names(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def stored_elements(container: Any) -> Iterator[Any]:
    """Yield the elements, of a dict the pairs, that are there: a class's own `items` or `__iter__` may load or make others."""
    if isinstance(container, dict):
        return iter(dict.items(container))
    base: Any = next(base for base in ITERABLES if isinstance(container, base))
    elements_of_base: Iterator[Any] = base.__iter__(container)
    return elements_of_base


def first_elements(container: Any, number: int) -> list[Any]:
    """Return the first elements of a container or tuple, of a dict the pairs."""
    return [*islice(stored_elements(container), number)]


def elements(container: Any) -> dict[Any, Any]:
    """Return the elements of a container or tuple by key: of a list, tuple or deque by index, of a set by themselves."""
    stored = stored_elements(container)
    if isinstance(container, dict):
        return dict(stored)
    return {element: element for element in stored} if isinstance(container, set) else dict(enumerate(stored))


def replace_elements(container: Any, new_elements: Mapping[Any, Any]) -> None:
    """Give a container these elements, by key as `elements` returns them, in place of its own."""
    container.clear()
    if isinstance(container, dict):
        container.update(new_elements)
    else:
        (container.update if isinstance(container, set) else container.extend)(new_elements.values())


def restore_elements(container: Any, former: Mapping[Any, Any]) -> None:
    """Give a container the elements that `elements` returned, unless it has them still: some classes refuse any change."""
    current = elements(container)
    if current.keys() != former.keys() or not all(map(is_, current.values(), former.values())):
        replace_elements(container, former)


class SavedAttributes:
    """The attributes that objects have now, with the elements of lists, dicts, sets and deques, to restore them.

    `left_alone`: names that are neither saved nor restored.
    """

    def __init__(self, owners: Sequence[Any], left_alone: frozenset[str] = frozenset()) -> None:
        self.owners, self._left_alone = owners, left_alone
        self._values = [
            (vars(owner), {name: value for name, value in vars(owner).items() if name not in left_alone}) for owner in owners
        ]
        containers = [value for _, values in self._values for value in values.values() if isinstance(value, CONTAINERS)]
        self._elements = [(container, elements(container)) for container in containers]

    def restore(self) -> None:
        """Give the objects these attributes again. New ones are gone."""
        for attributes, values in self._values:
            for name in attributes.keys() - values.keys() - self._left_alone:
                del attributes[name]
            attributes.update(values)
        for container, former in self._elements:
            restore_elements(container, former)


@contextmanager
def preserve_training_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore, afterwards, whether each of the modules and their submodules trains."""
    flags = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, flag in flags:
            submodule.training = flag


@contextmanager
def preserve_attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of objects afterwards, as `SavedAttributes`."""
    saved = SavedAttributes([*owners])
    try:
        yield
    finally:
        saved.restore()
