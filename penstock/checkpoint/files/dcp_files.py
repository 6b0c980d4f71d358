"""A folder of torch.distributed.checkpoint: its tensors and values, read without unpickling; and written.

`.metadata` is a pickle. It says for each tensor which chunks it has, and where in the files `__0_0.distcp`, .. these are. Each
chunk there is what `torch.save` writes: a zip archive with a pickle, which describes the tensor, and its bytes.
"""

import math
import os
import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files.disk import fsync, memory_map, open_regular_file
from penstock.checkpoint.files.pickled import Items, Name, parse_pickle
from penstock.checkpoint.files.torch_archive import (
    DTYPES,
    Location,
    TorchArchive,
    as_size,
    as_sizes,
    is_record,
    read_errors_as_damage,
)
from penstock.errors import MismatchError
from penstock.torch_private import dcp_storage_info

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**28

_CLASSES = "torch.distributed.checkpoint.metadata."
_METADATA_NAMES = frozenset(
    [
        *[_CLASSES + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")],
        *[_CLASSES + name for name in ("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")],
        *["torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"],
        *["pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath", "pathlib._local.WindowsPath"],
        *DTYPES,
    ]
)


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
        self._map = lru_cache(1)(memory_map)  # one file at a time: each holds a descriptor
        with read_errors_as_damage(path), open_regular_file(path) as file:
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
            if is_record(entry, "BytesStorageMetadata"):
                self.values[name] = locations[name, None]
            else:
                self.tensors[name] = _stored_tensor(name, _attributes(entry, "TensorStorageMetadata"), locations)

    def _location(self, info: Mapping[str, Any]) -> Location:
        file = info["relative_path"]
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ValueError("it names a file that is not beside it")
        if info.get("transform_descriptors"):
            raise ValueError("its tensors are compressed or encrypted by an extension of torch: save it without one")
        return Location(self.folder / file, as_size(info["offset"]), as_size(info["length"]))

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
        with read_errors_as_damage(self.folder / METADATA_FILE):
            _check_chunks(name, stored, available)
        return stored

    def _file_size(self, path: Path) -> int:
        if path not in self._sizes:
            with read_errors_as_damage(path), open_regular_file(path) as file:
                self._sizes[path] = os.fstat(file.fileno()).st_size
        return self._sizes[path]

    def _chunk(self, stored: StoredTensor, sizes: tuple[int, ...], location: Location) -> Tensor:
        with read_errors_as_damage(location.file):
            archive = TorchArchive(self._map(location.file), location)
            tensor = archive.tensor()
            if tensor.dtype != stored.dtype or tuple(tensor.shape) != sizes:
                raise ValueError(f"it has a {tensor.dtype} of {tuple(tensor.shape)} where {METADATA_FILE} has another")
            return tensor

    def value(self, name: str) -> Any:
        """Return a value: numbers, texts, True, False and None, and tuples, lists and dicts of them."""
        location = self.values[name]
        with read_errors_as_damage(location.file):
            return TorchArchive(self._map(location.file), location).value()


# -- the metadata ---------------------------------------------------------------------------------------------------------


def _attributes(value: Any, class_name: str) -> dict[str, Any]:
    """Return the attributes of an object of this class. Raises ValueError for any other."""
    if not is_record(value, class_name) or not isinstance(value.state, Items):
        raise ValueError(f"it has something else where a {class_name} belongs")
    return {str(key): item for key, item in value.state.pairs if isinstance(key, str)}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Items):
        raise ValueError("it has something else where a dict belongs")
    return value.pairs


def _chunk_key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    attributes = _attributes(index, "MetadataIndex")
    name, offset = attributes["fqn"], attributes.get("offset")
    if not isinstance(name, str):
        raise ValueError("it has a name that is no text")
    return name, None if offset is None else as_sizes(offset)


def _stored_tensor(name: str, entry: Mapping[str, Any], locations: Mapping[Any, Location]) -> StoredTensor:
    properties, shape = entry["properties"], as_sizes(entry["size"])
    if not is_record(properties, "TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError("it has something else where TensorProperties belong")
    dtype = DTYPES.get(properties.state[0]) if isinstance(properties.state[0], Name) else None
    if dtype is None or not isinstance(entry["chunks"], list):
        raise ValueError(f"it has no dtype or no chunks of a tensor, {name[:60]!r}")
    chunks = []
    for chunk in entry["chunks"]:
        attributes = _attributes(chunk, "ChunkStorageMetadata")
        offsets, sizes = as_sizes(attributes["offsets"]), as_sizes(attributes["sizes"])
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
            if str(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
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
                properties = metadata.TensorProperties(DTYPES[dtype])
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
