"""Tensors in safetensors files: written here, one tensor after the other, and read through the library, which maps them.

A file is the length of its header, the header (JSON: of each tensor its dtype, shape and place), and the tensors' bytes. The
library's own `save_file` needs numpy, puts all bytes together in memory and refuses tensors that share some.
"""

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.errors import MismatchError

MOST_BYTES = 2**30  # of tensors in one of the files that a rank writes, so that ranks can share the work of reading them
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"},
}


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write a rank's tensors into files of its own in `folder`; returns the files' names."""
    folder.mkdir(parents=True, exist_ok=True)  # where rank 0's cannot be seen from, as rank 0 will tell
    groups: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            groups.append({})
            room = MOST_BYTES
        groups[-1][name] = tensor
        room -= tensor.nbytes
    of = f"of-{len(groups):05d}.safetensors"
    files = {f"shard-{rank + 1:05d}-model-{number:05d}-{of}": group for number, group in enumerate(groups, 1)}
    for file, group in files.items():
        write_file(folder / file, group)
    return list(files)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; it is on the disk afterwards.

    Wide numbers come first, so that every tensor begins at a multiple of its numbers' size. Raises MismatchError for a dtype
    that the format does not know.
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
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _write_bytes(tensors[name], file)
        file.flush()
        os.fsync(file.fileno())


def _write_bytes(tensor: Tensor, file: Any) -> None:
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.nbytes:
        file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))  # as `tensor.numpy()` would, without numpy


class TensorFiles(Mapping[str, Tensor]):
    """The tensors in a safetensors file, or in all those of a folder, by name; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._home: dict[str, Any] = {}  # name -> the opened file that has it
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            opened = safe_open(file, framework="pt")
            self._home |= dict.fromkeys(opened.keys(), opened)
        self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name, file in self._home.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.mapped(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def mapped(self, name: str) -> Tensor:
        """A tensor whose memory is the file's, so that only what is looked at is read."""
        return self._home[name].get_tensor(name)
