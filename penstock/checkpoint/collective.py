"""What the ranks do together for a checkpoint: fail as one, write at the same time, find the newest whole one."""

import itertools
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.checkpoint.files import manifest, schema, tensor_files
from penstock.checkpoint.files.disk import DamagedFileError, is_in_memory
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.training_state import check_random_states
from penstock.comms.control_group import ControlGroup
from penstock.errors import MismatchError, PenstockError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import gather_full_tensor, shard_like

T = TypeVar("T")
MODEL_PREFIX = "model."  # what the names of the model's tensors begin with in a checkpoint
_control_group_numbers = itertools.count()  # of control groups for checkpoints in this process, the same on every rank
_control_groups: WeakKeyDictionary[Pipeline, ControlGroup] = WeakKeyDictionary()


class SaveHandle:
    """A checkpoint that `save` has begun.

    `path`: its folder, which is there once it is whole. `written`: when that is, if it is not already.
    """

    def __init__(self, path: Path, written: Future[None] | None = None) -> None:
        self.path = path
        self._written, self._waited = written, False

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Raises, on every rank, what went wrong."""
        error = self._written and self._written.exception()  # a Ctrl-C here leaves that to be told
        self._waited = True
        if error:
            raise error
        return self.path

    @property
    def has_unreported_error(self) -> bool:
        """Whether it has come to an error, as far as this rank knows, that nobody has been told."""
        return not self._waited and self._written is not None and self._written.done() and bool(self._written.exception())

    def wait_unless_reported(self) -> None:
        """As `wait`, but what that has raised already is not raised again."""
        if not self._waited:
            self.wait()


def control_group_for_call(pipe: Pipeline, call: str) -> ControlGroup:
    """The control group of the checkpoints of `pipe`, once all ranks have made this `call` and the save before has ended.

    Raises MismatchError, on every rank, if a rank has made another call, and what went wrong with that save.
    """
    if not isinstance(pipe, Pipeline):
        raise MismatchError(f"a checkpoint is of a Pipeline, not a {type(pipe).__name__}: save(folder, pipe)")
    with pipe.collective(call):
        pass
    pipe._engine.settle_background_save()
    if pipe not in _control_groups:
        _control_groups[pipe] = ControlGroup(pipe.position.world, f"penstock/checkpoint/{next(_control_group_numbers)}")
    return _control_groups[pipe]


def rank_state_to_write(pipe: Pipeline) -> dict[str, Any]:
    """What of the model this rank writes: tensors whole, tied ones under their first name, by the rank that has that.

    Ranks that have the same stage, along the mesh's axes `dp` and `tp`, share the work.
    """
    aliases, position = pipe._engine.parameters.aliases, pipe.position
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(pipe.state_dict().items()):
        whole = gather_full_tensor(value)  # all who have a piece of it ask for it
        if number % position.num_stage_ranks == position.stage_rank_index and name not in aliases:
            state[name] = whole
    return state


def with_tied_names(stored: Mapping[str, T], aliases: Mapping[str, str]) -> dict[str, T]:
    """`stored`, in which a tied tensor has one of its names at least, with what is under the first it has under all of them.

    `aliases`: further names -> the first.
    """
    completed = dict(stored)
    for further, first in aliases.items():
        if further in stored:
            completed.setdefault(first, stored[further])
    return completed | {further: completed[first] for further, first in aliases.items() if first in completed}


def gather_state_mismatches(control: ControlGroup, pipe: Pipeline, shapes: Mapping[str, Any]) -> dict[str, list[str]]:
    """What `Parameters.unfit` says of a state of these names and shapes, over all ranks and the same on each."""
    everyone = control.all_gather_object(pipe._engine.parameters.state_mismatches(shapes), "to compare names and shapes")
    return {kind: list(dict.fromkeys(name for each in everyone for name in each[kind])) for kind in everyone[0]}


@torch.no_grad()
def copy_into_model(pipe: Pipeline, state: Iterable[tuple[str, Any]]) -> None:
    """Put values into this rank's part of the model, one after the other and straight into place."""
    own, new = pipe.state_dict(strict=False), {}
    for name, value in state:
        new[name] = own[name].copy_(shard_like(value, own[name])) if isinstance(own[name], Tensor) else value
    pipe.load_state_dict(new, strict=False)  # from itself: for modules that keep a state of another form, or have hooks


