"""Memory that processes of one machine share, and blocks in it, one for each message.

The memory is a file without a name, which the other process opens through its creator's /proc entry. The file is deleted when
the processes have ended, however they end. Each process has one descriptor of it, that of its mapping.

The size of a block is a power of two, and a block is used for any message that fits. The mapping is created once, with more
addresses than the machine has memory; only pages that have been written take memory. Free blocks keep their pages, so that the
next message causes no page faults. If they exceed both SPARE_BYTES and twice the bytes of busy blocks, their pages are returned
to the system.

    | page 0: secret | block of 4 KB | block of 64 KB | block of 4 KB | not used yet ..
                       header, message
"""

import errno
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from penstock.comms.system import DESCRIPTOR_TABLE_FULL

FILE_NAME = "penstock"
SECRET = struct.Struct("8q")  # at the start of the memory, by which a process checks that it has opened the right file
CAN_SHARE = hasattr(os, "memfd_create")  # Linux

HEADER_BYTES = 64  # before a block's message; the first byte is FREE or BUSY
FREE, BUSY = 0, 1
PAGE_BYTES = mmap.PAGESIZE  # the smallest block
MIN_BLOCK_POWER = PAGE_BYTES.bit_length() - 1  # PAGE_BYTES == 2**MIN_BLOCK_POWER
SPARE_BYTES = 2**24
MAX_FREE_TO_BUSY_RATIO = 2
MAPPINGS_WITHIN_LIMIT = 16  # mappings that must fit into the limit on a process's addresses (`ulimit -v`)


def create_shared_memory(num_bytes: int) -> tuple[mmap.mmap | None, int]:
    """Return new memory that begins with a new secret, and its file descriptor; (None, -1) if the system refuses it."""
    if not CAN_SHARE:
        return None, -1

    fd = -1
    try:
        fd = os.memfd_create(FILE_NAME)
        os.fchmod(fd, 0o600)  # other users cannot open /proc entries of this user's processes anyway
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would write every address
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        _reraise_if_descriptor_table_is_full(error)
        return None, -1

    memory[: SECRET.size] = os.urandom(SECRET.size)
    return memory, fd


def open_shared_memory(pid: int, fd: int, secret: bytes) -> mmap.mmap | None:
    """Return the memory of which process `pid` has the descriptor `fd`, if it begins with `secret`.

    None if that process is on another machine (a container may have the same pid), or if this system has no memory files.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{FILE_NAME}"):
            return None
        own_fd = os.open(path, os.O_RDWR)
        try:
            if os.fstat(own_fd).st_uid != os.geteuid():  # then the offer is not from a rank of this user
                return None
            memory = mmap.mmap(own_fd, 0)  # the whole file
            memory.madvise(mmap.MADV_DONTDUMP)
        finally:
            os.close(own_fd)
    except (OSError, ValueError) as error:
        _reraise_if_descriptor_table_is_full(error)
        return None
    return memory if memory[: SECRET.size] == secret else None


def _reraise_if_descriptor_table_is_full(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in DESCRIPTOR_TABLE_FULL:
        raise error


@dataclass(slots=True)
class SharedBlock:
    """A block of the shared memory, for one message at a time."""

    start: int
    written_bytes: int = 0  # bytes from its start that take memory: written since it was created, or last returned


class BlockAllocator:
    """The blocks of a transport's memory. The sender allocates them; the receiver marks them FREE."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._end = memory, PAGE_BYTES
        self._blocks_of_power: list[list[SharedBlock]] = [[] for _ in range(len(memory).bit_length())]

    def allocate(self, num_bytes: int) -> int:
        """Mark a block for a message of `num_bytes` as BUSY, and return its start. Raises OSError if no addresses are left."""
        needed = HEADER_BYTES + num_bytes
        power = (needed - 1).bit_length() if needed > PAGE_BYTES else MIN_BLOCK_POWER
        for block in self._blocks_of_power[power]:
            if self._is_free(block):
                break
        else:
            block = self._new_block(power)

        self._memory[block.start] = BUSY
        if block.written_bytes < needed:
            block.written_bytes = needed
            self._give_back_free_memory()
        return block.start

    def _is_free(self, block: SharedBlock) -> bool:
        return self._memory[block.start] == FREE

    def _new_block(self, power: int) -> SharedBlock:
        """Return a new block of 2**power bytes; if there is no room for one, a larger block that is free."""
        if self._end + 2**power > len(self._memory):
            for block in chain(*self._blocks_of_power[power:]):
                if self._is_free(block):
                    return block
            raise OSError(
                errno.ENOMEM, f"no room in this transport's {len(self._memory):,} bytes of addresses: raise `ulimit -v`"
            )

        self._blocks_of_power[power].append(block := SharedBlock(self._end))
        self._end += 2**power
        return block

    def _give_back_free_memory(self) -> None:
        """Return the memory of free blocks to the system if it exceeds the limit (see the module's text)."""
        free = [block for block in self.blocks if block.written_bytes and self._is_free(block)]
        free_bytes = sum(block.written_bytes for block in free)
        if free_bytes > max(SPARE_BYTES, MAX_FREE_TO_BUSY_RATIO * (self.written_bytes - free_bytes)):
            for block in free:
                with suppress(OSError):  # some sandboxes refuse it: then the block keeps its memory
                    self._memory.madvise(mmap.MADV_REMOVE, block.start, -(-block.written_bytes // PAGE_BYTES) * PAGE_BYTES)
                    block.written_bytes = 0

    @property
    def blocks(self) -> list[SharedBlock]:
        """All blocks, free or busy."""
        return list(chain(*self._blocks_of_power))

    @property
    def written_bytes(self) -> int:
        """The bytes of memory that all blocks take."""
        return sum(block.written_bytes for block in self.blocks)


def mapping_bytes_to_reserve() -> int:
    """Return the size of a mapping in bytes: twice this machine's memory, or less if a process's addresses are limited."""
    import resource  # Windows has none

    size = 2 * os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return size if limit == resource.RLIM_INFINITY else min(size, limit // MAPPINGS_WITHIN_LIMIT // PAGE_BYTES * PAGE_BYTES)
