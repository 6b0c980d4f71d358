"""A lock on a folder, so that one process writes to it: rank 0 holds a `flock` on `.writer` while the pipeline exists."""

import errno
import fcntl
import os
import socket
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

LOCK_FILE = ".writer"
ACQUIRE_TIMEOUT_SECONDS = 2.0  # in which a process that is ending releases the lock
_LOCKS_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # by the file system
_lock_of_folder: "weakref.WeakValueDictionary[Path, FolderLock]" = weakref.WeakValueDictionary()  # that this process holds
_locks_of_owner: "weakref.WeakKeyDictionary[Any, dict[Path, FolderLock]]" = weakref.WeakKeyDictionary()  # the same by pipeline


def acquire(folder: Path, owner: Any) -> "FolderLock":
    """Return the lock on `folder`, which this process holds as long as `owner` (a pipeline) exists.

    Raises PenstockError, which names the holder, if another process holds it; OSError if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    lock = _lock_of_folder.get(place)
    if lock is None or not _is_open_file_at(lock.path, lock.file):
        lock = _lock_of_folder[place] = FolderLock(place)
    _locks_of_owner.setdefault(owner, {})[place] = lock
    return lock


class FolderLock:
    """A lock on a folder against other processes. Raises as `acquire`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self.write_mutex = threading.Lock()  # held while a save of this process writes to the folder
        deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
        while not self._try_acquire():
            if time.monotonic() > deadline:
                why = "two runs in a folder delete each other's checkpoints: end that one, or save elsewhere"
                raise PenstockError(f"{folder} is written to by {self._holder_name or 'another process'}: {why}")
            time.sleep(0.02)
        self.close = weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _try_acquire(self) -> bool:
        """Open the file and lock it; return whether that succeeded. If not, close it, and set `_holder_name` to its text."""
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_file_at(self.path, self.file):  # else its last holder has deleted it
                return True
        except OSError as error:
            if error.errno in _LOCKS_UNSUPPORTED_ERRNOS:
                warning = f"{self.path.parent} is on a file system without locks: see that no other run saves there"
                warnings.warn(warning, stacklevel=5)
                return True
        text = os.pread(self.file, 100, 0).decode(errors="replace")
        self._holder_name = text if text.isprintable() else ""
        os.close(self.file)
        return False


def _is_open_file_at(path: Path, file: int) -> bool:
    """Return whether `path` is still the file that the descriptor `file` has open."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _release_all_after_fork() -> None:
    """Close all locks in a forked process, which shares them: they belong to the parent, and end with it."""
    for lock in list(_lock_of_folder.values()):
        lock.close()
    _lock_of_folder.clear()
    _locks_of_owner.clear()


os.register_at_fork(after_in_child=_release_all_after_fork)
