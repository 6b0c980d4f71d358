"""The Python objects that several stages can reach: layers may pass values through them, which does not work across ranks.

Found by identity, before any step: from each module of a stage along its attributes, buffers and hooks, those on gradients of
parameters too, and from the functions of its class along closures and globals; from the loss, as a part of the last stage.
`shared_state.py` finds out which of them a forward or a backward changes. Of modules of the standard library, torch and NumPy
only `os.environ` is looked at, and variables that are no functions, if they exist before (`torch.scale = ..`).

Two references between stages stay unseen: through a layer's reference to a module around it (a `root.layers[0].x`), and what is
reached only through an object of these libraries.
"""

import inspect
import os
import random
import threading
import types
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Queue
from typing import Any

import torch
from torch import Tensor, nn

from penstock.python_objects import (
    ITERABLES,
    first_elements,
    has_attributes,
    is_of_framework,
    module_attributes,
    object_attributes,
)
from penstock.torch_private import backward_hooks, forward_hooks

LOSS_PATH = "the loss"  # in the path of what only the loss has
MAX_OBJECTS_PER_STAGE = 10_000
MAX_ITEMS = 1_000  # of a container
MAX_CALLS_BETWEEN_FUNCTIONS = 3  # how far globals are followed from a function to those that it uses

try:
    import numpy as np
except ModuleNotFoundError:  # torch runs without it
    ARRAYS: tuple[Any, ...] = ()
    NUMPY_GENERATORS: tuple[Any, ...] = ()
else:
    ARRAYS, NUMPY_GENERATORS = (np.ndarray,), (np.random.Generator, np.random.RandomState)
ENVIRONMENT = os.environ
CONTEXTS: tuple[Any, ...] = (ContextVar, threading.local)
BUFFERS = (bytearray, array)
GENERATORS: tuple[Any, ...] = (torch.Generator, random.Random, count, *NUMPY_GENERATORS)


UNCHANGED = (nn.Parameter, Queue, tuple, frozenset, partial, types.MethodType, weakref.ref)  # only what they refer to changes


@dataclass(frozen=True, eq=False)
class GlobalVariable:
    """A variable of a Python module that a function uses."""

    namespace: dict[str, Any]
    name: str


class SharedObject:
    """An object that several stages can reach."""

    def __init__(self, value: Any, label: str) -> None:
        self.label = label  # the same on all ranks
        self.paths: dict[int, str] = {}  # stage -> where its modules, or the loss, have the object
        self.registered_stages: set[int] = set()  # of a module: whose submodule it is
        self.slots: dict[int, tuple[nn.Module, str]] = {}  # of a buffer: stage -> module and name; a device may have a copy
        try:
            self._reference: Callable[[], Any] = (lambda: value) if isinstance(value, GlobalVariable) else weakref.ref(value)
        except TypeError:
            self._reference = lambda: value

    def value(self, stage: int) -> Any:
        """Return the object as `stage` has it; None if it no longer exists."""
        if stage in self.slots:
            module, name = self.slots[stage]
            return getattr(module, name, None)
        return self._reference()


def find_shared_objects(stages: Mapping[int, nn.Module], loss_fn: Any, num_stages: int) -> list[SharedObject]:
    """Return the objects that can be changed and that two of `stages` can reach.

    If a rank has not all stages, classes and global variables of one stage too: other ranks may have them under that name.
    """
    walk = _Walk(stages)
    for stage, module in stages.items():
        walk.walk_stage(stage, module)
        if stage == num_stages - 1 and loss_fn is not None:
            walk.walk_loss(stage, loss_fn)

    def may_be_shared(found: SharedObject) -> bool:
        return len(found.paths) > 1 or (len(stages) < num_stages and found.label.startswith(("class ", "global ")))

    return [found for found in walk.found.values() if may_be_shared(found)]


