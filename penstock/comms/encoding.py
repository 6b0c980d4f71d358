"""Values as bytes and back, for what ranks tell each other: JSON, and behind it the bytes of tensors. Nothing is pickled.

Who reads need not trust who wrote. A class is told by its name, and must be one that the reading process has loaded by
itself: a NamedTuple, an Enum, a dataclass of Penstock's, or one that torch was told how to take apart. No module is imported
and nothing called by a name that came from elsewhere.
"""

import ctypes
import json
import math
import struct
import sys
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

from penstock.errors import MismatchError
from penstock.torch_private import TREE_NODES

MAX_VALUE_BYTES = 2**28  # bytes of a value
MAX_NESTING = 100  # containers in one another
JSON_LENGTH = struct.Struct("<Q")  # of the JSON, before it
FLOAT64 = struct.Struct("<d")
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
FACTORIES = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}  # of a defaultdict

# Each kind: what it is made of, and it from that.
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
    type: (lambda value: [value.__name__], lambda parts: FACTORIES[parts[0]]),
}
_MADE_FROM = {kind.__name__: make for kind, (_, make) in CODECS.items()}


def encode(value: Any) -> bytes:
    """`value` as bytes. Raises MismatchError, which says what it is and what to do, for what does not travel."""
    raw: list[bytes] = []
    told = _written(value, raw, 0)
    try:
        text = json.dumps(told, separators=(",", ":")).encode()
    except ValueError as error:
        raise MismatchError(f"a value cannot be sent to another rank: {error}") from error
    data = b"".join([JSON_LENGTH.pack(len(text)), text, *raw])
    if len(data) > MAX_VALUE_BYTES:
        raise MismatchError(f"a value of {len(data):,} bytes cannot be told to another rank: {MAX_VALUE_BYTES:,} are the most")
    return data


def decode(data: bytes) -> Any:
    """The value that `encode` made `data` of. Raises MismatchError for anything else."""
    try:
        (length,) = JSON_LENGTH.unpack_from(data)
        raw = BytesIO(data[JSON_LENGTH.size + length :])
        value = _read(json.loads(data[JSON_LENGTH.size : JSON_LENGTH.size + length]), raw, 0)
        if raw.read(1):
            raise ValueError("there are bytes behind it")
    except Exception as error:
        what_to_do = "all ranks must run the same program with the same releases"
        raise MismatchError(f"what another rank sent cannot be read ({_words(error)}): {what_to_do}") from error
    return value


def encode_to_tensor(value: Any) -> Tensor:
    """`value` as a tensor of the bytes that `encode` makes of it."""
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)


def all_gather_values(value: Any, carrier: torch.device) -> list[Any]:
    """Every rank's `value`, by rank, over torch's group of all of them, which takes tensors on `carrier`."""
    mine = encode_to_tensor(value).to(carrier)
    sizes = [torch.empty(1, dtype=torch.int64, device=carrier) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=carrier))
    return all_gather_encoded(mine, list(map(int, sizes)), dist.all_gather)


def all_gather_encoded(mine: Tensor, sizes: Sequence[int], all_gather: Callable[[list[Tensor], Tensor], object]) -> list[Any]:
    """Every rank's value: `mine` is `encoded`, and so are all of these sizes; `all_gather` is torch's, or one like it."""
    padded = mine.new_zeros(max(map(check_value_size, sizes)))
    padded[: mine.numel()] = mine
    everyone = [torch.empty_like(padded) for _ in sizes]
    all_gather(everyone, padded)
    return [decode(tensor_bytes(row[:size].cpu())) for row, size in zip(everyone, sizes, strict=True)]


def check_value_size(size: int) -> int:
    """`size`, of what another rank is about to send. Raises MismatchError where no value is that large."""
    if not 0 <= size <= MAX_VALUE_BYTES:
        raise MismatchError(f"another rank sends a value of {size:,} bytes: {MAX_VALUE_BYTES:,} are the most")
    return size


