"""What the ranks do together for a checkpoint: fail as one, write at the same time, find the newest whole one."""

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from torch import Tensor

from penstock.checkpoint import manifest, tensor_files
from penstock.comms.control import Control
from penstock.errors import MismatchError, PenstockError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import full

_count = itertools.count()  # of pipelines with checkpoints in this process, the same on every rank
_controls: WeakKeyDictionary[Pipeline, Control] = WeakKeyDictionary()  # their checkpoints' own
savings: "WeakKeyDictionary[Pipeline, Saving]" = WeakKeyDictionary()  # which may still go on

Told = list[tuple[dict[str, Any], dict[str, Any]]]  # by rank: its part, and file -> the manifest's entry


class Saving:
    """A checkpoint that `save` has begun.

    `path`: its folder, which is there once it is whole. `written`: when that is, if it is not already.
    """

    def __init__(self, path: Path, written: Future[None] | None = None) -> None:
        self.path = path
        self._written, self._waited = written, False

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Raises, on every rank, what went wrong."""
        self._waited = True
        if self._written is not None:
            self._written.result()
        return self.path

    def settle(self) -> None:
        """As `wait`, but what that has raised already is not raised again."""
        if not self._waited:
            self.wait()


def settled(pipe: Pipeline) -> Control:
    """The control group of the checkpoints of `pipe`, the save before having ended. Raises what went wrong with that."""
    saving = savings.pop(pipe, None)
    if saving is not None:
        saving.settle()
    if pipe not in _controls:
        _controls[pipe] = Control(pipe.position.world, f"penstock/checkpoint/{next(_count)}")
    return _controls[pipe]


def own_state(pipe: Pipeline) -> dict[str, Any]:
    """What of the model this rank writes: tensors whole, tied ones under their first name, by the rank that has that.

    Ranks that have the same stage, along the mesh's axes `dp` and `tp`, share the work.
    """
    aliases, position = pipe.aliases, pipe.position
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(pipe.state_dict().items()):
        whole = full(value)  # all who have a piece of it ask for it
        if number % position.copies == position.copy and name not in aliases:
            state[name] = whole
    return state


@contextmanager
def as_one(control: Control, what: str) -> Iterator[None]:
    """If this rank fails inside, so do all, with the same error, which says `what` could not be done."""
    control.connect()
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) and error.filename else str(error)
        told = PenstockError(f"rank {control.topology.rank} could not {what}: {why}")
        told.__cause__ = error
        control.fail(told)
    except BaseException as error:
        control.fail(error)


def write(
    control: Control,
    folder: Path,
    part: dict[str, Any],
    tensors: dict[str, Tensor],
    put_in_place: Callable[[Told], None],
) -> None:
    """All ranks write their `tensors` into `folder`, of which rank 0 then makes what it is to be; it is gone afterwards.

    `put_in_place` does that: it gets the `part` of every rank, and the manifest's entries of the files it has written.
    """
    first = control.topology.rank == 0
    try:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        control.gather_objects(None, f"to begin {folder}")
        names = tensor_files.write(folder, control.topology.rank, tensors)
        mine = part, {name: manifest.entry(folder / name) for name in names}
        everyone = control.gather_objects(mine, f"to write {folder}")
        if first:
            put_in_place(everyone)
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
    control.gather_objects(None, f"to put {folder} in place")


def seen(folder: Path, everyone: Told) -> dict[str, Any]:
    """The entries of all files. Raises PenstockError if one of them cannot be seen from here."""
    for rank, (_, files) in enumerate(everyone):
        for name in files:
            if not (folder / name).exists():
                raise PenstockError(f"rank {rank} wrote {folder / name}, but rank 0 does not see it: save where all ranks do")
    return {name: entry for _, files in everyone for name, entry in files.items()}


def newest_whole(control: Control, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint in `folder`, or `folder` itself, and its manifest, the same on all ranks.

    Raises MismatchError if there is none. Of each that is passed over, a warning says why.
    """
    rank, ranks = control.topology.rank, control.topology.world_size
    one = manifest.step_of(folder) is not None or (folder / manifest.NAME).is_file()
    found = ([folder] if one else manifest.newest_first(folder)) if rank == 0 else []
    damage = []
    for path in control.gather_objects(found, f"to look into {folder}")[0]:
        told, content = None, {}
        try:
            content = manifest.read(path)
            manifest.check(path, content["files"], rank, ranks)
        except manifest.Damaged as error:
            told = str(error)
        problems = [each for each in control.gather_objects(told, f"to check {path}") if each]
        if not problems:
            manifest.known_whole(path)
            return path, content
        damage.append(problems[0])
        if not one and rank == 0:
            warnings.warn(f"the checkpoint {path} is passed over: {problems[0]}", stacklevel=3)
    if not damage:
        raise MismatchError(f"there is no checkpoint in {folder}: give a folder that `save` wrote to")
    raise MismatchError(damage[0] if one else f"no checkpoint in {folder} is whole: {'; '.join(damage)}")
