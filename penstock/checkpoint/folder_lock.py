"""One writer to a folder: rank 0's process holds a `flock` on `.writer` there while a pipeline lives that has saved into it."""

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
ACQUIRE_TIMEOUT_SECONDS = 2.0  # seconds that a process which is just ending has for it
_LOCKS_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # of a file system
_lock_of_folder: "weakref.WeakValueDictionary[Path, FolderLock]" = weakref.WeakValueDictionary()  # this process's, by folder
_locks_of_owner: "weakref.WeakKeyDictionary[Any, dict[Path, FolderLock]]" = weakref.WeakKeyDictionary()  # the same by pipeline


def acquire(folder: Path, owner: Any) -> "FolderLock":
    """The lock of `folder`, this process's as long as `owner` lives.

    Raises PenstockError, naming the owner, if another process has the folder; OSError where nothing can be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    lock = _lock_of_folder.get(place)
    if lock is None or not _is_open_file_at(lock.path, lock.file):
        lock = _lock_of_folder[place] = FolderLock(place)
    _locks_of_owner.setdefault(owner, {})[place] = lock
    return lock


class FolderLock:
    """The right to write to a folder. Raises as `acquire`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.write_mutex = (
            folder / LOCK_FILE,
            threading.Lock(),
        )  # busy: while one of the process's savings writes there
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
        """Whether the file could be locked; it is open then, else `_holder` is what it says."""
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_file_at(self.path, self.file):  # whoever had it may have deleted it
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
    """Whether the open `file` is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _release_all_after_fork() -> None:
    """In a process that was forked of one with locks, which shares them: they end with the one that took them."""
    for lock in list(_lock_of_folder.values()):
        lock.close()
    _lock_of_folder.clear()
    _locks_of_owner.clear()


os.register_at_fork(after_in_child=_release_all_after_fork)
