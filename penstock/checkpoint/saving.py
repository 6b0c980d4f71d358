"""Save a checkpoint: all ranks write their parts into a temporary folder, which is renamed once it is complete."""

import json
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint import folder_lock
from penstock.checkpoint.collective import (
    MODEL_PREFIX,
    SaveHandle,
    control_group_for_call,
    rank_state_to_write,
    same_error_on_all_ranks,
    temporary_shards,
)
from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.packing import pack
from penstock.checkpoint.files.tensor_files import MAX_SHARD_BYTES
from penstock.checkpoint.training_digests import check_replicas_equal
from penstock.checkpoint.training_state import merge_optimizers, pack_optimizers, pack_random_states
from penstock.checkpoint.weights import transformers_configs
from penstock.comms.abort import abort_on_error
from penstock.comms.control_group import ControlGroup
from penstock.digest import hash_values
from penstock.engine.optimizers import optimizer_list, scheduler_list
from penstock.errors import MismatchError, PenstockError, is_whole_number, require_equal
from penstock.pipeline import Pipeline


def save(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    wait: bool = True,
) -> SaveHandle:
    """Write the checkpoint `folder/step-00000120`, after step 120: all that training needs to resume, on any ranks and cut.

    All ranks call it, after the same step. The folder gets this name once all of it is on the disk, so it is always complete.

    `folder`: for all checkpoints of a run, created if it does not exist; all ranks must see it. A folder in memory
        (`/dev/shm/run`) is fast enough to save every step. It survives ranks, not the machine: `resume([memory, disk], ..)`.
    `pipe`: saves its parameters and buffers, its `step_count`, its `scaler`, and the random states of Python, numpy and torch.
        Gradients are not saved: a save between `step` and `optimizer.step()` warns.
    `optimizer`: of this rank's `pipe.parameters()`, or a list of several; its state is saved under their names. Classes, order
        and options must be the same on all ranks.
    `scheduler`: of the learning rate, the same on all ranks: any object with a `state_dict`, or a list of several.
    `extra`: other state of the program: numbers, texts, tensors, and lists, tuples and dicts of them. Rank 0's is saved. A
        GradScaler's `state_dict()` goes here, unless the pipeline has it as `scaler`.
    `keep`: the number of complete checkpoints up to this step that are kept; older ones are deleted.
    `wait`: False copies everything to host memory, and writes it in a thread while training continues. The next save or resume
        waits for the thread. So does the returned handle's `wait()`: call it once before the program ends.

    Rank 0's process locks the folder as long as the pipeline exists (`folder_lock.py`). The next `step` raises the error of a
    background save, before it begins, unless a `wait()` has raised it.

    Raises, on every rank: PenstockError if a rank cannot write, or if another process, which it names, has locked the folder;
    MismatchError for state that a checkpoint cannot have, for ranks whose steps or optimizers differ, and for replicas that
    differ in a bit of a parameter or of its optimizer's state; LostRankError if a rank dies meanwhile. Earlier checkpoints stay
    complete.

        saving = checkpoint.save("runs/a", pipe, optimizer, extra={"epoch": 3}, wait=False)
    """
    control, name = control_group_for_call(pipe, "checkpoint.save()"), manifest.folder_name(pipe.step_count)
    with (
        same_error_on_all_ranks(control, f"write the checkpoint {folder}/{name}", wait=not wait),
        abort_on_error(pipe.position.peer_groups),
    ):
        final = Path(folder) / name
        if not is_whole_number(keep, 1):
            raise PenstockError(f"keep={keep!r} would keep no checkpoint: use a whole number of 1 or more")
        optimizers = optimizer_list(optimizer, "save()", pipe.topology.world_size)
        schedulers = scheduler_list(scheduler, "save()")
        if not isinstance(extra, Mapping | None):
            raise MismatchError(f"save() takes a dict as extra, not a {type(extra).__name__}")
        lock = folder_lock.acquire(final.parent, pipe) if control.topology.rank == 0 else None
        arguments = (str(final.parent), str(keep), count_text(optimizers), count_text(schedulers))
        rows = control.all_gather_row([pipe.step_count, hash_values(arguments)], "to save")
        check_same_step_count([int(step) for step, _ in rows])
        if len({checksum for _, checksum in rows}) > 1:
            check_same_arguments(control.all_gather_value(arguments, "to save"))
        check_replicas_equal(control, pipe, optimizers)
        _warn_if_gradients_pending(pipe, optimizers)
        part, tensors = collect_rank_state(pipe, optimizers, schedulers, extra)
        if not wait:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    write = partial(_write_checkpoint, control, final, part, tensors, keep, lock)
    if wait:
        write()
        return SaveHandle(final)
    thread = ThreadPoolExecutor(1, f"writing {final.name}")
    pipe._engine.background_save = saving = SaveHandle(final, thread.submit(write))
    thread.shutdown(wait=False)
    return saving


