"""Putting back what a checkpoint holds, into whatever cut there is now: everything is checked before anything changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.packing import unpack
from penstock.checkpoint.tensor_files import TensorFiles
from penstock.checkpoint.together import as_one, newest_whole, settled
from penstock.checkpoint.training_state import check_optimizer, restore_optimizer, restore_random
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline

MODEL = "model."  # what the names of the model's tensors begin with in a checkpoint


def resume(folder: str | Path, pipe: Pipeline, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any]:
    """Go on where the newest whole checkpoint in `folder` was saved, whatever cut, ranks and schedule it was saved with.

    All ranks call it, and what follows is to the bit what would have followed without the stop. Every file is compared with
    its hash first, the ranks sharing the work; of a newer checkpoint that is damaged, a warning names the file.

    `folder`: of checkpoints, or one of them. To go on from an older one than the newest, give that, and save elsewhere.
    `pipe`: gets the parameters and buffers, and the `step_count`. Python's and torch's random generators go on as on this
        rank then, or on rank 0 if there were fewer.
    `optimizer`: of this rank's `pipe.parameters()`, of the saved one's class and groups; gets its state and options.
    `scheduler`: of the learning rate; gets its state.

    Returns what was given as `extra` to `save`. Raises MismatchError, on every rank and before anything is restored, if no
    checkpoint is whole (the file is named), and if names, shapes, types or optimizers do not fit.

        if checkpoint.exists("runs/a"):
            epoch = checkpoint.resume("runs/a", pipe, optimizer)["epoch"]
    """
    control = settled(pipe)
    with as_one(control, f"resume from {folder}"):
        chosen, content = newest_whole(control, Path(folder))
        files = TensorFiles(chosen)
        kept = _kept(pipe, content, files)
        names = {id(parameter): kept[name] for name, parameter in pipe.named_parameters()}
        if optimizer is not None:
            check_optimizer(optimizer, content["optimizer"], names)
        if scheduler is not None and content["scheduler"] is None:
            raise MismatchError("the checkpoint holds no learning-rate schedule: it was saved without scheduler=")
        control.gather_objects(None, f"to check {chosen}")
        others = {name: unpack(content["model"][at], files) for name, at in kept.items() if at in content["model"]}
        pipe.load_state_dict(others | {name: files.mapped(MODEL + at) for name, at in kept.items() if MODEL + at in files})
        if optimizer is not None:
            restore_optimizer(optimizer, content["optimizer"], names, files)
        if scheduler is not None:
            scheduler.load_state_dict(unpack(content["scheduler"], files))
        extra = unpack(content["extra"], files)
        pipe.step_count = content["step"]
        restore_random(content["random"], pipe.position.world.rank, pipe.topology.device, files)
        control.gather_objects(None, f"to resume from {chosen}")
    return extra


def _kept(pipe: Pipeline, content: dict[str, Any], files: TensorFiles) -> dict[str, str]:
    """For each of this rank's names the one that its value is kept under. Raises MismatchError for what does not fit."""
    tensors = [name.removeprefix(MODEL) for name in files if name.startswith(MODEL)]
    stored = {name: name for name in [*tensors, *content["model"]]} | content["aliases"]
    places = found(pipe, {name: files.shapes.get(MODEL + kept) for name, kept in stored.items()})
    for name, value in pipe.state_dict(strict=False).items():
        at = MODEL + stored[places[name]]
        if at in files and (dtype := files.mapped(at).dtype) != value.dtype:
            raise MismatchError(
                f"{name} is {dtype} in the checkpoint, but {value.dtype} in this model: build the model in that type, or "
                "export the weights and import them, which converts"
            )
    return {name: stored[place] for name, place in places.items()}


def found(pipe: Pipeline, shapes: Mapping[str, Any]) -> dict[str, str]:
    """For each of this rank's names the one in `shapes` with its value: for a tied parameter, the first name there is.

    Raises MismatchError as `load_state_dict` does.
    """
    aliases = pipe.aliases
    names: dict[str, list[str]] = {}
    for further, first in aliases.items():
        names.setdefault(first, [first]).append(further)
    found = {}
    for name in pipe.state_dict(strict=False):
        places = [place for place in names.get(aliases.get(name, name), [name]) if place in shapes]
        if places:
            found[name] = places[0]
    pipe.check_state({**shapes, **{name: shapes[place] for name, place in found.items()}})
    return found
