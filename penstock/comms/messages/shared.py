"""A line between two processes of one machine: memory both see, and a pipe that says what is in it.

The sender copies a message into a free block of a shared file and writes the block's place into a pipe; the receiver, who
waits at the pipe, copies a small message out, and takes a large one as it lies: its tensor *is* the block. When that
tensor's memory is let go, in the backward of the microbatch, the block is marked free and the sender uses it again. Beside
sockets that is one copy instead of two, and one process to wake up instead of two threads.

File (a memfd) and pipe have no name: the receiver opens them through the sender's /proc entry, and they are gone when the
two processes are, however those end. A pipe whose sender has died reads as closed.
"""

import ctypes
import mmap
import os
import select
import struct
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from penstock.comms.groups import Groups
from penstock.comms.messages.wire import TensorSpec, describe_tensor, shaped

SMALL = 2**16  # bytes; a larger message is not copied out of its block
HEADER = 64  # bytes before a block's data; the first says whether the block is in use
FREE, BUSY = 0, 1
TICKET = struct.Struct("qq")  # where a block begins in the file, and the bytes of its message
SECRET = 64  # bytes by which the receiver knows that it has opened the right file


class Block:
    """Where messages of one size lie in `file`, from `start` on."""

    def __init__(self, file: int, start: int, size: int) -> None:
        self.start = start
        self.memory = mmap.mmap(file, HEADER + size, offset=start)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8, offset=HEADER)
        self._spec: TensorSpec | None = None
        self._tensor = self._bytes

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The message's memory as `spec` describes it: nearly always as the time before."""
        if spec != self._spec:
            self._spec, self._tensor = spec, shaped(self._bytes, spec)
        return self._tensor


class SharedSender:
    """The sending end."""

    def __init__(self) -> None:
        self.file = os.memfd_create("penstock")
        self.reader, self.writer = os.pipe()  # the reader is for the other process to open
        self._end = 0
        self._blocks: dict[int, list[Block]] = {}  # bytes -> blocks for messages of that size

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Copy `tensor`, in the layout of `spec`, into a free block, and say so. If nobody reads, others will tell."""
        block = self._free(spec.bytes)
        block.memory[0] = BUSY
        block.tensor(spec).copy_(tensor.detach())
        with suppress(BrokenPipeError):
            os.write(self.writer, TICKET.pack(block.start, spec.bytes))

    def _free(self, size: int) -> Block:
        blocks = self._blocks.setdefault(size, [])
        for block in blocks:
            if block.memory[0] == FREE:
                return block
        start = self._end
        self._end += -(-(HEADER + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.file, self._end)
        blocks.append(Block(self.file, start, size))
        return blocks[-1]

    def close(self) -> None:
        """Let the receiver know that nothing more comes."""
        for number in (self.file, self.reader, self.writer):
            with suppress(OSError):
                os.close(number)
        self.file = self.reader = self.writer = -1

    __del__ = close


class SharedReceiver:
    """The receiving end; `process`, `file` and `pipe` are the sender's."""

    def __init__(self, process: int, file: int, pipe: int, timeout: timedelta) -> None:
        self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        self._pipe = os.open(f"/proc/{process}/fd/{pipe}", os.O_RDONLY)
        self._poll, self._patience = select.poll(), timeout / timedelta(milliseconds=1)
        self._poll.register(self._pipe, select.POLLIN)
        self._blocks: dict[int, Block] = {}

    def begins_with(self, secret: Tensor) -> bool:
        """Whether `secret` is the first message. Takes nothing out of the pipe, which may be meant for another process."""
        with mmap.mmap(self._file, HEADER + SECRET, access=mmap.ACCESS_READ) as memory:
            return memory[HEADER:] == bytes(secret.tolist())

    def receive(self, spec: TensorSpec | None) -> Tensor:
        """The next message, as `spec` describes it, or as bytes. Raises RuntimeError if the sender is lost or silent."""
        start, size = self._ticket()
        block = self._blocks.get(start)
        if block is None:
            block = self._blocks[start] = Block(self._file, start, size)
        spec = spec or TensorSpec((size,), (1,), torch.uint8, False, size)
        if size <= SMALL:
            tensor = block.tensor(spec).clone()
            block.memory[0] = FREE
            return tensor
        view = (ctypes.c_ubyte * size).from_buffer(block.memory, HEADER)
        weakref.finalize(view, block.memory.__setitem__, 0, FREE).atexit = False
        return shaped(torch.frombuffer(view, dtype=torch.uint8), spec)

    def _ticket(self) -> tuple[int, int]:
        if not self._poll.poll(self._patience):
            raise RuntimeError("timed out")
        ticket = os.read(self._pipe, TICKET.size)
        if len(ticket) < TICKET.size:
            raise RuntimeError("the sender has closed the pipe")
        start, size = TICKET.unpack(ticket)
        return start, size

    def close(self) -> None:
        """Let go of file and pipe; messages that were taken stay."""
        for number in (self._file, self._pipe):
            with suppress(OSError):
                os.close(number)
        self._file = self._pipe = -1

    __del__ = close


def offer(group: Any, peer: int, groups: Groups) -> SharedSender | None:
    """The sending end of a new channel, if the process at the other end of `group` is on this machine and agrees."""
    sender = SharedSender() if hasattr(os, "memfd_create") else None
    secret = torch.frombuffer(bytearray(os.urandom(SECRET)), dtype=torch.uint8)
    if sender is not None:
        sender.send(secret, describe_tensor(secret))
    where = (os.getpid(), sender.file, sender.reader) if sender else (-1, -1, -1)
    accepted = torch.zeros(1)
    group.send([torch.tensor(where)], peer, 0).wait()
    group.send([secret], peer, 0).wait()
    group.recv([accepted], peer, 0).wait()
    if sender is None or not accepted:
        return None
    os.close(sender.reader)
    sender.reader = -1
    groups.at_close(sender.close)
    return sender


def accept(group: Any, peer: int, groups: Groups) -> SharedReceiver | None:
    """The receiving end, if the sender's file and pipe can be opened and hold what the sender says."""
    where, secret = torch.zeros(3, dtype=torch.int64), torch.zeros(SECRET, dtype=torch.uint8)
    group.recv([where], peer, 0).wait()
    group.recv([secret], peer, 0).wait()
    receiver = _opened(where.tolist(), secret, groups.topology.timeout)
    group.send([torch.tensor([float(receiver is not None)])], peer, 0).wait()
    if receiver is not None:
        groups.at_close(receiver.close)
    return receiver


def _opened(where: list[int], secret: Tensor, timeout: timedelta) -> SharedReceiver | None:
    """None where a process of another machine has that number (in containers many do), or this one has no such way."""
    process, file, pipe = where
    with suppress(OSError, ValueError, RuntimeError):
        link = os.readlink(f"/proc/{process}/fd/{file}")
        if link.startswith("/memfd:penstock") and os.readlink(f"/proc/{process}/fd/{pipe}").startswith("pipe:"):
            receiver = SharedReceiver(process, file, pipe, timeout)
            if receiver.begins_with(secret):
                receiver.receive(None)
                return receiver
    return None
