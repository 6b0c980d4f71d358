"""Encode values that ranks send each other as JSON, followed by the bytes of tensors. Nothing is pickled.

    | length of the JSON, 8 bytes | JSON | bytes of the first tensor | bytes of the second | ..

The reader need not trust the writer. A class is sent by its name. The reading process must already have imported it: a
NamedTuple, an Enum, a dataclass of Penstock, or a class that is registered with torch's pytree. No module is imported, and no
function called, by a name that another rank has sent.
"""

import ctypes
import json
import math
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from io import BytesIO
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import MismatchError, first_line
from penstock.torch_private import TREE_NODES

MAX_VALUE_BYTES = 2**28  # of an encoded value
MAX_COMPRESSION_RATIO = 16  # of what is worth a try
MAX_NESTING = 100  # levels of containers
MAX_SAMPLED_VALUES = 64  # of a tensor
JSON_LENGTH = struct.Struct("<Q")
FLOAT64 = struct.Struct("<d")
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DEFAULT_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}  # of a defaultdict

# Class -> (function that splits a value into parts, function that builds it from them).
CODECS: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[[list[Any]], Any]]] = {
    list: (list, list),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    torch.Size: (list, torch.Size),
    dict: (lambda value: chain(*value.items()), lambda parts: dict(zip(parts[::2], parts[1::2], strict=True))),
    slice: (lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    range: (lambda value: (value.start, value.stop, value.step), lambda parts: range(*parts)),
    complex: (lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    float: (lambda value: [FLOAT64.pack(value).hex()], lambda parts: FLOAT64.unpack(bytes.fromhex(*parts))[0]),
    torch.dtype: (lambda value: [str(value)], lambda parts: DTYPES[parts[0]]),
    torch.device: (lambda value: [str(value)], lambda parts: torch.device(*parts)),
    type(Path()): (lambda value: [str(value)], lambda parts: Path(*parts)),
    type: (lambda value: [value.__name__], lambda parts: DEFAULT_FACTORIES[parts[0]]),
}
_BUILDERS = {kind.__name__: build for kind, (_, build) in CODECS.items()}


def encode(value: Any) -> bytes:
    """Return `value` as bytes. Raises MismatchError, with the reason and what to do, if it cannot be sent."""
    raw: list[bytes] = []
    tree = _to_json(value, raw, 0)
    try:
        text = json.dumps(tree, separators=(",", ":")).encode()
    except ValueError as error:
        raise MismatchError(f"a value cannot be sent to another rank: {error}") from error
    data = b"".join([JSON_LENGTH.pack(len(text)), text, *raw])
    if len(data) > MAX_VALUE_BYTES:
        raise MismatchError(f"a value of {len(data):,} bytes cannot be sent to another rank: {MAX_VALUE_BYTES:,} are the most")
    return data


def decode(data: bytes) -> Any:
    """Return the value that `encode` encoded as `data`. Raises MismatchError for any other bytes."""
    try:
        (length,) = JSON_LENGTH.unpack_from(data)
        raw = BytesIO(data[JSON_LENGTH.size + length :])
        value = _from_json(json.loads(data[JSON_LENGTH.size : JSON_LENGTH.size + length]), raw, 0)
        if raw.read(1):
            raise ValueError("there are bytes behind it")
    except Exception as error:
        raise _unreadable_error(error) from error
    return value


def _unreadable_error(error: Exception) -> MismatchError:
    hint = "all ranks must run the same program with the same releases"
    return MismatchError(f"what another rank sent cannot be read ({first_line(error)[:200]}): {hint}")


def compress(encoded: bytes, max_bytes: int) -> bytes:
    """Return what `encode` returned, compressed; empty if it takes more than `max_bytes`. It never begins with 0."""
    if len(encoded) > MAX_COMPRESSION_RATIO * max_bytes:
        return b""
    data = zlib.compress(encoded, 1)
    return data if len(data) <= max_bytes else b""


def decompress(data: bytes) -> Any:
    """Return the value that `compress` has compressed, at the begin of `data`. Raises MismatchError for any other bytes."""
    try:
        encoded = zlib.decompressobj().decompress(data)
    except zlib.error as error:
        raise _unreadable_error(error) from error
    return decode(encoded)


def all_gather_values(value: Any, device: torch.device) -> list[Any]:
    """Return every rank's `value`, by rank, gathered over torch's default group. `device`: where its backend takes tensors."""
    encoded = tensor_of_bytes(encode(value)).to(device)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([encoded.numel()], device=device))
    return all_gather_encoded(encoded, list(map(int, sizes)), dist.all_gather)


def all_gather_encoded(
    encoded: Tensor, sizes: Sequence[int], all_gather: Callable[[list[Tensor], Tensor], object]
) -> list[Any]:
    """Return every rank's value, by rank.

    `encoded`: the bytes of this rank's value, from `encode`. `sizes`: of all ranks' encoded values, in bytes.
    `all_gather`: torch's, or a function with the same arguments.
    """
    padded = encoded.new_zeros(max(map(check_announced_size, sizes)))
    padded[: encoded.numel()] = encoded
    rows = [torch.empty_like(padded) for _ in sizes]
    all_gather(rows, padded)
    return [decode(tensor_bytes(row[:size].cpu())) for row, size in zip(rows, sizes, strict=True)]


def check_announced_size(size: int) -> int:
    """Return `size`, the bytes that another rank announces for a value. Raises MismatchError unless it is possible."""
    if not 0 <= size <= MAX_VALUE_BYTES:
        raise MismatchError(f"another rank sends a value of {size:,} bytes: {MAX_VALUE_BYTES:,} are the most")
    return size


def view_as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view of a contiguous tensor: every transport can send it, whatever dtypes it supports."""
    return tensor.view(-1).view(torch.uint8)


def sample_bytes(tensor: Tensor) -> Tensor:
    """Return some of a tensor's values, evenly spread, as bytes: they show changes of `.data`, unknown to autograd."""
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if tensor.is_contiguous():  # the common case, in a quarter of the time
        return torch.as_strided_copy(tensor, *sampled_layout(tensor)).view(torch.uint8)
    _, (step,) = sampled_layout(tensor)
    return view_as_bytes(tensor.take(torch.arange(0, tensor.numel(), step, device=tensor.device)))


def sampled_layout(tensor: Tensor) -> tuple[tuple[int], tuple[int]]:
    """Return the shape and stride of a view, on a contiguous tensor, of values that are evenly spread."""
    step = max(1, -(-tensor.numel() // MAX_SAMPLED_VALUES))
    return (-(-tensor.numel() // step),), (step,)


def tensor_of_bytes(data: bytes) -> Tensor:
    """Return a copy of `data`, which is not empty, as a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a copy of the bytes of a contiguous tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# ---- writing


def _to_json(value: Any, raw: list[bytes], depth: int) -> Any:
    """Return `value` as a tree for JSON; append bytes to `raw`."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and not math.isnan(value)):
        return value
    if depth == MAX_NESTING:
        raise MismatchError(f"a value of more than {MAX_NESTING} containers inside each other cannot be sent to another rank")
    head, parts = _split_value(value, raw)
    return [*head, *[_to_json(part, raw, depth + 1) for part in parts]]


def _split_value(value: Any, raw: list[bytes]) -> tuple[list[Any], Iterable[Any]]:
    """Return the first items of `value` in JSON (its kind first), and the parts that follow; append bytes to `raw`."""
    kind = type(value)
    if kind in CODECS and (kind is not type or value in DEFAULT_FACTORIES.values()):
        return [kind.__name__], CODECS[kind][0](value)
    if kind is bytes:
        raw.append(value)
        return ["bytes", len(value)], ()
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and str(value.dtype) in DTYPES:
        raw.append(tensor_bytes(value.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        return ["Tensor", str(value.dtype), *value.shape], ()
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_loaded_class(name) is kind:
        if kind in TREE_NODES:
            children, context = TREE_NODES[kind].flatten_fn(value)
            return ["node", name], (context, *children)
        if isinstance(value, Enum) and kind.__members__.get(value.name) is value:
            return ["Enum", name], (value.name,)
        if _is_namedtuple_class(kind):
            return ["NamedTuple", name], value
        if _is_penstock_dataclass(kind):
            return ["dataclass", name], (getattr(value, field.name) for field in fields(kind) if field.init)

    raise class_error(kind)


def class_error(kind: type) -> MismatchError:
    """Return the error for an object of a class that cannot be sent, with what to do."""
    name = kind.__qualname__
    hint = f"or call torch.export.register_dataclass({name}) on every rank"
    if issubclass(kind, tuple | Enum):
        hint = f"or define {name} at the top level of a module"
    alternatives = "tensors, numbers, texts, None, lists, tuples, dicts, sets or NamedTuples"
    return MismatchError(f"an object of class {name} cannot be sent to another rank: give {alternatives}, {hint}")


# ---- reading


def _from_json(tree: Any, raw: BytesIO, depth: int) -> Any:
    """Return the value for which `_to_json` returned `tree`; read its bytes from `raw`. Raises any error for another tree."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if depth == MAX_NESTING:
        raise ValueError(f"it has more than {MAX_NESTING} containers inside each other")
    if not isinstance(tree, list):
        raise ValueError("it has an object of JSON")

    kind, *parts = tree
    if kind == "bytes":
        return _read_bytes(raw, *parts)
    if kind == "Tensor":
        dtype, shape = DTYPES[parts[0]], parts[1:]
        data = bytearray(_read_bytes(raw, math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")
    if kind in _BUILDERS:
        return _BUILDERS[kind]([_from_json(part, raw, depth + 1) for part in parts])
    class_name, *rest = parts
    return _build_instance(kind, class_name, [_from_json(part, raw, depth + 1) for part in rest])


def _build_instance(kind: str, class_name: str, parts: list[Any]) -> Any:
    """Return an instance of the class, which must be of this `kind`, built from its parts."""
    cls = _find_loaded_class(class_name)
    if cls is None:
        raise ValueError(f"it has the class {class_name}, which this rank has not imported")
    if kind == "node" and cls in TREE_NODES:
        context, *children = parts
        return TREE_NODES[cls].unflatten_fn(children, context)
    if kind == "Enum" and issubclass(cls, Enum):
        return cls.__members__[parts[0]]
    if kind == "NamedTuple" and _is_namedtuple_class(cls) and len(parts) == len(cls._fields):
        return tuple.__new__(cls, parts)
    if kind == "dataclass" and _is_penstock_dataclass(cls):
        return cls(**dict(zip([field.name for field in fields(cls) if field.init], parts, strict=True)))
    raise ValueError(f"it has no {kind} of the class {class_name}")


def _read_bytes(raw: BytesIO, size: int) -> bytes:
    data = raw.read(size) if size >= 0 else b""
    if len(data) != size:
        raise ValueError(f"it ends before {size:,} bytes of it")
    return data


# ---- classes


def _find_loaded_class(name: str) -> Any:
    """Return the class `module:name` if this process has imported it, or registered it with torch's pytree; else None.

    Imports nothing and runs no code of the class.
    """
    module, _, path = name.partition(":")
    candidate: Any = sys.modules.get(module)
    for part in path.split("."):
        candidate = vars(candidate).get(part) if isinstance(candidate, ModuleType | type) else None
    if not isinstance(candidate, type):
        candidate = next((node for node in TREE_NODES if f"{node.__module__}:{node.__qualname__}" == name), None)
    return None if module.startswith("torch._") else candidate


def _is_namedtuple_class(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _is_penstock_dataclass(kind: type) -> bool:
    return is_dataclass(kind) and kind.__module__.startswith("penstock.")
