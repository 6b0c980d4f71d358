"""Putting back what a checkpoint holds, into whatever cut there is now: everything is checked before anything changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.beside import newest_whole, settled, together
from penstock.checkpoint.packing import names_in, unpack
from penstock.checkpoint.tensor_files import TensorFiles
from penstock.checkpoint.training_state import check_optimizer, restore_optimizer, restore_random
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline

MODEL = "model."  # what the names of the model's tensors begin with in a checkpoint


def resume(folder: str | Path, pipe: Pipeline, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any]:
    """Go on where the newest whole checkpoint in `folder` was saved, whatever cut, ranks and schedule it was saved with.

    All ranks call it, each with its own part's optimizer. `folder` holds checkpoints, or is one. Every file is compared
    with its hash first, the ranks sharing the work; of a newer checkpoint that is damaged, a warning names the file.
    Restores the model, the optimizer and the scheduler if they are given, `pipe.step_count` and the random states (rank 0's
    where the checkpoint has none of this rank), and returns `extra`. To go on from an older checkpoint than the newest,
    give its own folder, and save to another one.

    Raises MismatchError, on every rank and before anything is restored, if no checkpoint is whole (the file is named), and
    if names, shapes, types or optimizers do not fit.
    """
    control = settled(pipe).control
    with together(control, f"resume from {folder}"):
        chosen, content = newest_whole(control, Path(folder))
        files = TensorFiles(chosen)
        restore = Restore(pipe, optimizer, scheduler, content, files)
        control.gather_objects(None, f"to check {chosen}")
        extra = restore.run()
        control.gather_objects(None, f"to resume from {chosen}")
    return extra


class Restore:
    """Putting back what a checkpoint holds: all checks are made when this is made, `run` changes things."""

    def __init__(self, pipe: Pipeline, optimizer: Any, scheduler: Any, content: dict[str, Any], files: TensorFiles) -> None:
        self.pipe, self.optimizer, self.scheduler, self.content, self.files = pipe, optimizer, scheduler, content, files
        tensors = {name.removeprefix(MODEL): name for name in files.shapes if name.startswith(MODEL)}
        stored = {name: name for name in [*tensors, *content["model"]]} | content["aliases"]
        shapes = {name: files.shapes[tensors[kept]] if kept in tensors else None for name, kept in stored.items()}
        places = found(pipe, shapes)
        self.kept = {name: stored[where] for name, where in places.items()}  # this rank's names -> those in the checkpoint
        self._check_types()
        parameters = {id(parameter): self.kept[name] for name, parameter in pipe.named_parameters()}
        self._name_of = lambda parameter: parameters.get(id(parameter))
        if optimizer is not None:
            check_optimizer(optimizer, content["optimizer"], self._name_of)
        if scheduler is not None and content["scheduler"] is None:
            raise MismatchError("the checkpoint holds no learning-rate schedule: it was saved without scheduler=")

    def _check_types(self) -> None:
        for name, value in self.pipe.state_dict().items():
            kept = self.files.dtypes.get(MODEL + self.kept[name])
            if kept is not None and kept != value.dtype:
                raise MismatchError(
                    f"{name} is {kept} in the checkpoint, but {value.dtype} in this model: build the model in that type, or "
                    "export the weights and import them, which converts"
                )

    def run(self) -> dict[str, Any]:
        """Read this rank's tensors, restore everything, return `extra`."""
        content, rank = self.content, self.pipe.position.world.rank
        model = {name: content["model"].get(kept, {"tensor": MODEL + kept}) for name, kept in self.kept.items()}
        state = content["optimizer"] if self.optimizer is not None else {"state": {}, "groups": []}
        mine = set(self.kept.values())
        optimizer = [each for name, each in state["state"].items() if name in mine]
        optimizer += [group["options"] for group in state["groups"]]
        schedule = content["scheduler"] if self.scheduler is not None else None
        drawn = content["random"][rank if rank < len(content["random"]) else 0]
        wanted = [*model.values(), *optimizer, schedule, drawn, content["extra"]]
        tensors = self.files.read(dict.fromkeys(names_in(wanted)))
        self.pipe.load_state_dict({name: unpack(packed, tensors) for name, packed in model.items()})
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, state, self._name_of, tensors)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(unpack(schedule, tensors))
        self.pipe.step_count = content["step"]
        restore_random(drawn, self.pipe.topology.device, tensors)
        return unpack(content["extra"], tensors)


def found(pipe: Pipeline, shapes: Mapping[str, Any]) -> dict[str, str]:
    """For each of this rank's names the one in `shapes` with its value: for a tied parameter, the first name there is.

    Raises MismatchError as `load_state_dict` does.
    """
    aliases = pipe.aliases
    names: dict[str, list[str]] = {}
    for further, first in aliases.items():
        names.setdefault(first, [first]).append(further)
    found = {}
    for name in pipe.state_dict():
        places = [place for place in names.get(aliases.get(name, name), [name]) if place in shapes]
        if places:
            found[name] = places[0]
    pipe.check_state({**shapes, **{name: shapes[place] for name, place in found.items()}})
    return found
