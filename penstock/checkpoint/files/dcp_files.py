"""A folder of torch.distributed.checkpoint: its tensors and values, read without unpickling; and written.

`.metadata` is a pickle. It says for each tensor which chunks it has, and where in the files `__0_0.distcp`, .. these are. Each
chunk there is what `torch.save` writes: a zip archive with a pickle, which describes the tensor, and its bytes.
"""

import io
import math
import mmap
import os
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files.disk import DamagedFileError, fsync, open_regular_file
from penstock.checkpoint.files.pickled import PERSISTENT, Items, Name, Record, parse_pickle
from penstock.errors import MismatchError
from penstock.torch_private import dcp_storage_info

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**28
MAX_DESCRIPTION_BYTES = 2**20  # of the pickle in a chunk, or of a value
MAX_VALUES = 10_000  # numbers and texts in one value
MAX_NUMBER = 2**63
MAX_DIMENSIONS = 64

_CLASSES = "torch.distributed.checkpoint.metadata."
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
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
_METADATA_NAMES = frozenset(
    [
        *[_CLASSES + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")],
        *[_CLASSES + name for name in ("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")],
        *["torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"],
        *["pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath", "pathlib._local.WindowsPath"],
        *_DTYPES,
    ]
)
_REBUILD = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}  # -> arguments that are needed
_TENSOR_NAMES = frozenset([*_REBUILD, "torch._utils._rebuild_parameter", "collections.OrderedDict", *_STORAGE_DTYPES, *_DTYPES])


class Location(NamedTuple):
    """Where the bytes of a chunk or a value are."""

    file: Path
    offset: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor, and where each of its chunks is: the offsets in the tensor, the sizes, the place in a file."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...], Location]]


class DcpFiles:
    """The content of a folder of torch.distributed.checkpoint. Raises DamagedFileError for one that it cannot read.

    `tensors`, `values`: name -> where it is stored. Nothing but `.metadata` is read before it is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / METADATA_FILE
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, Location] = {}
        self._sizes: dict[Path, int] = {}  # of files, in bytes
        self._mapping: tuple[Path | None, Any] = None, None  # of the file that was read last
        with _damage(path), open_regular_file(path) as file:
            data = file.read(MAX_METADATA_BYTES + 1)
            if len(data) > MAX_METADATA_BYTES:
                raise ValueError(f"it has more than {MAX_METADATA_BYTES} bytes")
            self._read_metadata(parse_pickle(data, _METADATA_NAMES))

    def _read_metadata(self, metadata: Any) -> None:
        attributes = _attributes(metadata, "Metadata")
        locations = {
            _chunk_key(index): self._location(_attributes(info, "_StorageInfo"))
            for index, info in _pairs(attributes["storage_data"])
        }
        for name, entry in _pairs(attributes["state_dict_metadata"]):
            if not isinstance(name, str):
                raise ValueError("it has a name that is no text")
            if _is_record(entry, "BytesStorageMetadata"):
                self.values[name] = locations[name, None]
            else:
                self.tensors[name] = _stored_tensor(name, _attributes(entry, "TensorStorageMetadata"), locations)

    def _location(self, info: Mapping[str, Any]) -> Location:
        file = info["relative_path"]
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ValueError("it names a file that is not beside it")
        if info.get("transform_descriptors"):
            raise ValueError("its tensors are compressed or encrypted by an extension of torch: save it without one")
        return Location(self.folder / file, _whole(info["offset"]), _whole(info["length"]))

    # -- reading -----------------------------------------------------------------------------------------------------

    def verify(self, names: Iterable[str]) -> None:
        """Raise DamagedFileError unless `tensor` and `value` can return these, to the bit."""
        for name in names:
            if name in self.values:
                self.value(name)
                continue
            stored = self._checked(name)
            for _, sizes, location in stored.chunks:
                self._chunk(stored, sizes, location)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, from its chunks. Raises DamagedFileError if they are not those of one tensor."""
        stored = self._checked(name)
        if len(stored.chunks) == 1:
            return self._chunk(stored, *stored.chunks[0][1:])
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for offsets, sizes, location in stored.chunks:
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            whole[place] = self._chunk(stored, sizes, location)
        return whole

    def _checked(self, name: str) -> StoredTensor:
        """Return where a tensor is, once its chunks are known to make it, and to be no larger than their files."""
        stored = self.tensors[name]
        available = sum(map(self._file_size, {location.file for _, _, location in stored.chunks}))
        with _damage(self.folder / METADATA_FILE):
            _check_chunks(name, stored, available)
        return stored

    def _file_size(self, path: Path) -> int:
        if path not in self._sizes:
            with _damage(path), open_regular_file(path) as file:
                self._sizes[path] = os.fstat(file.fileno()).st_size
        return self._sizes[path]

    def _chunk(self, stored: StoredTensor, sizes: tuple[int, ...], location: Location) -> Tensor:
        with _damage(location.file):
            archive = _Archive(self._map(location.file), location)
            tensor = archive.tensor()
            if tensor.dtype != stored.dtype or tuple(tensor.shape) != sizes:
                raise ValueError(f"it has a {tensor.dtype} of {tuple(tensor.shape)} where {METADATA_FILE} has another")
            return tensor

    def value(self, name: str) -> Any:
        """Return a value: numbers, texts, True, False and None, and tuples, lists and dicts of them."""
        location = self.values[name]
        with _damage(location.file):
            return _plain(_Archive(self._map(location.file), location).description(()), [MAX_VALUES])

    def _map(self, path: Path) -> mmap.mmap:
        if path != self._mapping[0]:
            with open_regular_file(path) as file:
                self._mapping = path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapping[1]


