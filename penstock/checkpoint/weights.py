"""The model's weights in one safetensors file, under the uncut model's names: out of any cut, and into any."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from penstock.checkpoint import manifest
from penstock.checkpoint.restore import MODEL, found
from penstock.checkpoint.tensor_files import TensorFiles, write_file
from penstock.checkpoint.together import Told, as_one, newest_whole, own_state, seen, settled, write
from penstock.comms.control import Control
from penstock.comms.topology import Topology
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline


def export(pipe: Pipeline, path: str | Path) -> None:
    """Write the whole model's weights and buffers to one safetensors file.

    All ranks call it. Each writes its part beside `path`, where all ranks must see it; rank 0 joins them, one tensor after
    the other, and renames the file last, so it is there whole or not at all.

    `pipe`: whose model. A tied parameter stands in the file under each of its names; what is no tensor is left out, with a
        warning.
    `path`: of the file. It loads into the uncut model, and into any other program that reads the format.

    Raises PenstockError, on every rank, if a rank cannot write.

        checkpoint.export(pipe, "model.safetensors")
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))  # elsewhere, without ranks
    """
    path, control = Path(path), settled(pipe)
    parts = path.with_name(f".{path.name}.parts")

    def join(everyone: Told) -> None:
        seen(parts, everyone)
        aliases = {name: first for part, _ in everyone for name, first in part["aliases"].items()}
        _join(parts, aliases, [name for part, _ in everyone for name in part["no tensors"]], path)

    with as_one(control, f"export to {path}"):
        state = own_state(pipe)
        tensors = {MODEL + name: value for name, value in state.items() if isinstance(value, Tensor)}
        part = {"aliases": pipe.aliases, "no tensors": [name for name in state if MODEL + name not in tensors]}
        write(control, parts, part, tensors, join)


def export_folder(folder: str | Path, path: str | Path) -> Path:
    """Write the weights in the newest whole checkpoint of `folder` (or in the checkpoint `folder`) to one file, as `export`.

    For a program without ranks. Returns the checkpoint taken; raises MismatchError if none is whole, PenstockError if
    `path` cannot be written.
    """
    control = Control(Topology(), "alone")
    with as_one(control, f"export {folder} to {path}"):
        chosen, content = newest_whole(control, Path(folder))
        _join(chosen, content["aliases"], content["model"], Path(path))
    return chosen


def _join(folder: Path, aliases: Mapping[str, str], left_out: Iterable[str], path: Path) -> None:
    """Join the model's tensors in the files of `folder`, each under its name and its aliases."""
    files = TensorFiles(folder)
    stored = {name.removeprefix(MODEL): name for name in files.shapes if name.startswith(MODEL)}
    stored |= {name: MODEL + first for name, first in aliases.items()}
    if left_out:
        warnings.warn(f"{path} holds tensors only: {', '.join(left_out)} left out", stacklevel=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    with manifest.replaced(path) as beside:
        write_file(beside, {name: files.mapped(first) for name, first in stored.items()})


def import_weights(pipe: Pipeline, path: str | Path) -> None:
    """Load a safetensors file with the uncut model's weights; every rank reads its own part of it and no more.

    All ranks call it.

    `pipe`: whose model; values are converted to its types.
    `path`: of one file. Of a tied parameter it needs one of the names.

    Raises MismatchError, on every rank and before anything is loaded, if the file cannot be read, and for names and shapes
    that differ, as `load_state_dict` does.

        checkpoint.import_weights(pipe, "model.safetensors")
    """
    control = settled(pipe)
    with as_one(control, f"import {path}"):
        try:
            file = TensorFiles(Path(path))
        except Exception as error:
            raise MismatchError(f"cannot read weights from {path}: {error}") from error
        places = found(pipe, file.shapes)
        control.gather_objects(None, f"to check {path}")
        tensors = {place: file.mapped(place) for place in dict.fromkeys(places.values())}
        pipe.load_state_dict({name: tensors[place] for name, place in places.items()})
        control.gather_objects(None, f"to import {path}")
