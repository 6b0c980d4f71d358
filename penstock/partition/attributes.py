"""Plain attributes of modules (`self.alpha = 0.5`): restored after a forward was traced or measured, and compared later.

A graph has the values that the forwards around the units read while it was made. Units are called, and read theirs every time.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn

from penstock.errors import MismatchError
from penstock.python_objects import (
    CONTAINERS,
    MODULE_ATTRIBUTES,
    elements,
    has_attributes,
    is_of_framework,
    module_attributes,
    replace_elements,
)
from penstock.torch_private import forward_hooks, tree_leaves

Attribute = tuple[int, str]  # id of a module or of its class, name
_PLAIN_TYPES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NUMBERS_AND_TENSORS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, Tensor, fx.Proxy)
_MAX_DEPTH, _MAX_ITEMS = 3, 10_000  # of containers whose elements are restored
_MAX_ITEMS_SENT = 1000  # of a container
_MAX_COMPARISONS = 10_000  # with one number, in one forward
_MISSING = object()


@contextmanager
def restore_attributes_afterwards(model: nn.Module) -> Iterator[dict[Attribute, "AttributeChange"]]:
    """Restore, at the end, the attributes of the model's modules that forwards have changed: counters, lists, caches.

    Yields a dict, which gets the changes at the end.
    """
    values, changes = AttributeValues(_attribute_owners(model)), dict[Attribute, AttributeChange]()
    try:
        yield changes
    finally:
        changes |= values.changes()
        values.restore()


def _attribute_owners(model: nn.Module) -> list[Any]:
    """Return the modules of `model`, and those of their classes that users wrote."""
    modules = list(model.modules())
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    return [*modules, *(cls for cls in classes if not is_of_framework(cls.__module__))]


class AttributeChange(NamedTuple):
    """An attribute that a forward has set, or whose elements it has changed."""

    owner: Any  # a module, or its class
    name: str
    before: "_Contents | None"  # None if it is new
    value: Any  # what it has now, containers as copies; _MISSING if it was deleted

    def leaves(self) -> list[Any]:
        """Return the values in its containers that are no containers."""
        return list(_leaves(self.value))


class AttributeValues:
    """The attributes that modules and classes have now: later it says which have changed, and restores them.

    Lists, dicts, sets, deques and objects of users' classes get their elements back, also those in each other.
    """

    def __init__(self, owners: Sequence[Any]) -> None:
        objects_seen = set[int]()
        self._contents = [
            (owner, {name: _Contents(value, objects_seen) for name, value in _own_attributes(owner).items()})
            for owner in owners
        ]
        self._num_hooks = _count_hooks(owners)

    def changes(self) -> dict[Attribute, AttributeChange]:
        """Return the attributes that have another value or other elements now."""
        return {
            (id(owner), name): AttributeChange(owner, name, contents.get(name), _copied(value))
            for owner, contents in self._contents
            for name, value in (dict.fromkeys(contents, _MISSING) | _own_attributes(owner)).items()
            if name not in contents or not contents[name].equal(value)
        }

    def restore(self) -> None:
        """Give all attributes the values and elements that they had.

        A new one that is True stays if the forward has put hooks on the module: they stay too, and are not to be put there
        twice (transformers does it).
        """
        for owner, contents in self._contents:
            own_attributes = _own_attributes(owner)
            for name in own_attributes.keys() - contents.keys():
                if own_attributes[name] is not True or not self._has_new_hooks(owner):
                    _delete_attribute(owner, name)
            for name, content in contents.items():
                content.restore()
                if vars(owner).get(name, _MISSING) is not content.value:
                    set_attribute(owner, name, content.value)

    def _has_new_hooks(self, owner: Any) -> bool:
        """Whether a module, or one inside of it, has more or fewer forward hooks now."""
        modules = () if isinstance(owner, type) else owner.modules()
        return any(len(forward_hooks(module)) != self._num_hooks.get(module, 0) for module in modules)


class _Contents:
    """A value and, if it is a container, the contents of its elements.

    `objects_seen`: ids of objects whose attributes are in others: all modules of a model may have one `config`.
    """

    def __init__(self, value: Any, objects_seen: set[int], depth: int = 0) -> None:
        self.value, items = value, None
        if depth < _MAX_DEPTH and id(value) not in objects_seen:
            items = _items(value)
        if items is not None and not isinstance(value, (*CONTAINERS, tuple)):
            objects_seen.add(id(value))
        self.items = None if items is None else {key: _Contents(item, objects_seen, depth + 1) for key, item in items.items()}

    def equal(self, value: Any) -> bool:
        """Whether a value is the same, or a copy with the same elements, as `torch.export` puts there."""
        if self.items is None or type(value) is not type(self.value):
            is_plain = isinstance(value, _PLAIN_TYPES) and type(value) is type(self.value)
            return value is self.value or (is_plain and bool(value == self.value))
        items = _items(value) or {}
        return items.keys() == self.items.keys() and all(self.items[key].equal(item) for key, item in items.items())

    def restore(self) -> None:
        """Give the container, and those in it, the elements that they had."""
        for content in (self.items or {}).values():
            content.restore()
        if self.items is not None and not isinstance(self.value, tuple) and not self.equal(self.value):
            _replace_items(self.value, {key: content.value for key, content in self.items.items()})


def _own_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module besides those that every module has, or of a class its plain values."""
    if isinstance(owner, type):
        return {
            name: value
            for name, value in vars(owner).items()
            if isinstance(value, (*_PLAIN_TYPES, *CONTAINERS)) and not name.startswith("__") and name not in MODULE_ATTRIBUTES
        }
    return module_attributes(owner)


