"""Bring what `compute_loss` collects on the trainer from the last stage's rank, where it runs, to all ranks.

Read are the attributes that a script sets on the trainer, and the trainer's `state` and `control`: numbers, texts and tensors,
in lists, dicts, sets, deques and in objects of the script's own classes. They are encoded before and after a step, and what
differs is sent: of a list what was appended, of a dict the keys that differ.
"""

import warnings
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import penstock as ps
from penstock.integrations.transformers.model_call import ModelCall, current_call
from penstock.torch_private import tensor_version

ATOMS = (type(None), bool, int, float, complex, str, bytes)
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
LIBRARIES = ("builtins", "torch", "transformers", "accelerate", "datasets", "peft", "penstock", "numpy", "threading")


class _TensorCode:
    """A tensor: equal to another code of it until it is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._key = (id(tensor), 0 if tensor.is_inference() else tensor_version(tensor))

    def __eq__(self, code: object) -> bool:
        return isinstance(code, _TensorCode) and code._key == self._key

    __hash__ = None  # type: ignore[assignment]


class _ObjectCode:
    """An object that is not read: equal to another code of it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, code: object) -> bool:
        return isinstance(code, _ObjectCode) and code.value is self.value

    __hash__ = None  # type: ignore[assignment]


def encode(value: Any, ancestors: tuple[Any, ...] = ()) -> Any:
    """Return `value` as an atom, a code of a tensor or object, or a tuple (kind, items) of a collection."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, Tensor):
        return _TensorCode(value)
    if any(value is ancestor for ancestor in ancestors):
        return _ObjectCode(value)

    ancestors = (*ancestors, value)
    for kind, collection in COLLECTIONS.items():
        if isinstance(value, collection):
            return kind, [encode(item, ancestors) for item in value]
    if isinstance(value, dict):
        return "dict", [(encode(key), encode(item, ancestors)) for key, item in value.items()]
    return encode_attributes(value, vars(value), ancestors) if _is_script_object(value) else _ObjectCode(value)


def _is_script_object(value: Any) -> bool:
    """Return whether `value` is an object of the script's own, whose attributes are read: no data set and no network."""
    if type(value).__module__.partition(".")[0] in LIBRARIES or not hasattr(value, "__dict__") or isinstance(value, type):
        return False
    is_network = isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    return not is_network and not isinstance(value, Dataset)


def encode_attributes(owner: Any, names: Iterable[str], ancestors: tuple[Any, ...] = ()) -> tuple[str, list[Any]]:
    """Return the code of an object of which only these attributes are read."""
    attributes = vars(owner)
    return "attributes", [(name, encode(attributes[name], ancestors)) for name in names if name in attributes]


def difference(before: Any, after: Any, path: str, unsent: list[str]) -> tuple[Any, ...] | None:
    """Return the change between two codes, None if they are equal. Adds the path of what cannot be sent to `unsent`."""
    if before == after:
        return None
    if isinstance(before, tuple) and isinstance(after, tuple) and before[0] == after[0]:
        (kind, old), (_, new) = before, after
        if kind in ("dict", "attributes"):
            return _difference_of_entries(kind, old, new, path, unsent)
        if kind in ("list", "deque") and new[: len(old)] == old:
            return _sendable("append", ("list", new[len(old) :]), path, unsent)
    return _sendable("set", after, path, unsent)


def _difference_of_entries(
    kind: str, before: list[Any], after: list[Any], path: str, unsent: list[str]
) -> tuple[Any, ...] | None:
    changes, old = [], {repr(key): value for key, value in before}
    for key, value in after:
        entry_path = f"{path}[{key!r}]" if kind == "dict" else f"{path}.{key}"
        known = repr(key) in old
        change = difference(old[repr(key)], value, entry_path, unsent) if known else _sendable("set", value, entry_path, unsent)
        changes += [(key, change)] if change is not None else []
    names = {repr(key) for key, _ in after}
    removed = [key for key, _ in before if repr(key) not in names]
    return ("entries", changes, removed) if changes or removed else None


def _sendable(action: str, code: Any, path: str, unsent: list[str]) -> tuple[Any, ...] | None:
    try:
        return action, plain(code)
    except TypeError:
        unsent.append(path)
        return None


def plain(code: Any) -> Any:
    """Return the code with tensors in place of their codes. Raises TypeError if there is an object in it."""
    if isinstance(code, _TensorCode):
        return code.tensor.detach().clone()
    if isinstance(code, _ObjectCode) or (isinstance(code, tuple) and code[0] == "attributes"):
        raise TypeError("an object cannot be sent")
    return type(code)(map(plain, code)) if isinstance(code, list | tuple) else code