class _Walk:
    """Visits what stages reach, breadth first, so that the path to an object is a short one."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.found: dict[int, SharedObject] = {}
        self._registered = {stage: {id(module) for module in root.modules()} for stage, root in stages.items()}
        self._all_registered = set().union(*self._registered.values())
        self._globals: dict[tuple[int, str], GlobalVariable] = {}  # one object for each, whose id stays
        self._globals_of_function: dict[Any, Sequence[GlobalVariable]] = {}
        self._num_labels = defaultdict[str, int](int)  # how many objects have a label: a function may have several closures

    def walk_stage(self, stage: int, root: nn.Module) -> None:
        """Visit what the modules of a stage reach."""
        queue: deque[tuple[Any, str, int]] = deque()
        for name, module in root.named_modules():
            path = name or type(module).__name__
            self._record(stage, module, path).registered_stages.add(stage)
            queue.extend(self._children_of_module(stage, module, path, with_buffers=True))
        self._visit(stage, queue)

    def walk_loss(self, stage: int, loss_fn: Any) -> None:
        """Visit what the loss reaches, as a part of the last stage."""
        self._visit(stage, deque([(loss_fn, LOSS_PATH, 0)]))

    def _visit(self, stage: int, queue: "deque[tuple[Any, str, int]]") -> None:
        visited = set[int]()
        while queue and len(visited) < MAX_OBJECTS_PER_STAGE:
            value, path, calls = queue.popleft()
            if id(value) in visited or id(value) in self._registered[stage]:
                continue
            visited.add(id(value))
            queue.extend(self._children(stage, value, path, calls))

    def _record(self, stage: int, value: Any, path: str, label: str | None = None) -> SharedObject:
        if (found := self.found.get(id(value))) is None:
            found = self.found[id(value)] = SharedObject(value, label or self._new_label(f"{path} of stage {stage}"))
        found.paths.setdefault(stage, path)
        return found

    def _new_label(self, label: str) -> str:
        self._num_labels[label] += 1
        return label if self._num_labels[label] == 1 else f"{label}, {self._num_labels[label]}"

    def _children(self, stage: int, value: Any, path: str, calls: int) -> Iterator[tuple[Any, str, int]]:
        """Record `value` if it can be changed. Yield what it refers to."""
        if value is ENVIRONMENT or value is os.getenv:
            self._record(stage, ENVIRONMENT, f"os.environ of {path}", "os.environ")
        elif isinstance(value, nn.Module):
            yield from self._children_of_referenced_module(stage, value, path)
        elif isinstance(value, types.FunctionType):
            self._record(stage, value, path)
            yield from self._children_of_function(value, path, calls)
        elif wrapped := _wrapped_function(value):
            yield wrapped, path, calls
        elif (parts := _parts(value, path)) is not None:
            if not isinstance(value, UNCHANGED):
                self._record(stage, value, path, _label(value))
            yield from ((part, part_path, calls) for part, part_path in parts)

    def _children_of_module(
        self, stage: int, module: nn.Module, path: str, with_buffers: bool
    ) -> Iterator[tuple[Any, str, int]]:
        for name, value in module_attributes(module).items():
            yield value, f"{path}.{name}", 0
        for name, buffer in module.named_buffers(recurse=False) if with_buffers else ():
            self._record(stage, buffer, f"{path}.{name}").slots.setdefault(stage, (module, name))
        for hook in [*forward_hooks(module), *backward_hooks(module)]:
            yield hook, f"a hook of {path}", 0
        for cls in type(module).__mro__:
            if not is_of_framework(cls.__module__):
                yield cls, path, 0
                yield from ((function, path, 0) for function in _functions_of_class(cls))

    def _children_of_referenced_module(self, stage: int, module: nn.Module, path: str) -> Iterator[tuple[Any, str, int]]:
        """Yield what a module has that is reached by reference, not as a submodule of the stage.

        One that contains layers of stages is the model, or a part around them. Their layers are not what is referred to.
        """
        is_around_layers = any(
            id(submodule) in self._all_registered for submodule in module.modules() if submodule is not module
        )
        runs_in_a_stage = id(module) in self._all_registered
        is_looked_at_alone = is_around_layers and not runs_in_a_stage
        for name, submodule in [("", module)] if is_looked_at_alone else [*module.named_modules()]:
            submodule_path = f"{path}.{name}" if name else path
            self._record(stage, submodule, submodule_path)
            yield from self._children_of_module(stage, submodule, submodule_path, not runs_in_a_stage and not is_around_layers)

    def _children_of_function(self, function: types.FunctionType, path: str, calls: int) -> Iterator[tuple[Any, str, int]]:
        if is_of_framework(function.__module__):
            return
        yield from ((cell, f"a closure of {path}", calls) for cell in function.__closure__ or ())
        yield function.__defaults__, path, calls
        yield function.__kwdefaults__, path, calls
        yield from ((value, f"{path}.{name}", calls) for name, value in vars(function).items())
        if calls < MAX_CALLS_BETWEEN_FUNCTIONS:
            for variable in self._globals_used(function):
                value = variable.namespace.get(variable.name)
                if isinstance(value, types.FunctionType):
                    yield value, path, calls + 1
                elif not isinstance(value, types.ModuleType) and not (
                    isinstance(value, type) and is_of_framework(value.__module__)
                ):
                    key = id(variable.namespace), variable.name
                    yield self._globals.setdefault(key, variable), path, calls + 1

    def _globals_used(self, function: types.FunctionType) -> Sequence[GlobalVariable]:
        """Return the global variables that a function names, those of other modules too (`config.scale`)."""
        if function not in self._globals_of_function:
            names, namespace = function.__code__.co_names, function.__globals__
            modules = [namespace[name] for name in names if isinstance(namespace.get(name), types.ModuleType)]
            variables = [GlobalVariable(namespace, name) for name in names if name in namespace]
            variables += [GlobalVariable(vars(module), name) for module in modules for name in names if _may_talk(module, name)]
            self._globals_of_function[function] = variables
        return self._globals_of_function[function]


Parts = list[tuple[Any, str]]  # what an object refers to, with the path to it


def _parts(value: Any, path: str) -> Parts | None:
    """Return what an object at `path` refers to; None for what is not looked at, as numbers and texts."""
    for classes, parts_of in PARTS:
        if isinstance(value, classes):
            return parts_of(value, path)
    if isinstance(value, type):
        return None if is_of_framework(value.__module__) else _named(class_attributes(value), path)
    return [*_named(object_attributes(value), path), (type(value), path)] if has_attributes(value) else None


PARTS: Sequence[tuple[Any, Callable[[Any, str], Parts]]] = (
    ((Tensor, *GENERATORS, *ARRAYS, *BUFFERS), lambda value, path: []),
    (Queue, lambda value, path: [(value.queue, path)]),
    (types.GeneratorType, lambda value, path: _named(inspect.getgeneratorlocals(value), path)),
    (dict, lambda value, path: [(item, f"{path}[{key!r:.40}]") for key, item in first_elements(value, MAX_ITEMS)]),
    (ITERABLES, lambda value, path: [(item, f"{path}[{i}]") for i, item in enumerate(first_elements(value, MAX_ITEMS))]),
    (partial, lambda value, path: [(part, path) for part in (value.func, value.args, value.keywords)]),
    (types.MethodType, lambda value, path: [(value.__self__, path), (value.__func__, path)]),
    (CONTEXTS, lambda value, path: [(item, path) for item in context_variables(value).values()]),
    (types.CellType, lambda value, path: [(content, path) for content in cell_contents(value)]),
    (GlobalVariable, lambda value, path: [(value.namespace.get(value.name), f"the global {value.name} of {path}")]),
    (weakref.ref, lambda value, path: [(value(), path)]),
)


def _named(values: Mapping[str, Any], path: str) -> Parts:
    return [(item, f"{path}.{name}") for name, item in values.items()]


def _wrapped_function(value: Any) -> types.FunctionType | None:
    """Return the function that another callable stands for, as of `functools.cache`."""
    if not callable(value) or isinstance(value, type | partial):
        return None
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    return wrapped if inspect.isfunction(wrapped) else None


def _label(value: Any) -> str | None:
    """Return the label of an object that other ranks may have under the same name; None for any other."""
    if isinstance(value, GlobalVariable):
        return f"global {value.namespace.get('__name__')}.{value.name}"
    return f"class {value.__module__}.{value.__qualname__}" if isinstance(value, type) else None


def _may_talk(module: types.ModuleType, name: str) -> bool:
    """Whether a variable of a Python module is looked at: of a framework's no functions, classes and modules."""
    if name not in vars(module):
        return False
    value = vars(module)[name]
    return (
        not is_of_framework(module.__name__)
        or value is os.getenv
        or not (callable(value) or isinstance(value, types.ModuleType))
    )


def context_variables(context: Any) -> dict[str, Any]:
    """Return what a ContextVar, or a threading.local, holds in this context."""
    if isinstance(context, ContextVar):
        value = context.get(None)
        return {} if value is None else {context.name: value}
    return dict(vars(context))


def cell_contents(cell: types.CellType) -> Sequence[Any]:
    """Return the value of a closure's variable in a list, which is empty if it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _functions_of_class(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            yield value


def class_attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are values, not methods."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") and name.endswith("__"))
        and name != "_abc_impl"
        and not callable(value)
        and not hasattr(value, "__get__")
    }
