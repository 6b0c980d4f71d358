"""What a manifest may say: all of it is checked before any of it is believed."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoint.files import packing

Check = Callable[[Any, str], None]  # raises ValueError for a value at a place that is not what it should be

_DIGEST = re.compile("[0-9a-f]{64}")
_FILE = re.compile(r"[\w-][\w.-]{0,200}\.safetensors", re.ASCII)  # a plain name, in the folder
SETTINGS = ("config.json", "generation_config.json")  # what transformers keeps beside a model's weights
MOST_STEPS = 2**53


def check(content: Any) -> list[str]:
    """The names of the tensors that a manifest's `content` tells of. Raises ValueError, naming the place, if it is none."""
    found: list[str] = []

    def packed(*kinds: str) -> Check:
        """What `packing` wrote, of one of these kinds; its tensors are among those found."""

        def look(value: Any, at: str) -> None:
            if kinds and not (isinstance(value, dict) and len(value) == 1 and next(iter(value)) in kinds):
                raise ValueError(f"{at} is no {' or '.join(kinds)}")
            found.extend(packing.tensors_of(value, at))

        return look

    group = _record({"options": packed("dict"), "names": _each(_text)})
    optimizer = _record({"kind": _text, "groups": _each(group), "state": _under(_text, packed("dict", "items"))})
    manifest = {
        "format": _text,
        "step": _whole,
        "settings": _under(_setting, _mapping),
        "files": _under(_file, _record({"bytes": _whole, "sha256": _digest})),
        "aliases": _under(_text, _text),
        "model": _under(_text, packed()),
        "optimizer": _optional(optimizer),
        "scheduler": _optional(packed("dict", "items")),
        "extra": packed("dict", "items"),
        "random": _each(packed("dict")),
    }
    _record(manifest)(content, "it")
    return found


def _is(fits: Callable[[Any], Any], what: str) -> Check:
    def look(value: Any, at: str) -> None:
        if not fits(value):
            raise ValueError(f"{at} is {repr(value)[:60]}, not {what}")

    return look


_text = _is(lambda value: isinstance(value, str), "a text")
_whole = _is(lambda value: type(value) is int and 0 <= value < MOST_STEPS, "a whole number")
_digest = _is(lambda value: isinstance(value, str) and _DIGEST.fullmatch(value), "a SHA-256")
_file = _is(lambda value: isinstance(value, str) and _FILE.fullmatch(value), "the plain name of a safetensors file")
_setting = _is(lambda value: value in SETTINGS, " or ".join(SETTINGS))
_mapping = _is(lambda value: isinstance(value, dict), "an object")
_list = _is(lambda value: isinstance(value, list), "a list")


def _record(fields: Mapping[str, Check]) -> Check:
    def look(value: Any, at: str) -> None:
        _mapping(value, at)
        for name, each in fields.items():
            if name not in value:
                raise ValueError(f"{at} has no {name!r}")
            each(value[name], f"{at}.{name}")

    return look


def _under(name: Check, each: Check) -> Check:
    def look(value: Any, at: str) -> None:
        _mapping(value, at)
        for key, one in value.items():
            name(key, f"a name in {at}")
            each(one, f"{at}.{key}")

    return look


def _each(each: Check) -> Check:
    def look(value: Any, at: str) -> None:
        _list(value, at)
        for number, one in enumerate(value):
            each(one, f"{at}.{number}")

    return look


def _optional(each: Check) -> Check:
    return lambda value, at: None if value is None else each(value, at)