@contextmanager
def _damage(path: Path) -> Iterator[None]:
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


# -- the metadata ---------------------------------------------------------------------------------------------------------


def _is_record(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.name.rpartition(".")[2] == name


def _attributes(value: Any, class_name: str) -> dict[str, Any]:
    """Return the attributes of an object of this class. Raises ValueError for any other."""
    if not _is_record(value, class_name) or not isinstance(value.state, Items):
        raise ValueError(f"it has something else where a {class_name} belongs")
    return {str(key): item for key, item in value.state.pairs if isinstance(key, str)}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Items):
        raise ValueError("it has something else where a dict belongs")
    return value.pairs


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise ValueError("it has something else where a size belongs")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size, or of a tuple of sizes."""
    if _is_record(value, "Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise ValueError("it has something else where sizes belong")
    return tuple(_whole(number) for number in value)


def _chunk_key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    attributes = _attributes(index, "MetadataIndex")
    name, offset = attributes["fqn"], attributes.get("offset")
    if not isinstance(name, str):
        raise ValueError("it has a name that is no text")
    return name, None if offset is None else _numbers(offset)


def _stored_tensor(name: str, entry: Mapping[str, Any], locations: Mapping[Any, Location]) -> StoredTensor:
    properties, shape = entry["properties"], _numbers(entry["size"])
    if not _is_record(properties, "TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError("it has something else where TensorProperties belong")
    dtype = _DTYPES.get(properties.state[0]) if isinstance(properties.state[0], Name) else None
    if dtype is None or not isinstance(entry["chunks"], list):
        raise ValueError(f"it has no dtype or no chunks of a tensor, {name[:60]!r}")
    chunks = []
    for chunk in entry["chunks"]:
        attributes = _attributes(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(attributes["offsets"]), _numbers(attributes["sizes"])
        chunks.append((offsets, sizes, locations[name, offsets]))
    return StoredTensor(dtype, torch.Size(shape), chunks)


def _check_chunks(name: str, stored: StoredTensor, available_bytes: int) -> None:
    """Raise ValueError unless the chunks fill the tensor, without overlap, and the files have as many bytes."""
    for offsets, sizes, location in stored.chunks:
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(stored.shape) or any(map(int.__gt__, ends, stored.shape)):
            raise ValueError(f"it has a chunk outside of its tensor, {name[:60]!r}")
        if math.prod(sizes) * stored.dtype.itemsize > location.length:
            raise ValueError(f"it has a chunk that is larger than its place in a file, of {name[:60]!r}")
    if math.prod(stored.shape) * stored.dtype.itemsize > available_bytes:
        raise ValueError(f"it has a tensor that is larger than its files, {name[:60]!r}")
    if sum(math.prod(sizes) for _, sizes, _ in stored.chunks) != math.prod(stored.shape):
        raise ValueError(f"it has chunks that are not the whole of their tensor, {name[:60]!r}")
    if len(stored.chunks) > 1:
        covered = torch.zeros(stored.shape, dtype=torch.bool, device="cpu")
        for offsets, sizes, _ in stored.chunks:
            covered[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = True
        if not covered.all():
            raise ValueError(f"it has chunks that overlap, of {name[:60]!r}")


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


# -- what `torch.save` wrote ----------------------------------------------------------------------------------------------


class _Archive:
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

    def tensor(self) -> Tensor:
        """Return a copy of the tensor in it."""
        record = self.description(_TENSOR_NAMES)
        if _is_record(record, "_rebuild_parameter"):
            record = record.arguments[0]
        if not isinstance(record, Record) or len(record.arguments) < _REBUILD.get(record.name, math.inf):
            raise ValueError("it has something else where a tensor belongs")
        storage, offset, shape, stride = record.arguments[:4]
        values = self._storage(storage, record.arguments[6] if record.name.endswith("v3") else None)
        shape, stride = _numbers(shape), _numbers(stride)
        last = _whole(offset) + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
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
        dtype = _STORAGE_DTYPES[class_name] if dtype_name is None else _DTYPES[dtype_name]
        if "byteorder" in self._entries and self._read("byteorder") != b"little":
            raise ValueError("it has numbers whose bytes are in another order")
        values = self._read(f"data/{key}")
        if len(values) % dtype.itemsize:
            raise ValueError("it has a storage of another size")
        return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


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


# -- writing --------------------------------------------------------------------------------------------------------------

Entry = tuple[str, str | None, list[int], int, int]  # name, dtype of a tensor, its shape, offset and length in the file


def file_name(rank: int) -> str:
    """Return the name of a rank's file, as torch's."""
    return f"__{rank}_0.distcp"


def write_rank_file(folder: Path, rank: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> list[Entry]:
    """Write a rank's tensors and values into its file in `folder`; return where they are. Equal values are written once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(rank)
    entries: list[Entry] = []
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            if str(tensor.dtype) not in _DTYPES or tensor.layout != torch.strided:
                raise MismatchError(f"{name} is a {tensor.layout} tensor, which torch.distributed.checkpoint cannot hold")
            begin = file.tell()
            whole = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
            torch.save(whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone(), file)
            entries.append((name, str(tensor.dtype), list(tensor.shape), begin, file.tell() - begin))

        places: dict[str, tuple[int, int]] = {}
        for name, value in values.items():
            if (text := repr(value)) not in places:
                begin = file.tell()
                torch.save(value, file)
                places[text] = begin, file.tell() - begin
            entries.append((name, None, [], *places[text]))
    fsync(path)
    return entries


