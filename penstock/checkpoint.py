"""A model's weights in one file, under the names of the uncut model, so any cut can load them."""

import os
from pathlib import Path
from typing import Any

import torch

from penstock.comms import recv_tensor, send_tensor
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline


def save(pipe: Pipeline, path: Path) -> None:
    """Write the whole model's `state_dict` to `path`; all ranks call it, rank 0 writes.

    The file is written beside and renamed last, so `path` is always a whole file. It loads with
    `torch.load(path, weights_only=True)`, into the uncut model too.
    """
    state = gather(pipe)
    if pipe.topology.rank == 0:
        beside = path.with_name(path.name + ".part")
        torch.save(state, beside)
        os.replace(beside, path)


def load(pipe: Pipeline, path: Path) -> None:
    """Take each rank's part out of a file `save` wrote, whatever the cut it was written with.

    Raises MismatchError if it cannot be read or is of another model.
    """
    try:
        state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise MismatchError(f"cannot read a checkpoint from {path}: {error}") from error
    pipe.load_state_dict(state)


def gather(pipe: Pipeline) -> dict[str, Any]:
    """The whole model's state on rank 0's host memory, nothing on the others. One tensor travels at a time."""
    topology, mine = pipe.topology, pipe.state_dict()
    state: dict[str, Any] = {}
    for name, (home, shape, dtype) in pipe.inventory():
        if topology.rank == home == 0:
            state[name] = mine[name].detach().cpu()
        elif topology.rank == home:
            send_tensor(mine[name], 0)
        elif topology.rank == 0:
            state[name] = recv_tensor(shape, home, dtype, "cpu")
    return state