def _count_hooks(owners: Sequence[Any]) -> dict[nn.Module, int]:
    """Return the number of forward hooks of each module that is, or is inside of, one of `owners`. Each is visited once."""
    counts: dict[nn.Module, int] = {}
    for owner in owners:
        if not isinstance(owner, type) and owner not in counts:
            counts |= {module: len(forward_hooks(module)) for module in owner.modules()}
    return counts


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, without its `__setattr__`, or of a class."""
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value


def _delete_attribute(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        delattr(owner, name)
    else:
        del vars(owner)[name]


def _items(value: Any) -> dict[Any, Any] | None:
    """Return the elements of a container, or the attributes of an object, by key; None for other values, and large ones."""
    items: dict[Any, Any] | None = None
    if isinstance(value, (*CONTAINERS, tuple)):
        items = elements(value)
    elif _is_record(value):
        items = vars(value)
    return None if items is None or len(items) > _MAX_ITEMS else items


def _is_record(value: Any) -> bool:
    """Whether a value is an object with attributes, of a user's class or a SimpleNamespace."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return False
    return has_attributes(value) and isinstance(getattr(value, "__dict__", None), dict)


def _replace_items(value: Any, items: Mapping[Any, Any]) -> None:
    replace_elements(value if isinstance(value, CONTAINERS) else vars(value), items)


def _copied(value: Any, depth: int = 0) -> Any:
    """Return a container or object with copies of those in it; any other value itself."""
    items = _items(value) if depth < _MAX_DEPTH else None
    return value if items is None else _with_items(value, {key: _copied(item, depth + 1) for key, item in items.items()})


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    items = _items(value) if depth < _MAX_DEPTH else None
    if items is None:
        yield value
    for item in (items or {}).values():
        yield from _leaves(item, depth + 1)


