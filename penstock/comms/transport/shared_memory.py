"""Memory that processes of one machine see, and where messages lie in it.

It is a file without a name, which the others open through its maker's /proc entry. The file is gone when the processes are,
however those end. Each holds one descriptor of it, its mapping's.

Messages lie in blocks whose sizes are powers of two, each used for any message that fits its size. The memory is a mapping of
more addresses than a machine has memory, made once; only what has been written takes any memory. Free blocks keep what they
took, so that the next message meets no page faults, but together never more than SPARE or twice what is in flight: then it is
given back.
"""

import errno
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from penstock.comms.system import DESCRIPTOR_TABLE_FULL

NAME = "penstock"
SECRET = struct.Struct("8q")  # how the memory begins, by which a process knows that it has opened the right file
CAN_SHARE = hasattr(os, "memfd_create")  # Linux


def create_shared_memory(size: int) -> tuple[mmap.mmap | None, int]:
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


def open_shared_memory(process: int, file: int, secret: bytes) -> mmap.mmap | None:
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
    if isinstance(error, OSError) and error.errno in DESCRIPTOR_TABLE_FULL:
        raise error


HEADER_BYTES = 64  # bytes before a block's data; the first says whether the block is in use
FREE, BUSY = 0, 1
PAGE = mmap.PAGESIZE  # the least size of a block, and what comes before the first
LEAST = PAGE.bit_length() - 1  # PAGE == 2**LEAST
SPARE_BYTES = 2**24  # bytes
KEPT_FREE = 2  # times what is in flight
LINES = 16  # that may be needed where a process' addresses are limited


@dataclass(slots=True)
class SharedBlock:
    """A place for a message."""

    start: int
    written: int = 0  # bytes that have been written to since it has had no memory


class BlockAllocator:
    """The blocks of a line, as its sender gives them out."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._end = memory, PAGE
        self._by_power: list[list[SharedBlock]] = [[] for _ in range(len(memory).bit_length())]

    def take(self, size: int) -> int:
        """Where a block for `size` bytes begins, in use from now on. Raises OSError if there are no addresses left."""
        needed = HEADER_BYTES + size
        power = (needed - 1).bit_length() if needed > PAGE else LEAST
        for block in self._by_power[power]:
            if self._is_free(block.start):
                break
        else:
            block = self._new(power)
        self._memory[block.start] = BUSY
        if block.written < needed:
            block.written = needed
            self._give_back()
        return block.start

    def _is_free(self, start: int) -> bool:
        """Whether nobody needs what lies in the block at `start`."""
        return self._memory[start] == FREE

    def _new(self, power: int) -> SharedBlock:
        """A new block of 2**power bytes; where there is no room for one, a larger one that is free."""
        if self._end + 2**power > len(self._memory):
            for block in chain(*self._by_power[power:]):
                if self._is_free(block.start):
                    return block
            raise OSError(errno.ENOMEM, f"no room in this line's {len(self._memory):,} bytes of addresses: raise `ulimit -v`")
        self._by_power[power].append(block := SharedBlock(self._end))
        self._end += 2**power
        return block

    def _give_back(self) -> None:
        """Have free blocks take no memory, if they take too much."""
        free = [block for block in self.all if block.written and self._is_free(block.start)]
        idle = sum(block.written for block in free)
        if idle > max(SPARE_BYTES, KEPT_FREE * (self.written - idle)):
            for block in free:
                with suppress(OSError):  # some sandboxes know no such advice: then the block keeps its memory
                    self._memory.madvise(mmap.MADV_REMOVE, block.start, -(-block.written // PAGE) * PAGE)
                    block.written = 0

    @property
    def all(self) -> list[SharedBlock]:
        """All blocks there have been so far."""
        return list(chain(*self._by_power))

    @property
    def written(self) -> int:
        """Bytes that the blocks take."""
        return sum(block.written for block in self.all)


def mapping_bytes() -> int:
    """The bytes of a line's mapping: twice this machine's memory, or less where a process may not have that many addresses."""
    import resource  # there is none on Windows

    most = 2 * os.sysconf("SC_PHYS_PAGES") * PAGE
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return most if limit == resource.RLIM_INFINITY else min(most, limit // LINES // PAGE * PAGE)
