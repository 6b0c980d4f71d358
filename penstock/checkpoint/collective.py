"""Steps that all ranks take together for a checkpoint: raise the same error, write, find the newest complete one."""

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.checkpoint.files import manifest, schema, tensor_files
from penstock.checkpoint.files.disk import DamagedFileError, is_in_memory
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.training_state import check_random_states
from penstock.comms.control_group import ControlGroup, describe_different_calls
from penstock.errors import MismatchError, PenstockError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import gather_full_tensor, shard_like

T = TypeVar("T")
MODEL_PREFIX = "model."  # of the names of the model's tensors in a checkpoint
_control_group_numbers = itertools.count()  # number the control groups for checkpoints, the same on every rank
_control_groups: WeakKeyDictionary[Pipeline, ControlGroup] = WeakKeyDictionary()


class SaveHandle:
    """A save, perhaps still in progress.

    `path`: the checkpoint's folder, which exists once it is complete. `future`: of a save in the background.
    """

    def __init__(self, path: Path, future: Future[None] | None = None) -> None:
        self.path = path
        self._future, self._was_waited_for = future, False

    def __repr__(self) -> str:
        """Return the folder, and whether it is complete."""
        if self._future is None or (self._future.done() and not self._future.exception()):
            return f"SaveHandle({str(self.path)!r}, complete)"
        state = f"failed: {self._future.exception()}" if self._future.done() else "being written: wait() until it is complete"
        return f"SaveHandle({str(self.path)!r}, {state})"

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its folder. Raises, on every rank, the error of a save that failed."""
        error = self._future and self._future.exception()  # a Ctrl-C here leaves the error unreported
        self._was_waited_for = True
        if error:
            raise error
        return self.path

    @property
    def has_unreported_error(self) -> bool:
        """Whether this rank knows that the save failed, and `wait` has not raised it."""
        return not self._was_waited_for and self._future is not None and self._future.done() and bool(self._future.exception())

    def wait_unless_reported(self) -> None:
        """Wait as `wait` does, but do not raise an error again that `wait` has raised."""
        if not self._was_waited_for:
            self.wait()


def control_group_for_call(pipe: Pipeline, call: str) -> ControlGroup:
    """Return the control group for the checkpoints of `pipe`, once all ranks make this `call` and no save is in progress.

    Raises, on every rank: MismatchError if a rank makes another call, and the error of a background save that failed.
    """
    if not isinstance(pipe, Pipeline):
        raise MismatchError(f"a checkpoint is of a Pipeline, not a {type(pipe).__name__}: save(folder, pipe)")
    with pipe.collective(call):
        pass
    pipe._engine.finish_background_save()

    if pipe not in _control_groups:
        _control_groups[pipe] = ControlGroup(pipe.position.world, f"penstock/checkpoint/{next(_control_group_numbers)}")
    return _control_groups[pipe]


@contextmanager
def same_error_on_all_ranks(control: ControlGroup, action: str, wait: bool = True) -> Iterator[None]:
    """Run the block on all ranks; if it fails on one, raise the same error on all: "rank 1 could not {action}: ..".

    `wait`: False returns without waiting for the other ranks. An error of theirs is raised at the next exchange over `control`.
    """
    control.open_groups()
    try:
        yield
        if wait:
            control.all_gather_row((), f"to {action}")
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        failure = PenstockError(f"rank {control.topology.rank} could not {action}: {reason}")
        failure.__cause__ = error
        control.raise_error_on_all_ranks(failure)
    except BaseException as error:
        control.raise_error_on_all_ranks(error)


def check_same_path(control: ControlGroup, function: str, path: Path) -> None:
    """Raise MismatchError unless all ranks give this `path`: a call of one rank alone meets a later one of the others."""
    paths = control.all_gather_value(str(path), f"to begin {path}")
    if len(set(paths)) > 1:
        raise MismatchError(describe_different_calls([f"{function}({other_path!r})" for other_path in paths]))


# -- the model's state --------------------------------------------------------------------------------------------------


def rank_state_to_write(pipe: Pipeline) -> dict[str, Any]:
    """Return the part of the model's state that this rank writes: full tensors, tied ones under their first name.

    Ranks that have the same stage, along the mesh's axes `dp` and `tp`, share the work.
    """
    aliases, position = pipe._engine.parameters.aliases, pipe.position
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(pipe.state_dict().items()):
        full_value = gather_full_tensor(value)  # a collective of all ranks that have a shard
        if number % position.num_ranks_per_stage == position.stage_rank_index and name not in aliases:
            state[name] = full_value
    return state


def with_tied_names(state: Mapping[str, T], aliases: Mapping[str, str]) -> dict[str, T]:
    """Return `state` with each tied tensor under all its names, if `state` has at least one of them.

    `aliases`: further name -> first name.
    """
    completed = dict(state)
    for further_name, first_name in aliases.items():
        if further_name in state:
            completed.setdefault(first_name, state[further_name])
    return completed | {further: completed[first] for further, first in aliases.items() if first in completed}


def gather_state_mismatches(control: ControlGroup, pipe: Pipeline, shapes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return kind of mismatch with the model -> names, as `RankParameters.state_mismatches`, for all ranks together.

    `shapes`: name -> shape of a state; None for a value that is no tensor.
    """
    mismatches_of_ranks = control.all_gather_value(
        pipe._engine.parameters.state_mismatches(shapes), "to compare names and shapes"
    )
    return {
        kind: list(dict.fromkeys(name for mismatches in mismatches_of_ranks for name in mismatches[kind]))
        for kind in mismatches_of_ranks[0]
    }


