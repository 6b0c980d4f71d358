"""One writer to a folder: who saves there holds a lock that ends with its process, and says who it is.

`.writer` in the folder is locked by rank 0's process as long as a pipeline lives that has saved there; all pipelines of a
process are one run. Its text names the run, for whoever is refused. Where the file system has no locks, the text alone decides:
who came last has the folder.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.reading import opened
from penstock.errors import PenstockError

NAME = ".writer"
PATIENCE = 2.0  # seconds that a process which is just ending has for it
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # of a file system
_held: "weakref.WeakValueDictionary[Path, Lock]" = weakref.WeakValueDictionary()  # this process's
_of: "weakref.WeakKeyDictionary[Any, dict[Path, Lock]]" = weakref.WeakKeyDictionary()  # each pipeline's
_newest: dict[Path, Any] = {}  # folder -> the newest checkpoint there when this process last wrote or resumed


def take(folder: Path, owner: Any) -> "Lock":
    """The lock of `folder`, this process's as long as `owner` lives.

    Raises PenstockError, naming who has the folder, if that is another run; OSError where nothing can be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    lock = _held.get(place)
    if lock is None or not lock.is_ours():
        lock = _held[place] = Lock(place, lock)
    _of.setdefault(owner, {})[place] = lock
    return lock


class Lock:
    """The right to write to a folder. Raises as `take`; `before`: the lock that this process has had and lost."""

    def __init__(self, folder: Path, before: "Lock | None" = None) -> None:
        self.path, self.busy = folder / NAME, threading.Lock()  # busy: while one of the run's savings writes
        self.run: str = before.run if before else uuid.uuid4().hex[:8]
        deadline = time.monotonic() + PATIENCE
        while (locked := self._locked()) is None:
            if time.monotonic() > deadline:
                raise PenstockError(f"{folder} is written to by {self._holder()}: {_WHY}")
            time.sleep(0.02)
        self._file, has_locks = locked
        self.close = weakref.finalize(self, os.close, self._file)
        if before and not has_locks:
            self.check()
        me = {"run": self.run, "host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%F %T %z")}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(me).encode(), 0)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """While one of the run's savings writes; a warning tells of a newest checkpoint in the folder that is another run's."""
        with self.busy:
            _tell_of_strangers(self.path.parent, step)
            yield
            know(self.path.parent)

    def check(self) -> None:
        """Raises PenstockError if another run has taken the folder meanwhile."""
        if not self.is_ours():
            raise PenstockError(f"{self.path.parent} was run {self.run}'s, and has been taken by {self._holder()}: {_WHY}")

    def is_ours(self) -> bool:
        """Whether the file is still there and tells of this run."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file)) and self._text().get("run") == self.run

    def _locked(self) -> tuple[int, bool] | None:
        """The file, open and locked, and whether the file system has locks; None if somebody else has it."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(self.path)):  # whoever had it may have deleted it
                return file, True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                told = f"{self.path.parent} is on a file system without locks: see that no other run saves there"
                warnings.warn(told, stacklevel=5)
                return file, False
        os.close(file)
        return None

    def _text(self) -> dict[str, Any]:
        with suppress(OSError, ValueError), opened(self.path) as file:
            text = json.loads(file.read(1000))
            return text if isinstance(text, dict) else {}
        return {}

    def _holder(self) -> str:
        told = self._text()
        if not told:
            return "another process"
        return f"process {told.get('process')} on {told.get('host')} (run {told.get('run')}, since {told.get('since')})"


_WHY = "two runs in a folder delete each other's checkpoints: end that one, or save elsewhere"


def _let_go() -> None:
    """In a process that was forked of one with locks, which shares them: they end with the one that took them."""
    for lock in list(_held.values()):
        lock.close()
    _held.clear()
    _of.clear()


os.register_at_fork(after_in_child=_let_go)


# -- the newest checkpoint ----------------------------------------------------------------------------------------------


def know(folder: Path) -> None:
    """Remember the newest checkpoint in `folder` as one that this run has written or looked at."""
    _newest[folder.resolve()] = _identity(folder)


def _tell_of_strangers(folder: Path, step: int) -> None:
    """Before `step` is saved: warn if the newest checkpoint in `folder` is one that this run does not know."""
    newest = _identity(folder)
    if newest is not None and newest != _newest.get(folder.resolve()):
        name, *_ = newest
        taken = f"; `resume` will take that one and not step {step}" if name > manifest.folder_of(step) else ""
        told = f"{folder / name} is of another run, which this one has not resumed from{taken}: save elsewhere, or delete it"
        warnings.warn(told, stacklevel=6)


def _identity(folder: Path) -> tuple[str, int, int] | None:
    """Of the newest checkpoint: its name, and what another of that name does not have."""
    for path in manifest.newest_first(folder):
        there = path.lstat()
        return path.name, there.st_ino, there.st_mtime_ns
    return None
