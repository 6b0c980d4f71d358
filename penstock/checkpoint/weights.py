"""The model's weights in one safetensors file, under the uncut model's names: out of any cut, and into any."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.checkpoint import manifest, tensor_files
from penstock.checkpoint.beside import newest_whole, own_state, seen, settled, together, written
from penstock.checkpoint.restore import MODEL, found
from penstock.comms.control import Control
from penstock.comms.topology import Topology
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline


def export(pipe: Pipeline, path: str | Path) -> None:
    """Write the whole model's weights and buffers to one safetensors file; all ranks call it.

    It loads into the uncut model (`model.load_state_dict(safetensors.torch.load_file(path))`), and into any other program
    that reads the format; a tied parameter stands there under each of its names. Each rank writes its part beside `path`,
    rank 0 joins them, one tensor after the other, and renames the file last. Raises PenstockError, on every rank, if a
    rank cannot write.
    """
    path, control = Path(path), settled(pipe).control
    rank, aliases = pipe.position.world.rank, pipe.aliases
    parts = path.with_name(f".{path.name}.parts")
    with together(control, f"export to {path}"):
        state = {MODEL + name: value for name, value in own_state(pipe).items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        part = {"aliases": aliases, "model": [name.removeprefix(MODEL) for name in state if name not in tensors]}
        try:
            everyone = written(control, lambda: _emptied(parts), parts, part, tensors)
            if rank == 0:
                joined = {name: first for part, _ in everyone for name, first in part["aliases"].items()}
                left_out = [name for part, _ in everyone for name in part["model"]]
                _join(parts, {"files": seen(parts, everyone), "aliases": joined, "model": left_out}, path)
        finally:
            if rank == 0:
                shutil.rmtree(parts, ignore_errors=True)
        control.gather_objects(None, f"to put {path} in place")


def export_folder(folder: str | Path, path: str | Path) -> Path:
    """Write the weights in the newest whole checkpoint of `folder` (or in the checkpoint `folder`) to one file, as `export`.

    For a program without ranks. Returns the checkpoint taken; raises MismatchError if none is whole, PenstockError if
    `path` cannot be written.
    """
    control = Control(Topology(), "alone")
    with together(control, f"export {folder} to {path}"):
        chosen, content = newest_whole(control, Path(folder))
        _join(chosen, content, Path(path))
    return chosen


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _join(folder: Path, content: dict[str, Any], path: Path) -> None:
    """Join the model's tensors in `folder`, of which `content` tells the files, the aliases, and what is no tensor."""
    files = [folder / name for name in content["files"]]
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names |= {name.removeprefix(MODEL): name for name in opened.keys() if name.startswith(MODEL)}  # noqa: SIM118
    names |= {name: MODEL + first for name, first in content["aliases"].items()}
    if content["model"]:
        warnings.warn(f"{path} holds tensors only: {', '.join(content['model'])} left out", stacklevel=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    with manifest.replaced(path) as beside:
        tensor_files.join(files, names, beside)


def import_weights(pipe: Pipeline, path: str | Path) -> None:
    """Load a safetensors file with the uncut model's weights; every rank reads its own part of it and no more.

    All ranks call it. Values are converted to the model's types. Of a tied parameter the file needs one of its names.
    Raises MismatchError, on every rank and before anything is loaded, if the file cannot be read, and for names and shapes
    that differ, as `load_state_dict` does.
    """
    control = settled(pipe).control
    with together(control, f"import {path}"):
        try:
            opened = safe_open(path, framework="pt")
        except Exception as error:
            raise MismatchError(f"cannot read weights from {path}: {error}") from error
        with opened as file:
            shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            places = found(pipe, shapes)
            control.gather_objects(None, f"to check {path}")
            tensors = {place: file.get_tensor(place) for place in dict.fromkeys(places.values())}
            pipe.load_state_dict({name: tensors[place] for name, place in places.items()})
        control.gather_objects(None, f"to import {path}")