@torch.no_grad()
def copy_into_model(pipe: Pipeline, named_values: Iterable[tuple[str, Any]]) -> None:
    """Copy values into this rank's part of the model, one at a time, so that no second copy of the model is in memory."""
    model_state, new_state = pipe.state_dict(strict=False), {}
    for name, value in named_values:
        current = model_state[name]
        new_state[name] = current.copy_(shard_like(value, current)) if isinstance(current, Tensor) else value

    # The values are in place already; this calls the load hooks of modules, and sets state that is no tensor.
    pipe.load_state_dict(new_state, strict=False)


# -- files --------------------------------------------------------------------------------------------------------------


@contextmanager
def temporary_files(
    control: ControlGroup,
    folder: Path,
    write: Callable[[], T],
    file_names: Callable[[T], Iterable[str]],
    rank_info: Any,
) -> Iterator[list[tuple[T, Any]]]:
    """Have every rank `write` into `folder`; delete the folder when the block ends.

    `file_names`: of the files that a rank has written, from what `write` returns.

    Yields a pair for each rank: what `write` returned there, and its `rank_info`.
    """
    is_first_rank = control.topology.rank == 0
    try:
        if is_first_rank:
            manifest.delete_path(folder)
            folder.mkdir(parents=True)
        control.all_gather_row((), f"to begin {folder}")

        written = write()
        everyone = control.all_gather_value((written, rank_info, [*file_names(written)]), f"to write {folder}")

        for rank, (_, _, names) in enumerate(everyone):
            if is_first_rank and (invisible := [folder / name for name in names if not (folder / name).exists()]):
                advice = "save where all ranks do" + "; memory is its machine's alone" * is_in_memory(folder)
                raise PenstockError(f"rank {rank} wrote {invisible[0]}, but rank 0 does not see it: {advice}")
        yield [(written, rank_info) for written, rank_info, _ in everyone]
    finally:
        if is_first_rank:
            shutil.rmtree(folder, ignore_errors=True)


def temporary_shards(
    control: ControlGroup,
    folder: Path,
    tensors: Mapping[str, Tensor],
    rank_info: Any,
    max_shard_size: float,
    with_checksums: bool = False,
) -> AbstractContextManager[list[tuple[dict[str, Any], Any]]]:
    """Have every rank write its `tensors` into safetensors files in `folder`; delete the folder when the block ends.

    `max_shard_size`: bytes of one file, if no single tensor is larger.

    Yields a pair for each rank: the entries of its files, as `tensor_files.write_shards` returns them, and its `rank_info`.
    """
    write = partial(tensor_files.write_shards, folder, control.topology.rank, tensors, max_shard_size, with_checksums)
    return temporary_files(control, folder, write, list, rank_info)


