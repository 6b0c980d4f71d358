"""Saving: all ranks write their parts beside, and the folder gets its name when it is whole."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint import manifest
from penstock.checkpoint.beside import Saving, own_state, seen, settled, together, written
from penstock.checkpoint.packing import pack
from penstock.checkpoint.restore import MODEL
from penstock.checkpoint.training_state import merged_optimizer, pack_optimizer, pack_random
from penstock.comms.control import Control
from penstock.comms.groups import broken_off
from penstock.errors import MismatchError, PenstockError
from penstock.pipeline import Pipeline


def save(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    wait: bool = True,
) -> Saving:
    """Write `folder/step-00000120`, 120 being the steps done: model, optimizer, learning-rate schedule, random states.

    All ranks call it. `extra` (rank 0's): whatever else the program needs to go on, numbers, texts, tensors, and lists and
    dicts of them; a GradScaler's `state_dict()` goes here. The last `keep` whole checkpoints up to this step stay, older
    ones are deleted. The folder gets its name when all of it is on the disk, so it is there whole or not at all.
    With `wait=False` the state is copied to host memory and a thread writes it while training goes on; the next save or
    resume waits for that, and so does `wait()` of what this returns, which every program calls once before it ends.

    Raises, on every rank: PenstockError if a rank cannot write; MismatchError for state that a checkpoint cannot keep, and
    for ranks whose steps or optimizers differ; LostRankError if a rank dies meanwhile. The checkpoints before stay whole.
    """
    if keep < 1:
        raise PenstockError(f"keep={keep} would keep no checkpoint: use 1 or more")
    beside = settled(pipe)
    final = Path(folder) / manifest.folder_of(pipe.step_count)
    tensors: dict[str, Tensor] = {}
    with together(beside.control, f"collect what goes into {final}"), broken_off(pipe.position.beside):
        state = own_state(pipe)
        part = {"step": pipe.step_count, "aliases": pipe.aliases, "model": _packed_model(state, tensors)}
        part |= _packed_training(pipe, optimizer, scheduler, extra, state, tensors)
        if not wait:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    saving = Saving(final, partial(_write, beside.control, final, part, tensors, keep), background=not wait)
    beside.saving = saving
    return saving


def _packed_model(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of the model: its tensors go into `tensors`; returns the rest."""
    tensors.update({MODEL + name: value for name, value in state.items() if isinstance(value, Tensor)})
    return {name: pack(value, f"state.{name}", tensors) for name, value in state.items() if not isinstance(value, Tensor)}


def _packed_training(
    pipe: Pipeline,
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """This rank's part of everything else; of the schedules, which are alike, the first is kept."""
    rank, aliases = pipe.position.world.rank, pipe.aliases
    names = {id(parameter): aliases.get(name, name) for name, parameter in pipe.named_parameters()}

    def name_of(parameter: Tensor) -> str | None:
        return names.get(id(parameter))

    part: dict[str, Any] = {"optimizer": None, "scheduler": None, "extra": None}
    if optimizer is not None:
        part["optimizer"] = pack_optimizer(optimizer, name_of, state.__contains__, tensors, rank)
    if scheduler is not None:
        part["scheduler"] = pack(scheduler.state_dict(), f"scheduler.{rank}", tensors)
    if rank == 0:
        part["extra"] = pack(dict(extra or {}), "extra", tensors)
    return {**part, "random": pack_random(rank, pipe.topology.device, tensors)}


def _write(control: Control, final: Path, part: dict[str, Any], tensors: dict[str, Tensor], keep: int) -> None:
    """Write and put in place what all ranks have collected; then delete what is older than the last `keep`."""
    rank, folder = control.topology.rank, final.parent
    beside = folder / f".{final.name}.part"
    with together(control, f"write the checkpoint {final}"):
        try:
            everyone = written(control, partial(manifest.begin, folder, final.name), beside, part, tensors)
            if rank == 0:
                manifest.write(beside, {**_merged([part for part, _ in everyone]), "files": seen(beside, everyone)})
                manifest.put_in_place(beside, final)
                manifest.prune(folder, part["step"], keep)
        except BaseException:
            if rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise
        control.gather_objects(None, f"to put {final.name} in place")


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest of all ranks' parts."""
    steps = [part["step"] for part in parts]
    if len(set(steps)) > 1:
        raise MismatchError(f"the ranks have done {'/'.join(map(str, steps))} steps: save after the same step on all of them")
    together = {key: {name: value for part in parts for name, value in part[key].items()} for key in ("aliases", "model")}
    return {
        "step": steps[0],
        **together,
        "optimizer": merged_optimizer([part["optimizer"] for part in parts]),
        "scheduler": next((part["scheduler"] for part in parts if part["scheduler"] is not None), None),
        "extra": parts[0]["extra"],
        "random": [part["random"] for part in parts],
    }


def exists(folder: str | Path) -> bool:
    """Whether there is a checkpoint in `folder` to resume from: a program that may be started again asks this first."""
    return Path(folder).is_dir() and bool(manifest.newest_first(Path(folder)))
