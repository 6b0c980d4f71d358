"""Files on a disk, or in memory as those in `/dev/shm` are.

What is written to a disk outlasts a failure, and has a checksum: SHA-256, in memory the quick CRC-32. What is read may be
anything: only regular files are opened, and errors are sentences.
"""

import ctypes
import errno
import hashlib
import io
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
    """Return whether `path` is on a file system in memory, which ends with the machine. Only Linux shows that: else False."""
    if sys.platform != "linux":
        return False
    statfs_buffer = (ctypes.c_ulong * 64)()  # its first word is the kind of file system
    if _LIBC.statfs(os.fsencode(path), statfs_buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return statfs_buffer[0] in MEMORY_FILE_SYSTEM_TYPES


def fsync(path: Path) -> None:
    """Have the disk know what is in a file, or which files are in a folder; in memory there is no disk to tell."""
    if is_in_memory(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- checksums ------------------------------------------------------------------------------------------------------------


class Crc32:
    """A CRC-32 that is made as `hashlib` makes digests."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: Any) -> None:
        """Add bytes."""
        self._crc = zlib.crc32(data, self._crc)

    def hexdigest(self) -> str:
        """Eight digits."""
        return f"{self._crc:08x}"


CHECKSUM_CLASSES: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "crc32": Crc32}
CHECKSUM_TITLES = {"sha256": "SHA-256", "crc32": "CRC-32"}


def checksum_kind_for(folder: Path) -> str:
    """Which of them files in `folder` get."""
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
    """While `path` is read: raise what goes wrong as DamagedFileError: it cannot be read, or is `damage`."""
    try:
        yield
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFileError(f"{path} {damage}") from error


@contextmanager
def open_regular_file(path: Path, follow: bool = False) -> Iterator[io.BufferedReader]:
    """The regular file `path`, to be read.

    Raises OSError for anything else, which is not opened, or not waited for: a link too, unless `follow`.
    """
    _check_is_regular_file(os.stat(path, follow_symlinks=follow), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _check_is_regular_file(os.fstat(file.fileno()), path)  # it may have been exchanged
        yield file


def _check_is_regular_file(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
