"""Whether files are on a disk or in memory, as those in `/dev/shm` are, and what they need to outlast a failure there."""

import ctypes
import os
import sys
from pathlib import Path

IN_MEMORY = (0x01021994, 0x858458F6)  # what Linux's `statfs` calls tmpfs and ramfs
_LIBC = ctypes.CDLL(None, use_errno=True)


def in_memory(path: Path) -> bool:
    """Whether what is at `path` is gone when the machine is; only Linux tells, elsewhere all is on a disk."""
    if sys.platform != "linux":
        return False
    found = (ctypes.c_ulong * 64)()  # its first word is the kind of file system
    if _LIBC.statfs(os.fsencode(path), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return found[0] in IN_MEMORY


def sync(path: Path) -> None:
    """Have the disk know what is in a file, or which files are in a folder; in memory there is no disk to tell."""
    if in_memory(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
