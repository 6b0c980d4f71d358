"""What `torch.save` wrote into a part of a file, read without unpickling: a tensor, or a plain value.

It is a zip archive of a pickle, which describes the tensor, and the tensor's bytes.
"""

import io
import math
import mmap
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files.disk import DamagedFileError
from penstock.checkpoint.files.pickled import PERSISTENT, Items, Record, parse_pickle

MAX_DESCRIPTION_BYTES = 2**20  # of the pickle
MAX_VALUES = 10_000  # numbers and texts in one value
MAX_NUMBER = 2**63
MAX_DIMENSIONS = 64

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}
_REBUILD = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}  # -> arguments that are needed
_TENSOR_NAMES = frozenset([*_REBUILD, "torch._utils._rebuild_parameter", "collections.OrderedDict", *_STORAGE_DTYPES, *DTYPES])


class Location(NamedTuple):
    """Where the bytes of a chunk or a value are."""

    file: Path
    offset: int
    length: int


@contextmanager
def read_errors_as_damage(path: Path) -> Iterator[None]:
    """Raise whatever goes wrong in the block, which reads `path`, as a DamagedFileError with the reason."""
    try:
        yield
    except DamagedFileError:
        raise
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a zip archive and a tensor's layout fail in many ways
        reason = f": {error}" if isinstance(error, ValueError) and str(error).startswith(("it ", "its ")) else ""
        raise DamagedFileError(f"{path} is no file of torch.distributed.checkpoint, or is damaged{reason}") from error


def is_record(value: Any, name: str) -> bool:
    """Return whether a parsed value is an object or a call of this name, in whatever module."""
    return isinstance(value, Record) and value.name.rpartition(".")[2] == name


def as_size(value: Any) -> int:
    """Return `value` if it can be a size or an offset. Raises ValueError if not."""
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise ValueError("it has something else where a size belongs")
    return value


def as_sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size, or of a tuple of sizes."""
    if is_record(value, "Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise ValueError("it has something else where sizes belong")
    return tuple(as_size(number) for number in value)


class TorchArchive:
    """The zip archive at a location of a mapped file."""

    def __init__(self, mapping: mmap.mmap, location: Location) -> None:
        self._mapping, (_, self._begin, self._length) = mapping, location
        if self._begin + self._length > len(mapping):
            raise ValueError("it ends before what is in it by the metadata")
        with zipfile.ZipFile(_MappedBytes(mapping, self._begin, self._length)) as archive:
            self._entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def _read(self, name: str, max_bytes: float = math.inf) -> bytearray:
        """Return a copy of the bytes of an entry."""
        entry = self._entries[name]
        header = self._begin + entry.header_offset
        lengths = self._mapping[header + 26 : header + 30]  # of the entry's name, and of what else is in its header
        begin = header + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        end = begin + entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or end > self._begin + self._length or entry.file_size > max_bytes:
            raise ValueError("it has an entry that is compressed, or longer than it may be")
        data = bytearray(self._mapping[begin:end])
        if zlib.crc32(data) != entry.CRC:
            advice = "unless set_crc32_options(False) was called: save it without that"
            raise ValueError(f"it has bytes without the CRC-32 that torch writes with them, {advice}")
        return data

    def description(self, allowed_names: Iterable[str]) -> Any:
        """Return the parsed pickle."""
        return parse_pickle(bytes(self._read("data.pkl", MAX_DESCRIPTION_BYTES)), frozenset(allowed_names))

    def value(self) -> Any:
        """Return the value in it: numbers, texts, True, False and None, and tuples, lists and dicts of them."""
        return _plain(self.description(()), [MAX_VALUES])

    def tensor(self) -> Tensor:
        """Return a copy of the tensor in it."""
        record = self.description(_TENSOR_NAMES)
        if is_record(record, "_rebuild_parameter"):
            record = record.arguments[0]
        if not isinstance(record, Record) or len(record.arguments) < _REBUILD.get(record.name, math.inf):
            raise ValueError("it has something else where a tensor belongs")
        storage, offset, shape, stride = record.arguments[:4]
        values = self._storage(storage, record.arguments[6] if record.name.endswith("v3") else None)
        shape, stride = as_sizes(shape), as_sizes(stride)
        last = as_size(offset) + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if math.prod(shape) and last >= len(values):
            raise ValueError("it has a tensor that is larger than its storage")
        return values.as_strided(shape, stride, offset) if math.prod(shape) else values.new_empty(shape)

    def _storage(self, record: Any, dtype_name: Any) -> Tensor:
        """Return a copy of the values of a storage: (values,)."""
        if not isinstance(record, Record) or record.name != PERSISTENT:
            raise ValueError("it has something else where a storage belongs")
        _, class_name, key, _, _ = record.arguments[0]
        if not all(isinstance(text, str) for text in (class_name, key, dtype_name or "")):
            raise ValueError("it has something else where a storage belongs")
        dtype = _STORAGE_DTYPES[class_name] if dtype_name is None else DTYPES[dtype_name]
        if "byteorder" in self._entries and self._read("byteorder") != b"little":
            raise ValueError("it has numbers whose bytes are in another order")
        values = self._read(f"data/{key}")
        if len(values) % dtype.itemsize:
            raise ValueError("it has a storage of another size")
        return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


def _plain(value: Any, budget: list[int]) -> Any:
    """Return a parsed value with dicts for `Items`. Raises ValueError for too many values: lists may contain each other."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError("it has a value of too many numbers")
    if isinstance(value, tuple | list):
        return type(value)(_plain(item, budget) for item in value)
    if isinstance(value, Items):
        if not all(type(key) in (str, int) for key, _ in value.pairs):
            raise ValueError("it has a dict whose keys are no texts")
        return {key: _plain(item, budget) for key, item in value.pairs}
    if value is not None and type(value) not in (bool, int, float, str):
        raise ValueError("it has a value that is no number and no text")
    return value


class _MappedBytes(io.RawIOBase):
    """A part of a mapped file, as a file of its own."""

    def __init__(self, mapping: mmap.mmap, begin: int, length: int) -> None:
        self._mapping, self._begin, self._length, self._at = mapping, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError("it has a place before its beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        buffer[:size] = self._mapping[self._begin + self._at : self._begin + self._at + size]
        self._at += size
        return size