@contextmanager
def fail_together(control: ControlGroup, what: str, waits: bool = True) -> Iterator[None]:
    """What all ranks do: if it fails on one it does on all, with the same error, which says `what` could not be done.

    `waits`: False lets a rank that is done go on at once, to the next exchange over `control`.
    """
    control.open_groups()
    try:
        yield
        if waits:
            control.all_gather_row((), f"to {what}")
    except OSError as error:
        why = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        told = PenstockError(f"rank {control.topology.rank} could not {what}: {why}")
        told.__cause__ = error
        control.fail_on_all_ranks(told)
    except BaseException as error:
        control.fail_on_all_ranks(error)


@contextmanager
def temporary_shards(
    control: ControlGroup, folder: Path, tensors: Mapping[str, Tensor], more: Any, most: float, with_checksums: bool = False
) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """`folder` with what all ranks have written into it, each its `tensors`, as long as this lasts.

    Gives each rank's files, as `tensor_files.write` does, and what `more` it says.
    """
    first = control.topology.rank == 0
    try:
        if first:
            manifest.delete_path(folder)
            folder.mkdir(parents=True)
        control.all_gather_row((), f"to begin {folder}")
        files = tensor_files.write_shards(folder, control.topology.rank, tensors, most, with_checksums)
        everyone = control.all_gather_object((files, more), f"to write {folder}")
        for rank, (names, _) in enumerate(everyone):
            if first and (hidden := [folder / name for name in names if not (folder / name).exists()]):
                where = "save where all ranks do" + "; memory is its machine's alone" * is_in_memory(folder)
                raise PenstockError(f"rank {rank} wrote {hidden[0]}, but rank 0 does not see it: {where}")
        yield everyone
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def newest_complete_checkpoint(control: ControlGroup, *folders: Path) -> tuple[Path, dict[str, Any], TensorFiles]:
    """The newest whole checkpoint in `folders`, the same on all ranks: its path, manifest and tensors; one folder may be one.

    Raises MismatchError if there is none. Of each that is passed over, a warning says why.
    """
    rank, ranks, where = control.topology.rank, control.topology.world_size, ", ".join(map(str, folders))
    found, damage = _checkpoints_newest_first(folders) if rank == 0 else [], []
    for path in control.all_gather_object(found, f"to look into {where}")[0]:
        told, content, files, later = None, {}, None, False
        try:
            content = manifest.read(path)
            manifest.verify_files(path, content["files"], rank, ranks)
            later = True  # what another rank finds of the files' bytes explains more
            files = TensorFiles(path)
            _check_tensors_present(path, content, files)
            check_random_states(path, content["random"], rank, files)
        except DamagedFileError as error:
            told = later, str(error)
        problems = [why for _, why in sorted(filter(None, control.all_gather_object(told, f"to check {path}")))]
        if not problems and files is not None:
            manifest.mark_verified(path)
            return path, content, files
        damage.append(problems[0])
        if not _is_checkpoint(folders[0]) and rank == 0:
            warnings.warn(f"the checkpoint {path} is passed over: {problems[0]}", stacklevel=3)
    if not damage:
        raise MismatchError(f"there is no checkpoint in {where}: give a folder that `save` wrote to")
    raise MismatchError(damage[0] if _is_checkpoint(folders[0]) else f"no checkpoint in {where} is whole: {'; '.join(damage)}")


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is one, and not a folder of them."""
    return manifest.step_of_folder(folder) is not None or (folder / manifest.MANIFEST_FILE).is_file()


def _checkpoints_newest_first(folders: Sequence[Path]) -> list[Path]:
    """The checkpoints in `folders`, the newest first; of the same step, that of the folder that was given first."""
    if len(folders) == 1:
        return [folders[0].resolve()] if _is_checkpoint(folders[0]) else manifest.checkpoints_newest_first(folders[0])
    for folder in folders:
        if _is_checkpoint(folder):
            raise MismatchError(f"{folder} is a checkpoint, not a folder of them: give it alone, to go on from no other")
    found = [path for folder in folders if folder.is_dir() for path in manifest.checkpoints_newest_first(folder)]
    return sorted(found, key=lambda path: -int(manifest.step_of_folder(path) or 0))


def _check_tensors_present(path: Path, content: Mapping[str, Any], files: TensorFiles) -> None:
    """Raises Damaged unless all that the manifest's `content` refers to is there."""
    for name in schema.validate_manifest(content):
        if name not in files:
            raise DamagedFileError(f"{path} has no tensor {name!r}, of which its {manifest.MANIFEST_FILE} tells")
    for further, first in content["aliases"].items():
        if MODEL_PREFIX + first not in files and first not in content["model"]:
            raise DamagedFileError(f"{path} has no {first!r}, which {further!r} is by its {manifest.MANIFEST_FILE}")
