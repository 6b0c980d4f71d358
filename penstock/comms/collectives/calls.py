"""What each rank of a group was called with: as words, as one number, and in memory that all of them see."""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.comms.point_to_point import DTYPES

COLLECTIVES = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")

SUMS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
NAP, LONGEST_NAP = 10e-6, 1e-3  # seconds between looks at the table: longer from look to look
SECRET = 64  # bytes by which a rank knows that it has opened the right memory
ROWS = 2  # nobody begins a call before all have come to the one before, so no rank is more than one call ahead
HASH_BITS, COUNT_BITS = 40, 24  # of a table's word
CLOSED = 0  # the word that says that a rank has given up


class Call(NamedTuple):
    """What one rank was called with; the same on all ranks, or nothing is done."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    root: int | None  # by its number in the group
    op: str | None
    header: tuple[int, ...]  # all of it as numbers
    number: int  # that stands for all of it

    def __str__(self) -> str:
        tensor = f"{self.operation} of a {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} tensor"
        op = "" if self.op is None else f", op {self.op}"
        return tensor + op + ("" if self.root is None else f", root {self.root}")


@lru_cache(4096)
def call_of(operation: str, shape: tuple[int, ...], dtype: torch.dtype, root: int | None, op: str | None) -> Call:
    """The call; kept, because a program makes the same ones again and again."""
    header = COLLECTIVES.index(operation), DTYPES.index(dtype), -1 if root is None else root, (None, *SUMS).index(op), *shape
    number = hash(header) % 2**HASH_BITS  # of whole numbers only: the same in all processes
    return Call(operation, shape, dtype, root, op, header, number)


def call_from(header: Sequence[int]) -> Call:
    """The call that has this header."""
    operation, dtype, root, op, *shape = header
    return call_of(COLLECTIVES[operation], tuple(shape), DTYPES[dtype], None if root < 0 else root, (None, *SUMS)[op])


class Table:
    """The memory that all ranks of a group see: what each was called with in this call and the one before, as one number."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._words = memoryview(memory)[SECRET:].cast("Q")
        self._rank, self._size = rank, size
        self._fence = threading.Lock()
        self.count = 0  # of calls

    @staticmethod
    def bytes(size: int) -> int:
        """What a table for `size` ranks takes."""
        return SECRET + 8 * (1 + ROWS * size)

    def close(self) -> int:
        """Tell the others that this rank gives up; the number of the call in which the first one did."""
        self._words[CLOSED] = self._words[CLOSED] or self.count
        return self._words[CLOSED]

    def arrive(self, number: int, timeout: float) -> bool:
        """Write the number of this rank's call; whether those of the ranks that came before are the same.

        First it makes sure that all ranks came to the call before, in which this one may have been done early.
        """
        if self.count and not self._all_came(timeout):
            self.count += 1
            return False
        self.count += 1
        self._tag = self.count % 2**COUNT_BITS
        self._mine = self._tag << HASH_BITS | number
        self._row = 1 + self.count % ROWS * self._size
        self._words[self._row + self._rank] = self._mine  # eight bytes at once
        with self._fence:  # the write is finished before the reading begins
            return self._agree(self._read())

    def _all_came(self, timeout: float) -> bool:
        """Wait until all ranks have come to this call; whether all of them have the same number."""
        looks, deadline = 0, 0.0
        while (words := self._read()).count(self._mine) < self._size:
            looks += 1
            deadline = deadline or time.monotonic() + timeout
            if not self._agree(words) or time.monotonic() > deadline:
                return False
            time.sleep(min(looks * NAP, LONGEST_NAP))
        return True

    def _read(self) -> list[int]:
        return self._words[self._row : self._row + self._size].tolist()

    def _agree(self, words: list[int]) -> bool:
        """Whether nobody has given up, and all that have come to this call have the same number."""
        if words.count(self._mine) < self._size:  # else no need to look closer
            for word in words:
                if word != self._mine and word >> HASH_BITS == self._tag:
                    return False
        return self._words[CLOSED] == 0


def shared_table(gloo: Any, rank: int, size: int) -> Table | None:
    """The table of a new group, if all its ranks can see the memory that the first one makes."""
    where, secret, memory = torch.full((2,), -1), os.urandom(SECRET), None
    if rank == 0 and hasattr(os, "memfd_create"):
        file = os.memfd_create("penstock-table")
        os.ftruncate(file, Table.bytes(size))
        memory = mmap.mmap(file, Table.bytes(size))
        memory[:SECRET] = secret
        where = torch.tensor([os.getpid(), file])
    token = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    gloo.broadcast(where, 0).wait()
    gloo.broadcast(token, 0).wait()
    if rank:
        process, file = where.tolist()
        memory = _opened(process, file, bytes(token.tolist()), size)
    seen = torch.tensor([float(memory is not None)])
    gloo.allreduce(seen, dist.ReduceOp.MIN).wait()
    if rank == 0 and memory is not None:
        os.close(file)
    return Table(memory, rank, size) if memory is not None and seen else None


def _opened(process: int, file: int, secret: bytes, size: int) -> mmap.mmap | None:
    """None where another machine happens to have a process of that number, or this one has no such way."""
    path = f"/proc/{process}/fd/{file}"
    with suppress(OSError, ValueError):
        if os.readlink(path).startswith("/memfd:penstock-table"):
            number = os.open(path, os.O_RDWR)
            try:
                memory = mmap.mmap(number, Table.bytes(size))
            finally:
                os.close(number)
            if memory[:SECRET] == secret:
                return memory
    return None
