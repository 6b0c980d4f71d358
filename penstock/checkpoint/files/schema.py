"""The rules for a manifest: all of it is checked before any of it is used."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.checkpoint.files import packing

TRANSFORMERS_FILES = ("config.json", "generation_config.json")  # transformers saves these beside a model's weights
MAX_COUNT = 2**53


class ValueRule(NamedTuple):
    """The rule for a value, or for the keys of an object: `accepts(value)` returns something true if it is valid."""

    description: str
    accepts: Callable[[Any], Any]


class PackedStateRule(NamedTuple):
    """The rule for a value from `packing.pack`. `kinds`: those allowed; empty for all."""

    kinds: tuple[str, ...] = ()


def _full_match(pattern: str) -> Callable[[Any], Any]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)


def _is_file_entry(value: dict[str, Any]) -> Any:
    return (
        value.keys() in ({"bytes", "sha256"}, {"bytes", "crc32"})
        and _COUNT.accepts(value["bytes"])
        and _full_match("[0-9a-f]{64}" if "sha256" in value else "[0-9a-f]{8}")(value.get("sha256", value.get("crc32")))
    )


_TEXT = ValueRule("a text", lambda value: isinstance(value, str))
_LIST = ValueRule("a list", lambda value: isinstance(value, list))
_OBJECT = ValueRule("an object", lambda value: isinstance(value, dict))
_COUNT = ValueRule("a whole number", lambda value: type(value) is int and 0 <= value < MAX_COUNT)
_FILE = ValueRule("the plain name of a safetensors file", _full_match(r"[\w-][\w.-]{0,200}\.safetensors"))
_ENTRY = ValueRule(
    "a file's bytes and their SHA-256, or CRC-32", lambda value: isinstance(value, dict) and _is_file_entry(value)
)
_SETTING = ValueRule(" or ".join(TRANSFORMERS_FILES), lambda value: value in TRANSFORMERS_FILES)
_STATE = PackedStateRule(("dict", "items"))
_GROUP = {"options": PackedStateRule(("dict",)), "names": [_TEXT]}
_OPTIONAL = ("scaler",)  # may be None, and is missing in older checkpoints
_MANIFEST = {
    "format": _TEXT,
    "step": _COUNT,
    "settings": {_SETTING: _OBJECT},
    "files": {_FILE: _ENTRY},
    "aliases": {_TEXT: _TEXT},
    "model": {_TEXT: PackedStateRule()},
    "optimizers": [{"kind": _TEXT, "groups": [_GROUP], "state": {_TEXT: _STATE}}],
    "schedulers": [_STATE],
    "scaler": _STATE,
    "extra": _STATE,
    "random": [PackedStateRule(("dict",))],
}


def validate_and_list_tensors(content: Any) -> list[str]:
    """Return the names of the tensors in a manifest's `content`. Raises ValueError, with the location, if it is no manifest."""
    return list(_tensor_names(content, _MANIFEST, "it"))


def _tensor_names(value: Any, rule: Any, location: str) -> Iterator[str]:
    if isinstance(rule, PackedStateRule):
        if rule.kinds and not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in rule.kinds):
            raise ValueError(f"{location} is no {' or '.join(rule.kinds)}")
        yield from packing.tensor_names_in(value, location)
        return
    kind = rule if isinstance(rule, ValueRule) else _LIST if isinstance(rule, list) else _OBJECT
    if not kind.accepts(value):
        raise ValueError(f"{location} is {repr(value)[:60]}, not {kind.description}")
    if isinstance(rule, list):
        for number, item in enumerate(value):
            yield from _tensor_names(item, rule[0], f"{location}.{number}")
    for name, item in rule.items() if isinstance(rule, dict) else ():
        if isinstance(name, ValueRule):
            for key, item_value in value.items():
                yield from _tensor_names(key, name, f"a name in {location}")
                yield from _tensor_names(item_value, item, f"{location}.{key}")
        elif name not in value and name not in _OPTIONAL:
            raise ValueError(f"{location} has no {name!r}")
        elif name not in _OPTIONAL or value.get(name) is not None:
            yield from _tensor_names(value[name], item, f"{location}.{name}")