def open_newest_complete_checkpoint(control: ControlGroup, *folders: Path) -> tuple[Path, dict[str, Any], TensorFiles]:
    """Return path, manifest and tensors of the newest complete checkpoint in `folders`, the same on all ranks.

    A single folder may itself be a checkpoint. The ranks share the work of comparing checksums. A damaged checkpoint is skipped
    with a warning that says why. Raises MismatchError if none is complete.
    """
    rank, num_ranks = control.topology.rank, control.topology.world_size
    searched, is_checkpoint = ", ".join(map(str, folders)), _is_checkpoint(folders[0])
    candidates = _checkpoints_newest_first(folders) if rank == 0 else []

    problem_of_each = []
    for path in control.all_gather_value(candidates, f"to look into {searched}")[0]:
        content, files, problem = _open_and_verify(path, rank, num_ranks)
        problems = [text for _, text in sorted(filter(None, control.all_gather_value(problem, f"to check {path}")))]
        if not problems and files is not None:
            manifest.remember_as_verified(path)
            return path, content, files

        problem_of_each.append(problems[0])
        if rank == 0 and not is_checkpoint:
            warnings.warn(f"the checkpoint {path} is passed over: {problems[0]}", stacklevel=3)

    if not problem_of_each:
        raise MismatchError(f"there is no checkpoint in {searched}: give a folder that `save` wrote to")
    if is_checkpoint:
        raise MismatchError(problem_of_each[0])
    raise MismatchError(f"no checkpoint in {searched} is whole: {'; '.join(problem_of_each)}")


def _open_and_verify(
    path: Path, rank: int, num_ranks: int
) -> tuple[dict[str, Any], TensorFiles | None, tuple[bool, str] | None]:
    """Return a checkpoint's manifest, its tensors, and its damage: (whether this rank's checksums match, a sentence), or None.

    Among the damages of all ranks, sorted, those of checksums come first: other damages may follow from them.
    """
    content: dict[str, Any] = {}
    bytes_are_right = False
    try:
        content = manifest.read(path)
        manifest.verify_files(path, content["files"], rank, num_ranks)
        bytes_are_right = True

        files = TensorFiles(path)
        _check_tensors_present(path, content, files)
        check_random_states(path, content["random"], rank, files)
    except DamagedFileError as error:
        return content, None, (bytes_are_right, str(error))
    return content, files, None


def _is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint, not a folder of checkpoints."""
    return manifest.step_of_folder(folder) is not None or (folder / manifest.MANIFEST_FILE).is_file()


def _checkpoints_newest_first(folders: Sequence[Path]) -> list[Path]:
    """Return the checkpoints in `folders`, the newest first; at the same step, the one in the earlier folder first."""
    if len(folders) == 1:
        return [folders[0].resolve()] if _is_checkpoint(folders[0]) else manifest.all_checkpoints_newest_first(folders[0])
    for folder in folders:
        if _is_checkpoint(folder):
            raise MismatchError(f"{folder} is a checkpoint, not a folder of them: give it alone, to go on from no other")
    checkpoints = [path for folder in folders if folder.is_dir() for path in manifest.all_checkpoints_newest_first(folder)]
    return sorted(checkpoints, key=lambda path: -int(manifest.step_of_folder(path) or 0))


def _check_tensors_present(path: Path, content: Mapping[str, Any], files: TensorFiles) -> None:
    """Raise DamagedFileError unless every tensor that the manifest's `content` refers to is in `files`."""
    for name in schema.validate_and_list_tensors(content):
        if name not in files:
            raise DamagedFileError(f"{path} has no tensor {name!r}, which its {manifest.MANIFEST_FILE} names")
    for further_name, first_name in content["aliases"].items():
        if MODEL_PREFIX + first_name not in files and first_name not in content["model"]:
            raise DamagedFileError(f"{path} has no {first_name!r}, which {further_name!r} is by its {manifest.MANIFEST_FILE}")