def view_as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as another, of bytes: which dtypes a transport knows does not matter then."""
    return tensor.view(-1).view(torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The memory of a contiguous tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# ---- writing


def _written(value: Any, raw: list[bytes], depth: int) -> Any:
    """`value` as JSON can say it; bytes go to `raw`."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and not math.isnan(value)):
        return value
    if depth == MAX_NESTING:
        raise MismatchError(f"a value of more than {MAX_NESTING} containers in one another cannot be sent to another rank")
    head, parts = _parts(value, raw)
    return [*head, *[_written(part, raw, depth + 1) for part in parts]]


def _parts(value: Any, raw: list[bytes]) -> tuple[list[Any], Iterable[Any]]:
    """How `value` begins in JSON, its kind first, and the parts that follow."""
    kind = type(value)
    if kind in CODECS and (kind is not type or value in FACTORIES.values()):
        return [kind.__name__], CODECS[kind][0](value)
    if kind is bytes:
        raw.append(value)
        return ["bytes", len(value)], ()
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and str(value.dtype) in DTYPES:
        raw.append(tensor_bytes(value.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        return ["Tensor", str(value.dtype), *value.shape], ()
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is kind:
        if kind in TREE_NODES:
            children, context = TREE_NODES[kind].flatten_fn(value)
            return ["node", name], (context, *children)
        if isinstance(value, Enum) and kind.__members__.get(value.name) is value:
            return ["Enum", name], (value.name,)
        if _is_named(kind):
            return ["NamedTuple", name], value
        if _is_ours(kind):
            return ["dataclass", name], (getattr(value, each.name) for each in fields(kind) if each.init)
    name = kind.__qualname__
    what_to_do = f"or call torch.export.register_dataclass({name}) on every rank"
    if issubclass(kind, tuple | Enum):
        what_to_do = f"or define {name} at the top level of a module"
    travels = "tensors, numbers, texts, None, lists, tuples, dicts, sets or NamedTuples"
    raise MismatchError(f"an object of class {name} cannot be sent to another rank: give {travels}, {what_to_do}")


# ---- reading


def _read(told: Any, raw: BytesIO, depth: int) -> Any:
    """The value that `told`, read from JSON, and the bytes in `raw` stand for. Raises some error if there is none."""
    if told is None or isinstance(told, bool | int | float | str):
        return told
    if depth == MAX_NESTING:
        raise ValueError(f"it has more than {MAX_NESTING} containers in one another")
    if not isinstance(told, list):
        raise ValueError("it has an object of JSON")
    kind, *parts = told
    if kind == "bytes":
        return _taken(raw, *parts)
    if kind == "Tensor":
        dtype, shape = DTYPES[parts[0]], parts[1:]
        data = bytearray(_taken(raw, math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")
    if kind in _MADE_FROM:
        return _MADE_FROM[kind]([_read(part, raw, depth + 1) for part in parts])
    name, *rest = parts
    return _made(kind, name, [_read(part, raw, depth + 1) for part in rest])


def _made(kind: str, name: str, parts: list[Any]) -> Any:
    """What has a class."""
    found = _class(name)
    if found is None:
        raise ValueError(f"it has the class {name}, which this rank has not imported")
    if kind == "node" and found in TREE_NODES:
        context, *children = parts
        return TREE_NODES[found].unflatten_fn(children, context)
    if kind == "Enum" and issubclass(found, Enum):
        return found.__members__[parts[0]]
    if kind == "NamedTuple" and _is_named(found) and len(parts) == len(found._fields):
        return tuple.__new__(found, parts)
    if kind == "dataclass" and _is_ours(found):
        return found(**dict(zip([each.name for each in fields(found) if each.init], parts, strict=True)))
    raise ValueError(f"it has no {kind} of the class {name}")


def _taken(raw: BytesIO, size: int) -> bytes:
    data = raw.read(size) if size >= 0 else b""
    if len(data) != size:
        raise ValueError(f"it ends before {size:,} bytes of it")
    return data


# ---- classes


def _class(name: str) -> Any:
    """The class called `name` that this process has loaded or told torch of, else None. Imports nothing, runs nothing."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if not isinstance(found, type):
        found = next((each for each in TREE_NODES if f"{each.__module__}:{each.__qualname__}" == name), None)
    return None if module.startswith("torch._") else found


def _is_named(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _is_ours(kind: type) -> bool:
    return is_dataclass(kind) and kind.__module__.startswith("penstock.")


def _words(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