def write_metadata(folder: Path, entries_of_ranks: Sequence[Sequence[Entry]], aliases: Mapping[str, str]) -> None:
    """Write `.metadata` for the ranks' files in `folder`. `aliases`: further name of a tensor -> first name."""
    from torch.distributed.checkpoint import metadata

    items: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for rank, entries in enumerate(entries_of_ranks):
        for name, dtype, shape, offset, length in entries:
            zeros = torch.Size([0] * len(shape))
            index = metadata.MetadataIndex(name, None if dtype is None else zeros)
            places[index] = dcp_storage_info(file_name(rank), offset, length)
            items[name] = metadata.BytesStorageMetadata()
            if dtype is not None:
                properties = metadata.TensorProperties(_DTYPES[dtype])
                chunk = metadata.ChunkStorageMetadata(zeros, torch.Size(shape))
                items[name] = metadata.TensorStorageMetadata(properties, torch.Size(shape), [chunk])
    for further_name, first_name in aliases.items():
        if first_name in items:
            items[further_name] = items[first_name]
            zeros = torch.Size([0] * len(items[first_name].size))
            places[metadata.MetadataIndex(further_name, zeros)] = places[metadata.MetadataIndex(first_name, zeros)]
    content = metadata.Metadata(
        items, {name: (name,) for name in items}, places, metadata.StorageMeta(save_id=str(uuid.uuid4()))
    )
    with (folder / METADATA_FILE).open("wb") as file:
        pickle.dump(content, file, protocol=4)
    fsync(folder / METADATA_FILE)
