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

from penstock.wire import TensorSpec, shaped

HEADER = 64  # bytes before the data; the first says whether the block is in use
FREE, BUSY = 0, 1
PROBE = 4096
PROBE_SPEC = TensorSpec((PROBE,), (1,), torch.uint8, False, PROBE)
FAILED = -1


class Lender:
    """The sender's blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[int, mmap.mmap, Tensor]]] = {}  # bytes of data -> blocks of that size

    def lend(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        """Copy `tensor`, in the layout of `spec`, into a free block; returns the ticket, to be sent."""
        number, memory, block = self._free(spec.bytes)
        memory[0] = BUSY
        shaped(block, spec).copy_(tensor.detach())
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

    def borrow(self, ticket: Tensor, spec: TensorSpec) -> Tensor:
        """The tensor in the block on `ticket`; the block is free again once its memory is let go. Raises OSError if gone."""
        number, size = int(ticket), spec.bytes
        memory = self._memory.get(number)
        if memory is None:
            with open(f"/proc/{self._lender}/fd/{number}", "r+b") as file:
                memory = self._memory[number] = mmap.mmap(file.fileno(), HEADER + size)
        view = (ctypes.c_ubyte * size).from_buffer(memory, HEADER)
        weakref.finalize(view, memory.__setitem__, 0, FREE).atexit = False
        return shaped(torch.frombuffer(view, dtype=torch.uint8), spec)


def offer(group: Any, peer: int) -> Lender | None:
    """The sender's end of a new channel: its blocks, if the receiver can open them."""
    lender, secret = Lender(), torch.frombuffer(bytearray(os.urandom(PROBE)), dtype=torch.uint8)
    number = int(lender.lend(secret, PROBE_SPEC)) if hasattr(os, "memfd_create") else FAILED
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
        if number == FAILED or not torch.equal(borrower.borrow(torch.tensor([number]), PROBE_SPEC), secret):
            borrower = None  # another machine, which happens to have such a process
    except (OSError, ValueError):
        borrower = None
    group.send([torch.tensor([float(borrower is not None)])], peer, 0).wait()
    return borrower
