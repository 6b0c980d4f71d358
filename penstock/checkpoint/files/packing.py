"""Convert state (nested numbers, texts, lists, dicts and tensors) to JSON with the tensors aside, and back. Nothing is pickled.

A number, a text, True, False or None stays as it is; a list becomes a list of packed values. Everything else becomes an object
with one key, its kind: `{"tensor": name}`, `{"tuple": [..]}`, `{"dict": {text: ..}}`, `{"items": [[key, value], ..]}` (a
dict with keys that are no texts), `{"counter": [[key, value], ..]}`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from penstock.errors import MismatchError
from penstock.stage.dtensor import gather_full_tensor

PACKED_KINDS: dict[Any, Any] = {"tensor": str, "tuple": list, "dict": dict, "items": list, "counter": list}
MAX_DEPTH = 100


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON; put its tensors into `tensors`, under names that begin with `name`.

    A DTensor is gathered, so all ranks that have a shard of it must pack it.
    Raises MismatchError, with the name, for a value of any kind that is not listed above.
    """
    if isinstance(value, Tensor):
        while name in tensors:
            name += "+"
        tensors[name] = gather_full_tensor(value.detach())
        return {"tensor": name}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        parts = [pack(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, dict):
        if not isinstance(value, Counter) and all(isinstance(key, str) for key in value):
            return {"dict": {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}}
        pairs = [[pack(key, name, tensors), pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "items": pairs}
    raise MismatchError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot keep: "
        "give tensors, numbers, texts, None, or lists, tuples and dicts of them"
    )


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `pack` converted to `packed`. `tensors`: by name."""
    if isinstance(packed, list):
        return [unpack(value, tensors) for value in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(unpack(content, tensors))
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in content.items()}
    pairs = {unpack(key, tensors): unpack(value, tensors) for key, value in content}
    return Counter(pairs) if kind == "counter" else pairs


def tensor_names_in(packed: Any, location: str, depth: int = 0) -> Iterator[str]:
    """Yield the names of the tensors in `packed`. Raises ValueError, with its `location`, for anything `pack` never returns."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{location[:60]}.. is more than {MAX_DEPTH} lists or dicts deep")
    if isinstance(packed, list):
        for number, value in enumerate(packed):
            yield from tensor_names_in(value, f"{location}.{number}", depth + 1)
    elif isinstance(packed, dict):
        ((kind, content),) = packed.items() if len(packed) == 1 else (("", None),)
        if not isinstance(content, PACKED_KINDS.get(kind, ())):
            raise ValueError(f"{location} is an object of a kind that is not known")
        if kind == "tensor":
            yield content
        elif kind == "dict":
            for key, value in content.items():
                yield from tensor_names_in(value, f"{location}.{key}", depth + 1)
        else:
            yield from tensor_names_in(content, location, depth + 1)
            if kind != "tuple" and not all(
                isinstance(pair, list) and len(pair) == 2 and _can_be_key(pair[0]) for pair in content
            ):
                raise ValueError(f"{location} is no list of pairs")


def _can_be_key(packed: Any) -> bool:
    """Return whether the value that `packed` stands for can be a key of a dict."""
    if isinstance(packed, dict):
        return "tensor" in packed or ("tuple" in packed and all(map(_can_be_key, packed["tuple"])))
    return not isinstance(packed, list)