def _with_items(container: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a container or object with these elements."""
    if isinstance(container, tuple):
        return container._make(items.values()) if hasattr(container, "_make") else tuple(items.values())
    copied = copy(container)
    _replace_items(copied, items)
    return copied


# -- what the next call of a forward reads ------------------------------------------------------------------------------


def values_in_next_call(change: AttributeChange, is_constant: Callable[[Any], bool]) -> list[Any]:
    """Return what an attribute may be when the forward is called next, to see whether the forward's graph depends on it.

    Empty if it is as it was. Numbers and tensors that have changed are replaced by an `_EarlierValue`, of which there are two.
    Flags stay as they are. `is_constant`: whether a value is the same in each call, as a table that is filled once; it is left
    as it was.
    """
    value = _in_next_call(change.before, change.value, True, is_constant)
    if value is _value_of(change.before) or (change.before is not None and change.before.equal(value)):
        return []
    if not any(isinstance(leaf, _EarlierValue) for leaf in _leaves(value)):
        return [value]
    return [value, _in_next_call(change.before, change.value, False, is_constant)]


def _in_next_call(before: _Contents | None, value: Any, truth: bool, is_constant: Callable[[Any], bool], depth: int = 0) -> Any:
    if before is not None and before.equal(value):
        return value
    if isinstance(value, bool):  # a flag, as of hooks that the first call has installed: what it is then decides
        return value
    if isinstance(value, _NUMBERS_AND_TENSORS):
        return _value_of(before) if is_constant(value) else _EarlierValue(truth)
    if depth >= _MAX_DEPTH or (items := _items(value)) is None:
        return value
    if items and all(map(is_constant, _leaves(value, depth))):  # tables in a list or tuple
        return _value_of(before)

    items_before = (None if before is None else before.items) or {}
    next_items = {key: _in_next_call(items_before.get(key), item, truth, is_constant, depth + 1) for key, item in items.items()}
    return _with_items(value, {key: item for key, item in next_items.items() if item is not _MISSING})


def _value_of(contents: _Contents | None) -> Any:
    return _MISSING if contents is None else contents.value


@contextmanager
def attribute_in_next_call(change: AttributeChange, value: Any) -> Iterator[None]:
    """Give an attribute one of the `values_in_next_call`."""
    values = AttributeValues([change.owner])
    if value is not _MISSING:
        set_attribute(change.owner, change.name, value)
    elif change.name in vars(change.owner):
        _delete_attribute(change.owner, change.name)
    try:
        yield
    finally:
        values.restore()


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


class _EarlierValue:
    """A number or tensor that the forward's last call has left: what is computed from it is the same object.

    So the graph has it where it depends on it. Comparisons give `truth`.
    """

    def __init__(self, truth: bool) -> None:
        self._truth, self._num_comparisons = truth, 0

    def __bool__(self) -> bool:
        self._num_comparisons += 1
        if self._num_comparisons > _MAX_COMPARISONS:  # in a loop that ends at another number
            raise AttributeError
        return self._truth

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __format__(self, format_spec: str) -> str:
        return "0"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the earlier value among the arguments of a function of torch."""
        return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))

    __hash__ = object.__hash__


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_EarlierValue, f"__{_name}__", lambda value, other: bool(value))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(_EarlierValue, f"__{_name}__", lambda value, other: value)
    setattr(_EarlierValue, f"__r{_name}__", lambda value, other: value)
for _name in ("neg", "pos", "abs", "round", "call", "getitem"):
    setattr(_EarlierValue, f"__{_name}__", lambda value, *args, **kwargs: value)


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
            if not any((id(owner), name) in changed for owner in (module, *type(module).__mro__))
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
    names = vars(module).keys() - MODULE_ATTRIBUTES
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch."):
            names |= {
                name for name, value in vars(cls).items() if isinstance(value, _PLAIN_TYPES) and not name.startswith("__")
            }
    return names - MODULE_ATTRIBUTES


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


def attributes_to_send(module: nn.Module) -> dict[str, Any]:
    """Return copies of a module's attributes that are numbers, texts or None, or containers of these: as a drop-out rate."""
    return {name: deepcopy(value) for name, value in _own_attributes(module).items() if _can_be_sent(value)}


def _can_be_sent(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return len(value) <= _MAX_ITEMS_SENT and all(map(_can_be_sent, value))
    if type(value) is dict:
        return len(value) <= _MAX_ITEMS_SENT and all(_can_be_sent(item) for pair in value.items() for item in pair)
    return type(value) in (bool, int, float, complex, str, type(None), torch.dtype)


def _static_attribute(module: nn.Module, name: str) -> Any:
    """Return the attribute of the module or its class, without calling a property."""
    values = (vars(owner)[name] for owner in (module, *type(module).__mro__) if name in vars(owner))
    return next(values, _MISSING)
