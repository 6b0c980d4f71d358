"""Checkpoints in memory that outlives the ranks: what a rank that is lost costs is at most one step, and no disk is read.

Each rank writes its part into a drawer (`comms/starting/drawers.py`); with several machines the part also goes to a rank of
the next machine. Two checkpoints are kept in turn: the older is written over when every rank has written the newer.
"""

import os
import socket
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.parts import Mark, Part, newest_of, parts_in, read, receive, send, write
from penstock.checkpoint.saving import check_steps, collected, merged
from penstock.checkpoint.together import as_one, control_for, failing_as_one
from penstock.comms.breaking import broken_off
from penstock.comms.control import Control, Pending
from penstock.comms.starting import drawers
from penstock.comms.starting.drawers import Drawers
from penstock.comms.system import from_torchrun, say
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline

WHAT = "keep a checkpoint in memory"


def remember(
    folder: str | Path, pipe: Pipeline, optimizer: Any = None, scheduler: Any = None, extra: Mapping[str, Any] | None = None
) -> bool:
    """Keep in memory what `save` would write into `folder`, for ranks that are started again: `resume(folder, ..)` takes it.

    All ranks call it after the same step, after every one or as often as it is worth; arguments are as for `save`. It returns
    when this rank's part is written. It takes memory for two checkpoints, that of the process which starts the ranks again,
    and with several machines as much again for a copy of another machine's.

    Does nothing where nobody starts the ranks again, and returns False: without `launch(.., restarts=..)` or torchrun's
    `--max-restarts`. What ends these, or all machines, leaves the disk: go on to `save` too, more rarely.

    Raises, on every rank: as `save`, and PenstockError if the memory is full.

        for batch, target in batches:
            pipe.step(batch, target=target), optimizer.step(), optimizer.zero_grad()
            checkpoint.remember("runs/a", pipe, optimizer)
            if pipe.step_count % 1000 == 0:
                checkpoint.save("runs/a", pipe, optimizer, wait=False)
    """
    if not drawers.wanted():
        return False
    place = os.path.abspath(folder)
    if pipe not in _memories:
        _memories[pipe] = _opened(control_for(pipe, "memory"), place)
    memory = _memories[pipe]
    if memory is None:
        return False
    with failing_as_one(memory.control, WHAT), broken_off(pipe.position.beside):
        _check_folder(place)
        mine = collected(pipe, optimizer, scheduler, extra)
        steps = memory.control.gather([pipe.step_count], f"to {WHAT}")
        check_steps([int(step) for (step,) in steps])
        mark, turn = memory.write(*mine)
        memory.control.gather([turn], f"to {WHAT}")  # on all ranks: from now on it counts
        memory.mark, memory.turn = mark, turn
    return True


_memories: "WeakKeyDictionary[Pipeline, _Memory | None]" = WeakKeyDictionary()  # None: there is none on some machine


class _Memory:
    """This rank's drawers."""

    def __init__(self, control: Control, there: Drawers, mark: Mark, turn: int, machines: Sequence[Sequence[int]]) -> None:
        self.control, self.there, self.mark, self.turn = control, there, mark, turn
        self.own, rank = from_torchrun("LOCAL_RANK"), control.topology.rank
        pairs = list(_copies(machines))
        self.to = [taker for giver, taker in pairs if giver == rank]
        self.of = [giver for giver, taker in pairs if taker == rank]

    def write(self, part: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Mark, int]:
        """Write this rank's part into the drawer whose turn it is, and copies of others'. Returns its mark, and the turn."""
        mark, turn = self.mark._replace(number=self.mark.number + 1, step=part["step"]), 1 - self.turn
        place = self._place(turn)
        write(place, mark, part, tensors)
        sending = [each for peer in self.to for each in send(self.control, place, peer, f"to {WHAT}")]
        for peer in self.of:
            with self._place(2 + turn).open("r+b") as file:
                receive(self.control, file.fileno(), peer, f"to {WHAT}")
        for each in sending:
            each.wait()
        return mark, turn

    def _place(self, which: int) -> Path:
        return self.there.path(which * self.there.width + self.own)