def lock_run_folder(folder: Path, pipe: Pipeline) -> None:
    """Lock `folder` for this run before it writes other files than checkpoints there. All ranks call it. Raises as `save`."""
    control = control_group_for_call(pipe, "checkpoint.lock_run_folder()")
    with same_error_on_all_ranks(control, f"write to {folder}"):
        if control.topology.rank == 0:
            folder_lock.acquire(folder, pipe)


def check_same_step_count(step_counts: Sequence[int]) -> None:
    """Raise MismatchError unless all ranks have done the same number of steps."""
    if len(set(step_counts)) > 1:
        raise MismatchError(
            f"the ranks have done {'/'.join(map(str, step_counts))} steps: save after the same step on all of them"
        )


def check_same_arguments(arguments_of_ranks: Sequence[Sequence[str]]) -> None:
    """Raise MismatchError unless all ranks give the same folder and `keep`, and as many optimizers and schedulers."""
    for number, name in enumerate(("folder", "keep", "optimizer", "scheduler")):
        values = [arguments[number] for arguments in arguments_of_ranks]
        require_equal(values, f"do not save alike, by {name}", "gives {}", "; give all of them the same")


def count_text(values: Sequence[Any]) -> str:
    """Return the number of values in words: none, one, 2, .."""
    return {0: "none", 1: "one"}.get(len(values), str(len(values)))


def _warn_if_gradients_pending(pipe: Pipeline, optimizers: Sequence[Any]) -> None:
    """Warn on rank 0 if gradients wait for `optimizer.step()`, unless a GradScaler is enabled: it skips steps on purpose."""
    skips = pipe.scaler is not None and pipe.scaler.is_enabled()
    update_check, rank = pipe._update_check, pipe.position.world.rank
    if optimizers and rank == 0 and not skips and update_check.awaits_optimizer_step():
        warnings.warn(
            "checkpoint.save() comes between pipe.step() and optimizer.step(): a checkpoint has no gradients, so a training "
            "that is resumed from it lacks those that are added up here: save after optimizer.step()",
            stacklevel=3,
        )


def collect_rank_state(
    pipe: Pipeline, optimizers: Sequence[Any], schedulers: Sequence[Any], extra: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return this rank's part of the manifest, and the tensors that it refers to, by name."""
    rank, aliases, state = pipe.position.world.rank, pipe._engine.parameters.aliases, rank_state_to_write(pipe)
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    tensors = {MODEL_PREFIX + name: value for name, value in state.items() if isinstance(value, Tensor)}
    non_tensors = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    part = {
        "step": pipe.step_count,
        "aliases": aliases,
        "settings": transformers_configs(pipe),
        "model": {name: pack(value, f"state.{name}", tensors) for name, value in non_tensors.items()},
        "optimizers": pack_optimizers(optimizers, names, state, tensors, rank),
        "schedulers": [
            pack(scheduler.state_dict(), f"schedulers.{number}.{rank}", tensors) for number, scheduler in enumerate(schedulers)
        ],
        "scaler": None if pipe.scaler is None else pack(pipe.scaler.state_dict(), f"scaler.{rank}", tensors),
        "extra": pack(dict(extra or {}), "extra", tensors) if rank == 0 else None,
        "random": pack_random_states(rank, pipe.topology.device, tensors),
    }
    return part, tensors


def _write_checkpoint(
    control: ControlGroup,
    final: Path,
    rank_manifest: dict[str, Any],
    tensors: dict[str, Tensor],
    keep: int,
    lock: folder_lock.FolderLock | None,
) -> None:
    """Write the state that all ranks have collected, rename the folder to `final`, and delete all but `keep` checkpoints.

    `lock`: the folder's lock, on rank 0.
    """
    folder, temporary = final.parent, final.with_name(f".{final.name}.part")
    with same_error_on_all_ranks(control, f"write the checkpoint {final}"), lock.write_mutex if lock else nullcontext():
        if lock:
            manifest.delete_leftovers(folder)
        with temporary_shards(
            control, temporary, tensors, json.dumps(rank_manifest), MAX_SHARD_BYTES, with_checksums=True
        ) as everyone:
            if lock:
                manifest.write(temporary, merge_manifests([{**json.loads(text), "files": files} for files, text in everyone]))
                manifest.rename_checkpoint(temporary, final)
                manifest.prune(folder, rank_manifest["step"], keep)


def merge_manifests(rank_manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest made of all ranks' parts. Schedulers are equal, so the first one is kept."""
    return {
        "step": rank_manifests[0]["step"],
        "settings": rank_manifests[0]["settings"],
        **{key: dict(item for part in rank_manifests for item in part[key].items()) for key in ("files", "aliases", "model")},
        "optimizers": merge_optimizers([part["optimizers"] for part in rank_manifests]),
        "schedulers": rank_manifests[0]["schedulers"],
        "scaler": rank_manifests[0]["scaler"],
        "extra": rank_manifests[0]["extra"],
        "random": [part["random"] for part in rank_manifests],
    }
