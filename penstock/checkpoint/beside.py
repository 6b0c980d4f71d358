"""What the ranks do together for a checkpoint: agree, fail as one, write at the same time, find the newest whole one."""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from torch import Tensor

from penstock.checkpoint import manifest, tensor_files
from penstock.comms.control import Control
from penstock.comms.topology import Topology
from penstock.errors import MismatchError, PenstockError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import full

_count = itertools.count()  # of pipelines with checkpoints in this process, the same on every rank


class Saving:
    """A checkpoint being written, in a thread if `background`."""

    def __init__(self, path: Path, work: Callable[[], None], background: bool) -> None:
        self.path = path  # the checkpoint's folder, once it is whole
        self._work, self._told = work, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"writing {path.name}")
        if background:
            self._thread.start()
        else:
            work()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder. Raises, on every rank, what went wrong."""
        if self._thread.ident is not None:
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        return self.path

    def finish(self) -> None:
        """As `wait`, but an error that has been raised once is not raised again."""
        told = self._told
        try:
            self.wait()
        except BaseException:
            if not told:
                raise


class _Beside:
    """What the checkpoints of one pipeline share: a control group of their own, and the save that may still go on."""

    def __init__(self, topology: Topology) -> None:
        self.control = Control(topology, f"penstock/checkpoint/{next(_count)}")
        self.saving: Saving | None = None


_beside: "WeakKeyDictionary[Pipeline, _Beside]" = WeakKeyDictionary()


def settled(pipe: Pipeline) -> _Beside:
    """What the checkpoints of `pipe` share, the save before having ended. Raises what went wrong with that."""
    if pipe not in _beside:
        _beside[pipe] = _Beside(pipe.position.world)
    beside = _beside[pipe]
    saving, beside.saving = beside.saving, None
    if saving is not None:
        saving.finish()
    return beside


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
def together(control: Control, what: str) -> Iterator[None]:
    """If this rank fails inside, so do all, with the same error, which says what could not be done."""
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


def written(
    control: Control, begin: Callable[[], Any], folder: Path, part: dict[str, Any], tensors: dict[str, Tensor]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rank 0 begins `folder`, each rank writes its tensors there; returns all ranks' parts, and their files' entries."""
    if control.topology.rank == 0:
        begin()
    control.gather_objects(None, f"to begin {folder}")
    names = tensor_files.write(folder, control.topology.rank, tensors)
    return control.gather_objects((part, {name: manifest.entry(folder / name) for name in names}), f"to write {folder}")


def seen(folder: Path, everyone: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """All files' entries. Raises PenstockError if one of them cannot be seen from here."""
    for rank, (_, files) in enumerate(everyone):
        for name in files:
            if not (folder / name).exists():
                raise PenstockError(f"rank {rank} wrote {folder / name}, but rank 0 does not see it: save where all ranks do")
    return {name: entry for _, files in everyone for name, entry in files.items()}


def newest_whole(control: Control, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint and its manifest, the same on all ranks."""
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
