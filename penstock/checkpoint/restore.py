"""Resume from a checkpoint, in any cut: everything is checked before anything changes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.collective import (
    MODEL_PREFIX,
    control_group_for_call,
    copy_into_model,
    gather_state_mismatches,
    open_newest_complete_checkpoint,
    same_error_on_all_ranks,
    with_tied_names,
)
from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.packing import unpack
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.training_state import (
    check_optimizers_match,
    restore_optimizer,
    restore_random_states,
    unpack_scaler_state,
    unpack_scheduler_states,
)
from penstock.comms.control_group import ControlGroup
from penstock.comms.system import print_notice
from penstock.engine.optimizers import optimizer_list, scheduler_list
from penstock.errors import MismatchError, PenstockError, format_count, require_equal, warn_user
from penstock.pipeline import Pipeline
from penstock.stage.rank_parameters import describe_mismatches

Folder = str | Path


def resume(folder: Folder | Sequence[Folder], pipe: Pipeline, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any]:
    """Restore the newest complete checkpoint in `folder`, whatever cut, ranks and schedule it was saved with.

    All ranks call it. Training then continues bit for bit as if it had not been interrupted. First every file is compared with
    its checksum; the ranks share that work. A damaged checkpoint is skipped, with a warning that names the file.

    `folder`: a folder of checkpoints, or one checkpoint. To resume from a checkpoint that is not the newest, give its path, and
        save to another folder. Of a list of folders the newest checkpoint is taken; at the same step, the one in the earlier
        folder. Use a list if you save often in memory (`/dev/shm/run`), and sometimes on a disk, in case the machine fails.
        A folder need not exist yet.
    `pipe`: gets the parameters and buffers, the `step_count` and the state of its `scaler`. The random generators of Python,
        numpy and torch continue from this rank's saved states, or from rank 0's if there were fewer ranks.
    `optimizer`: of this rank's `pipe.parameters()`, with the saved one's class and groups; gets its state and options. Or a
        list of several, in the order in which they were saved.
    `scheduler`: of the learning rate; gets its state. Or a list, in the order of the saved ones.

    If the pipeline has an optimizer, a saved optimizer, schedule or scaler that is not restored is a warning.
    Returns the `extra` that was given to `save`. Raises MismatchError, on every rank and before anything is restored, if no
    checkpoint is complete (the file is named), or if names, shapes, dtypes or optimizers do not fit.

        if checkpoint.exists("runs/a"):
            epoch = checkpoint.resume("runs/a", pipe, optimizer)["epoch"]
    """
    control, folders = control_group_for_call(pipe, "checkpoint.resume()"), _paths_of_folders(folder)
    with same_error_on_all_ranks(control, f"resume from {', '.join(map(str, folders))}"):
        optimizers = optimizer_list(optimizer, "resume()", pipe.topology.world_size)
        schedulers = scheduler_list(scheduler, "resume()")
        check_same_counts(control, optimizers, schedulers, "resume")
        checkpoint, content, files = open_newest_complete_checkpoint(control, *folders)
        stored_name_of = _stored_names(content, files, pipe._engine.parameters.aliases)
        mismatches = gather_state_mismatches(
            control, pipe, {name: files.shapes.get(MODEL_PREFIX + at) for name, at in stored_name_of.items()}
        )
        if any(mismatches.values()):
            raise MismatchError(f"{checkpoint} does not fit this model: {describe_mismatches(mismatches)}")
        model_state = pipe.state_dict(strict=False)
        state = {name: _stored_value(stored_name_of[name], content, files) for name in model_state}
        _check_same_types(state, model_state)
        names = {id(parameter): stored_name_of[name] for name, parameter in pipe.named_parameters()}
        extra = unpack(content["extra"], files)
        if optimizers:
            check_optimizers_match(optimizers, content["optimizers"], names)
        scheduler_states = unpack_scheduler_states(schedulers, content["schedulers"], files)
        scaler_state = unpack_scaler_state(content.get("scaler"), files, pipe.scaler, checkpoint)
        if control.topology.rank == 0 and (optimizers or pipe._has_optimizer):
            _warn_of_unrestored_state(content, checkpoint, optimizers, schedulers, pipe.scaler)
        with roll_back_on_failure(checkpoint, pipe, optimizers, schedulers):
            copy_into_model(pipe, ((name, value) for name, value in state.items() if not isinstance(value, Tensor)))
            for item, saved in zip(optimizers, content["optimizers"][: len(optimizers)], strict=True):
                restore_optimizer(item, saved, names, files)
            for item, state_of_scheduler in zip(schedulers, scheduler_states, strict=True):
                item.load_state_dict(state_of_scheduler)
            control.all_gather_row((), f"to check {checkpoint}")  # from here on nothing can fail, on any rank
        copy_into_model(pipe, ((name, value) for name, value in state.items() if isinstance(value, Tensor)))
        if pipe.scaler is not None and scaler_state:
            pipe.scaler.load_state_dict(scaler_state)
        pipe.step_count = content["step"]
        restore_random_states(content["random"], pipe.position.world.rank, pipe.topology.device, files)
    if len(folders) > 1 and control.topology.rank == 0:
        print_notice(f"the ranks go on from {checkpoint}")
    return extra


def _warn_of_unrestored_state(
    content: Mapping[str, Any], checkpoint: Path, optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any
) -> None:
    """Warn that a training would go on without a part of its state."""
    lost = [part["kind"] for part in content["optimizers"] if not optimizers]
    lost += ["a learning-rate schedule" for _ in content["schedulers"] if not schedulers]
    lines = [f"checkpoint.resume(.., pipe, optimizer{', scheduler' * bool(content['schedulers'])})"] * bool(lost)
    if scaler is None and (content.get("scaler") or {}).get("dict"):
        lost.append("a GradScaler")
        lines.append("Pipeline(.., scaler=scaler)")
    if lost:
        advice = f"{' and '.join(lines)} restore{'s' * (len(lines) == 1)} it"
        warn_user(f"{checkpoint} holds the state of {', '.join(lost)}, which is not restored: {advice}")


def exists(folder: Folder | Sequence[Folder]) -> bool:
    """Return whether there is a checkpoint in `folder`, or in one of several: call it to decide whether to `resume`.

    Each rank returns what it sees. Machines do not see each other's memory: on several, give only the folder on the disk.
    """
    return any(
        folder_path.is_dir() and bool(manifest.all_checkpoints_newest_first(folder_path))
        for folder_path in _paths_of_folders(folder)
    )


def _paths_of_folders(folder: Folder | Sequence[Folder]) -> list[Path]:
    """Return one folder, or several, as a list of paths. Raises PenstockError for an empty list."""
    folders = [Path(folder)] if isinstance(folder, str | os.PathLike) else [Path(value) for value in folder]
    if not folders:
        raise PenstockError("there is no folder in an empty list: give one, or several, that `save` wrote to")
    return folders


def check_same_counts(control: ControlGroup, optimizers: Sequence[Any], schedulers: Sequence[Any], action: str) -> None:
    """Raise MismatchError unless all ranks give as many optimizers and schedulers to what they do together, `action`."""
    rows = control.all_gather_row([len(optimizers), len(schedulers)], "to compare optimizers and schedulers")
    for name, counts in zip(("optimizer", "scheduler"), zip(*rows, strict=True), strict=True):
        texts = [format_count(int(count), name) for count in counts]
        require_equal(texts, f"do not {action} alike", "gives {}", "; give all of them as many, in the same order")


def _stored_names(content: Mapping[str, Any], files: TensorFiles, aliases: Mapping[str, str]) -> dict[str, str]:
    """Return name -> the name that its value is stored under, also for names of parameters that are tied only now."""
    tensors = [name.removeprefix(MODEL_PREFIX) for name in files if name.startswith(MODEL_PREFIX)]
    stored = {name: name for name in [*tensors, *content["model"]]} | content["aliases"]
    return with_tied_names(stored, aliases)


def _stored_value(stored_name: str, content: Mapping[str, Any], files: TensorFiles) -> Any:
    return (
        files.mapped_tensor(MODEL_PREFIX + stored_name)
        if MODEL_PREFIX + stored_name in files
        else unpack(content["model"][stored_name], files)
    )


def _check_same_types(saved_state: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
    for name, value in model_state.items():
        saved_type, model_type = (_type_name(item) for item in (saved_state[name], value))
        if saved_type != model_type and (isinstance(value, Tensor) or isinstance(saved_state[name], Tensor)):
            raise MismatchError(
                f"{name} is {saved_type} in the checkpoint, but {model_type} in this model: build the model in that "
                "type, or export the weights and import them, which converts"
            )


def _type_name(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def roll_back_on_failure(
    checkpoint: Path, pipe: Pipeline, optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> Iterator[None]:
    """Restore the previous state of the optimizers, the schedulers and the model's non-tensors if the block raises.

    An error that a `load_state_dict` raises becomes a MismatchError.
    """
    non_tensors = {name: value for name, value in pipe.state_dict(strict=False).items() if not isinstance(value, Tensor)}
    optimizer_states = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    scheduler_states = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        yield
    except BaseException as error:
        copy_into_model(pipe, non_tensors.items())
        for optimizer, state_and_groups in zip(optimizers, optimizer_states, strict=True):
            optimizer.state, optimizer.param_groups = state_and_groups
        for scheduler, state in zip(schedulers, scheduler_states, strict=True):
            scheduler.load_state_dict(state)
        if isinstance(error, PenstockError) or not isinstance(error, Exception):
            raise
        raise MismatchError(f"{checkpoint} holds a state that cannot be loaded: {type(error).__name__}: {error}") from error