def decode(code: Any) -> Any:
    """Return the value of a plain code."""
    if not isinstance(code, tuple):
        return code
    kind, items = code
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    return COLLECTIONS[kind](map(decode, items))


def apply_change(value: Any, change: tuple[Any, ...]) -> Any:
    """Return `value` with the change; collections and tensors are changed in place, so that all their names see it."""
    action, body, *removed = change
    if action == "append":
        value.extend(decode(body))
        return value
    if action == "set":
        return _set_in_place(value, decode(body))

    entries: Any = value if isinstance(value, dict) else vars(value)
    for code, entry_change in body:
        key = decode(code)
        entry = entries[key] if key in entries or isinstance(entries, defaultdict) else None
        entries[key] = apply_change(entry, entry_change)
    for code in removed[0]:
        del entries[decode(code)]
    return value


def _set_in_place(value: Any, new: Any) -> Any:
    """Return `value` with the content of `new` if both are collections of one kind, else `new`."""
    if isinstance(value, Tensor) and isinstance(new, Tensor) and (value.shape, value.dtype) == (new.shape, new.dtype):
        with torch.no_grad():
            value.copy_(new)
        return value
    if (isinstance(value, dict) and isinstance(new, Mapping)) or (isinstance(value, set) and isinstance(new, set)):
        value.clear()
        value.update(new)
        return value
    if isinstance(value, list | deque) and isinstance(new, list | deque):
        value.clear()
        value.extend(new)
        return value
    return new


class LossEffects:
    """What `compute_loss` logs and collects on `trainer`.

    `trainer_names`: the attributes that Trainer sets, which are not the script's.
    """

    def __init__(self, trainer: Any, trainer_names: Collection[str]) -> None:
        self._trainer, self._trainer_names = trainer, trainer_names
        self._before: list[Any] = []
        self._decisions: dict[str, bool] = {}  # of `trainer.control`
        self._warned: set[str] = set()

    def may_exist(self) -> bool:
        """Return whether a script's code runs in the loss; the same on all ranks."""
        trainer = self._trainer
        is_own = "compute_loss" in vars(trainer) or type(trainer).compute_loss is not transformers.Trainer.compute_loss
        return is_own or trainer.compute_loss_func is not None

    def begin(self) -> None:
        """Read the attributes, before the losses of a step are computed."""
        if self.may_exist():
            self._before, self._decisions = self._read(), dict(vars(self._trainer.control))

    def message(self, calls: Sequence[ModelCall]) -> Any:
        """Return what the last stage's rank sends to all. Takes back its decisions (`trainer.control`) until `apply`."""
        if not self.may_exist():
            return None
        unsent: list[str] = []
        codes = zip(("trainer", "trainer.state"), self._before, self._read(), strict=True)
        changes = [difference(before, after, path, unsent) for path, before, after in codes]
        decisions = vars(self._trainer.control)
        changed_decisions = {name: value for name, value in decisions.items() if value != self._decisions[name]}
        decisions.update(self._decisions)
        try:
            logs = plain(encode([call.logs for call in calls]))
        except TypeError:
            raise ps.MismatchError("compute_loss logs something else than numbers and texts: log(..) takes these") from None
        return logs, changes, changed_decisions, unsent

    def apply(self, message: Any, is_sender: bool) -> tuple[list[Any], dict[str, bool]]:
        """Apply the changes of the last stage's rank. Returns what each call has logged, and changes of `trainer.control`."""
        if message is None:
            return [], {}
        logs, changes, decisions, unsent = message
        for owner, change in zip((self._trainer, self._trainer.state), changes, strict=True):
            if change is not None and not is_sender:
                apply_change(owner, change)
        for path in unsent:
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(
                    f"compute_loss sets {path} on the last stage's rank only, because it is no number, text or tensor, and no "
                    "collection of them: other ranks do not have it",
                    stacklevel=2,
                )
        return decode(logs), decisions

    def _read(self) -> list[Any]:
        trainer = self._trainer
        names = [name for name in vars(trainer) if name not in self._trainer_names or name == "compute_loss_func"]
        state_names = [name for name in vars(trainer.state) if name != "log_history"]  # which `log` extends
        ancestors = (trainer, trainer.model)
        return [encode_attributes(trainer, names, ancestors), encode_attributes(trainer.state, state_names, ancestors)]


@contextmanager
def record_logs(trainer: Any) -> Iterator[None]:
    """Record what a function in a ModelCall logs, instead of logging it."""
    log, own_log = trainer.log, vars(trainer).get("log")

    def record(*arguments: Any, **options: Any) -> None:
        call = current_call.get(None)
        if call is None:
            log(*arguments, **options)
        else:
            call.logs.append((arguments, options))

    trainer.log = record
    try:
        yield
    finally:
        del trainer.log
        if own_log is not None:
            trainer.log = own_log
