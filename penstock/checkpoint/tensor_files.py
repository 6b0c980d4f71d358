"""Tensors in safetensors files: written and read through `torch.distributed.checkpoint`, joined into one file.

Of `torch.distributed.checkpoint` this takes the planners and the Hugging Face storage, whose files hold tensors and JSON
only. Its default storage unpickles `.metadata` when it loads, and its `save` and `load` talk over the default process
group, which a save beside the training must leave alone: what ranks have to agree on is agreed on in `beside.py`. It is
imported when it is used: that takes half a second, unless the launcher has done it already.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

MOST_BYTES = 2**30  # of tensors in a file: its bytes are put together in memory


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write a rank's tensors into files of its own in `folder`; returns the files' names."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    if not tensors:
        return []
    writer = HuggingFaceStorageWriter(str(folder), _numbered(tensors), save_distributed=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(_apart(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    plan = dataclasses.replace(plan, storage_data={**plan.storage_data, "shard_index": rank + 1})
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    return sorted({each.storage_data.relative_path for each in written})


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file each tensor goes to, so that no file is much larger than MOST_BYTES."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > MOST_BYTES:
            number, size = number + 1, 0
        numbers[name], size = number, size + tensor.nbytes
    return numbers


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: contiguous, and no two in one storage."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        where = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if where in storages else tensor
        storages.add(where)
    return apart


class TensorFiles:
    """The tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        entries: dict[str, Any] = dict(self._metadata.state_dict_metadata)
        self.shapes: dict[str, torch.Size] = {name: entry.size for name, entry in entries.items()}
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in entries.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, in host memory; nothing else is read."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        tensors = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return tensors


def join(files: Iterable[Path], names: Mapping[str, str], path: Path) -> None:
    """Write one safetensors file, one tensor after the other: `names` are those in it -> those in `files`.

    Wide numbers come first, so that every tensor begins at a multiple of its numbers' size.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        home = {stored: file for file in opened for stored in file.keys()}  # noqa: SIM118 (no dict)
        tensors = {name: home[stored].get_tensor(stored) for name, stored in names.items()}  # mapped, not read
        order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].nbytes
            slice_ = home[names[name]].get_slice(names[name])
            header[name] = {"dtype": slice_.get_dtype(), "shape": slice_.get_shape(), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                out.write(tensors.pop(name).reshape(-1).view(torch.uint8).numpy())
