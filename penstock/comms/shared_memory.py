"""Memory that processes of one machine see: a file without a name, which the others open through its maker's /proc entry.

The file is gone when the processes are, however those end. Each holds one descriptor of it, its mapping's.
"""

import mmap
import os
import struct

from penstock.comms.system import FULL

NAME = "penstock"
SECRET = struct.Struct("8q")  # how the memory begins, by which a process knows that it has opened the right file
CAN_SHARE = hasattr(os, "memfd_create")  # Linux


def make(size: int) -> tuple[mmap.mmap | None, int]:
    """Memory of `size` bytes that begins with a new secret, and the file to open it by; (None, -1) if the system refuses it."""
    if not CAN_SHARE:
        return None, -1
    file = -1
    try:
        file = os.memfd_create(NAME)
        os.fchmod(file, 0o600)  # other users do not come to /proc entries of this one's processes anyway
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would give memory to every address
    except OSError as error:
        if file >= 0:
            os.close(file)
        _raise_if_table_is_full(error)
        return None, -1
    memory[: SECRET.size] = os.urandom(SECRET.size)
    return memory, file


def open_of(process: int, file: int, secret: bytes) -> mmap.mmap | None:
    """The memory that `process` has made.

    None where it is a process of another machine (in containers many have the same number), or this one has no such way.
    """
    path = f"/proc/{process}/fd/{file}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return None
        own = os.open(path, os.O_RDWR)
        try:
            if os.fstat(own).st_uid != os.geteuid():  # whoever told of it is not one of our ranks
                return None
            memory = mmap.mmap(own, 0)  # as long as it is
            memory.madvise(mmap.MADV_DONTDUMP)
        finally:
            os.close(own)
    except (OSError, ValueError) as error:
        _raise_if_table_is_full(error)
        return None
    return memory if memory[: SECRET.size] == secret else None


def _raise_if_table_is_full(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in FULL:
        raise error