def _opened(control: Control, folder: str) -> _Memory | None:
    """This rank's drawers, for checkpoints of `folder`; None if some rank has none. All ranks call it."""
    with as_one(control, WHAT):
        _check_folder(folder)
        there, rank = drawers.find(start=True), control.topology.rank
        everyone = control.gather_objects((parts_in(there), there and there.name, uuid4().hex), f"to {WHAT}")
    if there is None or not all(name for _, name, _ in everyone):
        if rank == 0:
            warnings.warn(
                "a machine has no memory that outlives its ranks: checkpoints are kept on the disk only", stacklevel=3
            )
        return None
    parts = [part for told, _, _ in everyone for part in told]
    last = max((part.mark.number for part in parts), default=0)
    whole = newest_of(parts, folder)
    mark = Mark(folder, everyone[0][2], last, 0, rank, control.topology.world_size)
    return _Memory(control, there, mark, whole[0].turn if whole else 1, _by_machine([name for _, name, _ in everyone]))


def _check_folder(folder: str) -> None:
    """Raises MismatchError where a pipeline that is still there has another; that may be so on some ranks only."""
    if any(each is not None and each.mark.folder != folder for each in _memories.values()):
        raise MismatchError(f"memory keeps the checkpoints of one folder, and a pipeline here has another than {folder}")


def _by_machine(names: Sequence[str]) -> list[list[int]]:
    """The ranks of each machine; `names`: of each rank's."""
    return [[rank for rank, each in enumerate(names) if each == name] for name in dict.fromkeys(names)]


def _copies(machines: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Who gives a copy of its part to whom: to a rank of the next machine, the ranks of each in order."""
    for number, givers in enumerate(machines if len(machines) > 1 else ()):
        yield from zip(givers, machines[(number + 1) % len(machines)], strict=False)


# -- finding --------------------------------------------------------------------------------------------------------------


def is_kept(folder: Path) -> bool:
    """Whether memory has a whole checkpoint of `folder`; not asked with several machines: each would answer for itself."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return False
    return drawers.wanted() and newest_of(parts_in(drawers.find()), os.path.abspath(folder)) is not None


def newest(control: Control, folder: Path) -> tuple[Path, dict[str, Any], TensorFiles] | None:
    """The newest whole checkpoint of `folder` in memory, as `newest_whole`; None if the disk has a newer one.

    What this machine does not have comes from others. All ranks call it.
    """
    there = drawers.find() if drawers.wanted() else None
    disk = [manifest.step_of(path) or 0 for path in manifest.newest_first(folder)] if folder.is_dir() else []
    mine = parts_in(there), there.name if there else socket.gethostname(), max(disk, default=-1)
    everyone = control.gather_objects(mine, f"to look into {folder}")
    parts = [part for told, _, _ in everyone for part in told]
    found = newest_of(parts, os.path.abspath(folder))
    if found is None or found[0].mark.step < everyone[0][2]:
        return None
    files = _brought(control, found, parts, [name for _, name, _ in everyone])
    told = f"step {found[0].mark.step} of {folder}, which was kept in memory"
    if control.topology.rank == 0:
        say(f"the ranks go on from {told} (on the disk: {f'step {max(disk)}' if disk else 'none'})")
    content = merged([read(path)[1] for path in files.paths])
    return Path(told), content, files


# -- between machines -----------------------------------------------------------------------------------------------------


def _brought(control: Control, found: Sequence[Part], parts: Sequence[Part], names: Sequence[str]) -> TensorFiles:
    """All of the checkpoint `found`, where this rank can open it; `parts`: all there are; `names`: of each rank's machine."""
    rank, what = control.topology.rank, "to bring a checkpoint from another machine's memory"
    mine, sending, received = dict[int, str](), list[Pending](), list[int]()
    for number, wanted in enumerate(found):
        homes = {part.machine: part.place for part in parts if part.mark == wanted.mark}
        giver = min(rank for rank, name in enumerate(names) if name in homes)
        for taker in [ranks[0] for ranks in _by_machine(names) if names[ranks[0]] not in homes]:
            if rank == giver:
                sending += send(control, Path(homes[names[rank]]), taker, what)
            elif rank == taker:
                file = os.memfd_create("penstock")
                os.fchmod(file, 0o600)
                receive(control, file, giver, what)
                mine[number] = f"/proc/{os.getpid()}/fd/{file}"
                received.append(file)
        if names[rank] in homes:
            mine[number] = homes[names[rank]]
    for each in sending:
        each.wait()
    everyone = control.gather_objects(mine, "to look into memory")
    here = {
        number: place
        for name, told in zip(names, everyone, strict=True)
        if name == names[rank]
        for number, place in told.items()
    }
    files = TensorFiles(*(Path(here[number]) for number in range(len(found))))
    for file in received:
        weakref.finalize(files, os.close, file)
    return files
