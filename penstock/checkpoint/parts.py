"""A rank's part of a checkpoint in memory: what is in a drawer, whether it is whole, and how it gets to another machine."""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files.reading import opened
from penstock.checkpoint.files.tensor_files import described, write_bytes
from penstock.comms.control import Control, Pending
from penstock.comms.starting.drawers import Drawers

PIECE = 2**28  # bytes of a message that carries a part to another machine


class Mark(NamedTuple):
    """What a drawer says of the part that is in it."""

    folder: str  # whose checkpoint
    run: str  # and of which start of the ranks
    number: int  # one more with every checkpoint in memory
    step: int
    rank: int
    ranks: int


class Part(NamedTuple):
    """A rank's part of a checkpoint in memory."""

    mark: Mark
    place: str  # its file
    machine: str  # whose memory that is
    turn: int  # 0 or 1: which of the two checkpoints


def write(place: Path, mark: Mark, part: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a part into the drawer at `place`: a safetensors file whose first bytes, the length of its header, come last."""
    header, order = described(tensors, mark=json.dumps(mark), part=json.dumps(part))
    with place.open("r+b") as file:
        _size(file.fileno(), 8 + len(header) + sum(tensor.nbytes for tensor in tensors.values()))
        file.seek(8)
        file.write(header)
        for name in order:
            write_bytes(tensors[name], file)
        file.flush()
        _seal(file.fileno(), len(header))


def newest_of(parts: Sequence[Part], folder: str) -> list[Part] | None:
    """The parts, by rank, of the newest checkpoint of `folder` that is whole."""
    checkpoints: dict[tuple[int, str, int], dict[int, Part]] = {}
    for part in parts:
        if part.mark.folder == folder:
            checkpoints.setdefault((part.mark.number, part.mark.run, part.mark.step), {})[part.mark.rank] = part
    for _, by_rank in sorted(checkpoints.items(), reverse=True):
        if len(by_rank) == by_rank[min(by_rank)].mark.ranks:
            return [by_rank[rank] for rank in sorted(by_rank)]
    return None


def parts_in(there: Drawers | None) -> list[Part]:
    """What is whole in the drawers of this machine."""
    found: list[Part] = []
    if there is None:
        return found
    for number in range(len(there.files)):
        with suppress(OSError, ValueError):
            mark, _ = read(there.path(number))
            found.append(Part(mark, str(there.path(number)), there.name, number // there.width % 2))
    return found


def read(place: Path) -> tuple[Mark, dict[str, Any]]:
    """What a drawer says of itself. Raises ValueError if there is no part in it, or not the whole of one."""
    with opened(place, follow=True) as file:
        length = int.from_bytes(file.read(8), "little")
        if not length:
            raise ValueError("it is being written")
        told = json.loads(file.read(length))["__metadata__"]
    return Mark(*json.loads(told["mark"])), json.loads(told["part"])


# -- between machines -----------------------------------------------------------------------------------------------------


def send(control: Control, place: Path, peer: int, what: str) -> list[Pending]:
    """Begin to send what is in a drawer to `peer`; `what` as in `Control.gather`."""
    with opened(place, follow=True) as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        lengths = torch.tensor([memory.numel(), int.from_bytes(file.read(8), "little")], device="cpu")
    return [control.send(each, peer, what) for each in (lengths, *memory[8:].split(PIECE))]


def receive(control: Control, file: int, peer: int, what: str) -> None:
    """Receive what `send` sends into an open file."""
    size, header = control.receive(torch.zeros(2, dtype=torch.int64, device="cpu"), peer, what).tolist()
    _size(file, size)
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    for each in memory[8:].split(PIECE):
        control.receive(each, peer, what)
    _seal(file, header)


def _size(file: int, size: int) -> None:
    """Make a file that is written from now on, and so is not whole, so long."""
    os.pwrite(file, bytes(8), 0)
    os.ftruncate(file, size)


def _seal(file: int, header: int) -> None:
    """Say that a file is whole, by the length of its header."""
    os.pwrite(file, header.to_bytes(8, "little"), 0)
