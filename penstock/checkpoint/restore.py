"""Putting back what a checkpoint holds, into whatever cut there is now: everything is checked before anything changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint import lock
from penstock.checkpoint.files.packing import unpack
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.together import as_one, differences, newest_whole, put, settled, under_all_names
from penstock.checkpoint.training_state import check_optimizer, restore_optimizer, restore_random
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.parameters import told

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
        kept = _kept(content, files, pipe.aliases)
        unfit = differences(control, pipe, {name: files.shapes.get(MODEL + at) for name, at in kept.items()})
        if any(unfit.values()):
            raise MismatchError(f"{chosen} does not fit this model: {told(unfit)}")
        state = {name: _value(kept[name], content, files) for name in pipe.state_dict(strict=False)}
        _check_dtypes(state, pipe.state_dict(strict=False))
        names = {id(parameter): kept[name] for name, parameter in pipe.named_parameters()}
        if optimizer is not None:
            check_optimizer(optimizer, content["optimizer"], names)
        if scheduler is not None and content["scheduler"] is None:
            raise MismatchError("the checkpoint holds no learning-rate schedule: it was saved without scheduler=")
        control.gather_objects(None, f"to check {chosen}")
        put(pipe, state.items())
        if optimizer is not None:
            restore_optimizer(optimizer, content["optimizer"], names, files)
        if scheduler is not None:
            scheduler.load_state_dict(unpack(content["scheduler"], files))
        extra = unpack(content["extra"], files)
        pipe.step_count = content["step"]
        restore_random(content["random"], pipe.position.world.rank, pipe.topology.device, files)
        if chosen.parent == Path(folder):
            lock.know(chosen.parent)
    return extra


def _kept(content: Mapping[str, Any], files: TensorFiles, aliases: Mapping[str, str]) -> dict[str, str]:
    """For each name in the checkpoint, and all of a parameter that is tied now, the one that its value is kept under."""
    tensors = [name.removeprefix(MODEL) for name in files if name.startswith(MODEL)]
    stored = {name: name for name in [*tensors, *content["model"]]} | content["aliases"]
    return under_all_names(stored, aliases)


def _value(kept: str, content: Mapping[str, Any], files: TensorFiles) -> Any:
    return files.mapped(MODEL + kept) if MODEL + kept in files else unpack(content["model"][kept], files)


def _check_dtypes(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if isinstance(value, Tensor) and state[name].dtype != value.dtype:
            raise MismatchError(
                f"{name} is {state[name].dtype} in the checkpoint, but {value.dtype} in this model: build the model in that "
                "type, or export the weights and import them, which converts"
            )
