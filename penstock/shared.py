"""Large messages between two processes of one machine: copied once, into memory that both see.

The sender copies a message into a block and sends its number through the channel, in the message's place; the receiver's
tensor *is* the block. When the tensor's memory is let go, in the backward of a microbatch, the receiver marks the block
free, and the sender uses it again. Through a socket the same bytes are copied twice, by the kernel, in small pieces.

Blocks are files without a name (memfd), opened by the receiver through the sender's /proc entry: they are gone when the
processes are, however those end.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

HEADER = 64  # bytes before the data; the first says whether the block is in use
FREE, BUSY = 0, 1
PROBE = 4096
FAILED = -1


class Lender:
    """The sender's blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[int, mmap.mmap, Tensor]]] = {}  # bytes of data -> blocks of that size

    def lend(self, data: Tensor) -> Tensor:
        """Copy `data`, flat, into a free block; returns the ticket, to be sent."""
        source = data.view(torch.uint8)
        number, memory, block = self._free(source.numel())
        memory[0] = BUSY
        block.copy_(source)
        return torch.tensor([number])

    def _free(self, size: int) -> tuple[int, mmap.mmap, Tensor]:
        blocks = self._blocks.setdefault(size, [])
        for block in blocks:
            if block[1][0] == FREE:
                return block
        number = os.memfd_create("penstock")
        os.ftruncate(number, HEADER + size)
        memory = mmap.mmap(number, HEADER + size)
        blocks.append((number, memory, torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER)))
        return blocks[-1]

    def __del__(self) -> None:
        for blocks in self._blocks.values():
            for number, _, _ in blocks:
                os.close(number)


class Borrower:
    """The receiver's view of the blocks of process `lender`."""

    def __init__(self, lender: int) -> None:
        self._lender = lender
        self._memory: dict[int, mmap.mmap] = {}

    def borrow(self, ticket: Tensor, size: int) -> Tensor:
        """The block on `ticket` as `size` bytes; free again once the tensor's memory is let go. Raises OSError if gone."""
        number = int(ticket)
        memory = self._memory.get(number)
        if memory is None:
            with open(f"/proc/{self._lender}/fd/{number}", "r+b") as file:
                memory = self._memory[number] = mmap.mmap(file.fileno(), HEADER + size)
        view = (ctypes.c_ubyte * size).from_buffer(memory, HEADER)
        weakref.finalize(view, memory.__setitem__, 0, FREE).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


def offer(group: Any, peer: int) -> Lender | None:
    """The sender's end of a new channel: its blocks, if the receiver can open them."""
    lender, secret = Lender(), torch.frombuffer(bytearray(os.urandom(PROBE)), dtype=torch.uint8)
    number = int(lender.lend(secret)) if hasattr(os, "memfd_create") else FAILED
    group.send([torch.tensor([os.getpid(), number])], peer, 0).wait()
    group.send([secret], peer, 0).wait()
    accepted = torch.zeros(1)
    group.recv([accepted], peer, 0).wait()
    return lender if accepted else None


def accept(group: Any, peer: int) -> Borrower | None:
    """The receiver's end: the sender's blocks, if they can be opened and hold what the sender says."""
    told, secret = torch.zeros(2, dtype=torch.int64), torch.zeros(PROBE, dtype=torch.uint8)
    group.recv([told], peer, 0).wait()
    group.recv([secret], peer, 0).wait()
    lender, number = told.tolist()
    borrower: Borrower | None = Borrower(lender)
    try:
        assert borrower is not None
        if number == FAILED or not torch.equal(borrower.borrow(torch.tensor([number]), PROBE), secret):
            borrower = None  # another machine, which happens to have such a process
    except (OSError, ValueError):
        borrower = None
    group.send([torch.tensor([float(borrower is not None)])], peer, 0).wait()
    return borrower
