"""Open, checksum and sync files on a disk, or in memory (`/dev/shm`).

Files on a disk are synced, so that they survive a crash of the machine, and get a SHA-256. Files in memory get a CRC-32, which
is faster. A file that is read may have been damaged or replaced: only regular files are opened, and each error is a sentence.
"""

import ctypes
import errno
import hashlib
import io
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import MismatchError

MEMORY_FILE_SYSTEM_TYPES = (0x01021994, 0x858458F6)  # what Linux's `statfs` calls tmpfs and ramfs
_LIBC = ctypes.CDLL(None, use_errno=True)


def is_in_memory(path: Path) -> bool:
    """Return whether `path` is on a file system in memory (tmpfs, ramfs); False on any system but Linux."""
    if sys.platform != "linux":
        return False
    statfs_buffer = (ctypes.c_ulong * 64)()  # its first word is the type of the file system
    if _LIBC.statfs(os.fsencode(path), statfs_buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return statfs_buffer[0] in MEMORY_FILE_SYSTEM_TYPES


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk; do nothing in memory."""
    if is_in_memory(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- checksums ------------------------------------------------------------------------------------------------------------


class Crc32:
    """A CRC-32 with the methods of `hashlib`'s digests."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: Any) -> None:
        """Add `data` (bytes)."""
        self._crc = zlib.crc32(data, self._crc)

    def hexdigest(self) -> str:
        """Return the checksum as eight hexadecimal digits."""
        return f"{self._crc:08x}"


CHECKSUM_CLASSES: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "crc32": Crc32}
CHECKSUM_TITLES = {"sha256": "SHA-256", "crc32": "CRC-32"}


def checksum_kind_for(folder: Path) -> str:
    """Return the kind of checksum for files in `folder`: `crc32` in memory, else `sha256`."""
    return "crc32" if is_in_memory(folder) else "sha256"


# -- reading --------------------------------------------------------------------------------------------------------------

_FILE_KINDS = {
    **{stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"},
    **{stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


class DamagedFileError(MismatchError):
    """A file of a checkpoint is not what was written."""


@contextmanager
def errors_as_damaged(path: Path, damage: str) -> Iterator[None]:
    """Raise errors of the block, which reads `path`, as DamagedFileError: it cannot be read, or `damage` (`is damaged: ..`)."""
    try:
        yield
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFileError(f"{path} {damage}") from error


@contextmanager
def open_regular_file(path: Path, follow: bool = False) -> Iterator[io.BufferedReader]:
    """Open the regular file `path` for reading; close it after the block.

    Raises OSError for anything else (a folder, a pipe, a device) without waiting for it, and for a link unless `follow`.
    """
    _check_is_regular_file(os.stat(path, follow_symlinks=follow), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _check_is_regular_file(os.fstat(file.fileno()), path)  # it may have been replaced since `stat`
        yield file


def memory_map(path: Path, follow: bool = False) -> mmap.mmap:
    """Return a read-only mapping of the regular file `path`, which holds a descriptor. Raises as `open_regular_file`."""
    with open_regular_file(path, follow) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check_is_regular_file(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
