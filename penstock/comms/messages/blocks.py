"""Where messages lie in a line's memory: blocks whose sizes are powers of two, each used for any message that fits its size.

The memory is a mapping of more addresses than a machine has memory, made once; only what has been written takes any memory.
Free blocks keep what they took, so that the next message meets no page faults, but together never more than SPARE or twice
what is in flight: then it is given back.
"""

import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

HEADER = 64  # bytes before a block's data; the first says whether the block is in use
FREE, BUSY = 0, 1
PAGE = mmap.PAGESIZE  # the least size of a block, and what comes before the first
LEAST = PAGE.bit_length() - 1  # PAGE == 2**LEAST
SPARE = 2**24  # bytes
KEPT_FREE = 2  # times what is in flight
LINES = 16  # that may be needed where a process' addresses are limited


@dataclass(slots=True)
class Block:
    """A place for a message."""

    start: int
    written: int = 0  # bytes that have been written to since it has had no memory


class Blocks:
    """The blocks of a line, as its sender gives them out."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._end = memory, PAGE
        self._by_power: list[list[Block]] = [[] for _ in range(len(memory).bit_length())]

    def take(self, size: int) -> int:
        """Where a block for `size` bytes begins, in use from now on. Raises OSError if there are no addresses left."""
        needed = HEADER + size
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

    def _new(self, power: int) -> Block:
        """A new block of 2**power bytes; where there is no room for one, a larger one that is free."""
        if self._end + 2**power > len(self._memory):
            for block in chain(*self._by_power[power:]):
                if self._is_free(block.start):
                    return block
            raise OSError(errno.ENOMEM, f"no room in this line's {len(self._memory):,} bytes of addresses: raise `ulimit -v`")
        self._by_power[power].append(block := Block(self._end))
        self._end += 2**power
        return block

    def _give_back(self) -> None:
        """Have free blocks take no memory, if they take too much."""
        free = [block for block in self.all if block.written and self._is_free(block.start)]
        idle = sum(block.written for block in free)
        if idle > max(SPARE, KEPT_FREE * (self.written - idle)):
            for block in free:
                with suppress(OSError):  # some sandboxes know no such advice: then the block keeps its memory
                    self._memory.madvise(mmap.MADV_REMOVE, block.start, -(-block.written // PAGE) * PAGE)
                    block.written = 0

    @property
    def all(self) -> list[Block]:
        """All blocks there have been so far."""
        return list(chain(*self._by_power))

    @property
    def written(self) -> int:
        """Bytes that the blocks take."""
        return sum(block.written for block in self.all)


def addresses() -> int:
    """The bytes of a line's mapping: twice this machine's memory, or less where a process may not have that many addresses."""
    import resource  # there is none on Windows

    most = 2 * os.sysconf("SC_PHYS_PAGES") * PAGE
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return most if limit == resource.RLIM_INFINITY else min(most, limit // LINES // PAGE * PAGE)
