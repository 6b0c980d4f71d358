"""Tensors in safetensors files: written one at a time, and read from a memory mapping of the file.

A file is the length of its header, the header (JSON: dtype, shape and offsets of each tensor), and the tensors' bytes. The
format's own library is not used: it needs numpy, builds the whole file in memory before it writes, refuses tensors that share
memory, and maps a file so that all of it counts as this process's memory.
"""

import ctypes
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files.disk import CHECKSUM_CLASSES, checksum_kind_for, errors_as_damaged, fsync, memory_map
from penstock.errors import MismatchError

MAX_SHARD_BYTES = 2**30  # of tensors in one file: a rank writes several, so that ranks can share the work of reading them
MAX_HEADER_BYTES = 10**8  # the format's own limit
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"},
}
_DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


# -- writing ------------------------------------------------------------------------------------------------------------


def write_shards(
    folder: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    max_shard_bytes: float = MAX_SHARD_BYTES,
    with_checksums: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write this rank's tensors into files in `folder`, of up to `max_shard_bytes` bytes each, if no single tensor is larger.

    Returns file name -> manifest entry: the size in bytes and, if `with_checksums`, the checksum.
    """
    folder.mkdir(parents=True, exist_ok=True)  # if this rank does not see the folder that rank 0 made: rank 0 reports that
    groups: list[dict[str, Tensor]] = []
    free_bytes = 0.0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > free_bytes:
            groups.append({})
            free_bytes = max_shard_bytes
        groups[-1][name] = tensor
        free_bytes -= tensor.nbytes
    of = f"of-{len(groups):05d}.safetensors"
    files = {f"shard-{rank + 1:05d}-model-{number:05d}-{of}": group for number, group in enumerate(groups, 1)}
    checksum = checksum_kind_for(folder) if with_checksums else None
    return {file: write_safetensors(folder / file, group, checksum) for file, group in files.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], checksum: str | None = None) -> dict[str, Any]:
    """Write one safetensors file, and sync it to the disk; return its size in bytes and its `checksum`, of this kind.

    Raises MismatchError for a dtype that the format lacks.
    """
    header, order = _header_and_order(tensors)
    with path.open("wb") as file:
        digest = CHECKSUM_CLASSES[checksum]() if checksum else None
        _write_and_digest(file, digest, len(header).to_bytes(8, "little") + header)
        for name in order:
            tensor = tensors[name].detach().cpu().contiguous().resolve_conj().resolve_neg()
            if tensor.nbytes:
                memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())  # a view, without numpy
                _write_and_digest(file, digest, memory)
        size = file.tell()
    fsync(path)
    return {"bytes": size} | ({checksum: digest.hexdigest()} if checksum and digest else {})


def _write_and_digest(file: Any, digest: Any, data: Any) -> None:
    file.write(data)
    if digest:
        digest.update(data)


def _header_and_order(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the header of a file with these tensors, and their names in the order of the file.

    Wide dtypes come first, so that every tensor begins at a multiple of its item size. Raises as `write_safetensors`.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        if tensor.dtype not in DTYPES:
            raise MismatchError(f"{name} is {tensor.dtype}, which safetensors files cannot hold: convert it")
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8), order


# -- reading ------------------------------------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    """Where the bytes of a tensor are, and how they are read."""

    file: Path
    begin: int  # of the tensor's bytes, in bytes from the start of the file
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles(Mapping[str, Tensor]):
    """The tensors in safetensors files, or in all such files of folders, by name. A tensor is read when it is accessed.

    Raises DamagedFileError for a file that is no safetensors file, or cannot be read.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths  # these may be links; a file that is found in a folder may not
        files = [file for path in paths for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
        self.locations = {name: stored for file in files for name, stored in _read_locations(file, file in paths)}
        self.shapes = {name: stored.shape for name, stored in self.locations.items()}
        self.nbytes = sum(stored.nbytes for stored in self.locations.values())
        self._map = lru_cache(1)(memory_map)  # one file at a time: each holds a descriptor

    def __getitem__(self, name: str) -> Tensor:
        return self.mapped_tensor(name).clone()

    def __contains__(self, name: object) -> bool:
        return name in self.locations  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)

    def mapped_tensor(self, name: str) -> Tensor:
        """Return a read-only tensor in the mapping of its file, so that only the values that are used are read."""
        path, begin, dtype, shape = self.locations[name]
        if not shape.numel():
            return torch.empty(shape, dtype=dtype, device="cpu")
        data = self._map(path, path in self.paths)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is read-only
            return torch.frombuffer(data, dtype=dtype, count=shape.numel(), offset=begin).view(shape)


def _read_locations(path: Path, follow: bool) -> Iterator[tuple[str, TensorLocation]]:
    """Yield name and location of each tensor in one file. Raises DamagedFileError unless they fill it without gaps."""
    with errors_as_damaged(path, "is no safetensors file that Penstock can read, or is damaged"):
        data = memory_map(path, follow)
        begin = 8 + int.from_bytes(data[:8], "little")
        if begin > min(len(data), MAX_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        filled = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, end), numbers = entry["data_offsets"], entry["shape"]
            if start != filled or not all(type(number) is int and 0 <= number < 2**63 for number in (start, end, *numbers)):
                raise ValueError(f"{name} has no place in it")
            stored = TensorLocation(path, begin + start, _DTYPE_OF_NAME[entry["dtype"]], torch.Size(numbers))
            if end != start + stored.nbytes:
                raise ValueError(f"{name} has another size")
            filled = end
            yield name, stored
        if begin + filled != len(data):
            raise ValueError("there is more in it than its tensors")
