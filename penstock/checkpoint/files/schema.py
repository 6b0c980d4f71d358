"""What a manifest may say: all of it is checked before any of it is believed."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.checkpoint.files import packing

SETTINGS = ("config.json", "generation_config.json")  # what transformers keeps beside a model's weights
MOST_STEPS = 2**53


class Is(NamedTuple):
    """A value that `fits`, or the names of an object that do."""

    what: str
    fits: Callable[[Any], Any]


class Packed(NamedTuple):
    """What `packing` wrote, of one of these kinds, or of any."""

    kinds: tuple[str, ...] = ()


def _like(pattern: str) -> Callable[[Any], Any]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)


def _is_entry(value: dict[str, Any]) -> Any:
    return (
        value.keys() in ({"bytes", "sha256"}, {"bytes", "crc32"})
        and _WHOLE.fits(value["bytes"])
        and _like("[0-9a-f]{64}" if "sha256" in value else "[0-9a-f]{8}")(value.get("sha256", value.get("crc32")))
    )


_TEXT = Is("a text", lambda value: isinstance(value, str))
_LIST = Is("a list", lambda value: isinstance(value, list))
_OBJECT = Is("an object", lambda value: isinstance(value, dict))
_WHOLE = Is("a whole number", lambda value: type(value) is int and 0 <= value < MOST_STEPS)
_FILE = Is("the plain name of a safetensors file", _like(r"[\w-][\w.-]{0,200}\.safetensors"))
_ENTRY = Is("a file's bytes and their SHA-256, or CRC-32", lambda value: isinstance(value, dict) and _is_entry(value))
_SETTING = Is(" or ".join(SETTINGS), lambda value: value in SETTINGS)
_STATE = Packed(("dict", "items"))
_GROUP = {"options": Packed(("dict",)), "names": [_TEXT]}
_OPTIONAL = ("optimizer", "scheduler", "scaler")
_NEWER = ("scaler",)  # which older checkpoints lack
_MANIFEST = {
    "format": _TEXT,
    "step": _WHOLE,
    "settings": {_SETTING: _OBJECT},
    "files": {_FILE: _ENTRY},
    "aliases": {_TEXT: _TEXT},
    "model": {_TEXT: Packed()},
    "optimizer": {"kind": _TEXT, "groups": [_GROUP], "state": {_TEXT: _STATE}},
    "scheduler": _STATE,
    "scaler": _STATE,
    "extra": _STATE,
    "random": [Packed(("dict",))],
}


def check(content: Any) -> list[str]:
    """The names of the tensors that a manifest's `content` tells of. Raises ValueError, naming the place, if it is none."""
    return list(_tensors_of(content, _MANIFEST, "it"))


def _tensors_of(value: Any, expected: Any, at: str) -> Iterator[str]:
    if isinstance(expected, Packed):
        if expected.kinds and not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in expected.kinds):
            raise ValueError(f"{at} is no {' or '.join(expected.kinds)}")
        yield from packing.tensors_of(value, at)
        return
    kind = expected if isinstance(expected, Is) else _LIST if isinstance(expected, list) else _OBJECT
    if not kind.fits(value):
        raise ValueError(f"{at} is {repr(value)[:60]}, not {kind.what}")
    if isinstance(expected, list):
        for number, each in enumerate(value):
            yield from _tensors_of(each, expected[0], f"{at}.{number}")
    for name, each in expected.items() if isinstance(expected, dict) else ():
        if isinstance(name, Is):
            for key, one in value.items():
                yield from _tensors_of(key, name, f"a name in {at}")
                yield from _tensors_of(one, each, f"{at}.{key}")
        elif name not in value:
            if name not in _NEWER:
                raise ValueError(f"{at} has no {name!r}")
        elif value[name] is not None or name not in _OPTIONAL:
            yield from _tensors_of(value[name], each, f"{at}.{name}")
