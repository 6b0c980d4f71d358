"""A line between two processes of one machine: memory both see, and a pipe that says what is in it.

The sender copies a message into a free block of the memory and writes the block's place into the pipe; the receiver, who
waits at the pipe, copies a small message out, and takes a large one as it lies: its tensor *is* the block. When that
tensor's memory is let go, in the backward of the microbatch, the block is marked free and the sender uses it again. Beside
sockets that is one copy instead of two, and one process to wake up instead of two threads.

Messages of any length share the blocks (`blocks.py`), so that the memory, one mapping, does not grow with their number.
Neither it nor the pipe has a name: the sender announces where they are, and the receiver opens them through the sender's /proc
entry. A pipe whose sender has died reads as closed.
"""

import mmap
import os
import select
import struct
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comms.process_groups import ProcessGroups
from penstock.comms.topology import CPU
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import TensorSpec
from penstock.comms.transport.send_thread import SendFailure, SendThread
from penstock.comms.transport.shared_memory import (
    FREE,
    HEADER_BYTES,
    SECRET,
    BlockAllocator,
    create_shared_memory,
    mapping_bytes,
    open_shared_memory,
)

SMALL = 2**16  # bytes; a larger message is not copied out of its block
LARGE = 2**20  # bytes; copying more is worth a thread
GLANCE = 500.0  # milliseconds between looks whether to wait any longer
TICKET = struct.Struct("qq")  # where a block begins in the memory, and the bytes of its message
OPENING_TAG = 3  # of the messages by which the two ends open a line
NO_PROCESS = -1  # in the place of the sender's process: it has no memory to share
OFFER_LENGTH = 3 + SECRET.size // 8  # numbers: the sender's process, the file of the memory, the pipe's end, the secret


def open_memory_sender(groups: ProcessGroups, peer: int, failure: SendFailure) -> "MemorySender | None":
    """The sending end of a new line to the rank `peer`; None at both ends if the two see no memory in common."""
    memory, file = create_shared_memory(mapping_bytes())
    if memory is None:
        groups.everyone.send([torch.full((OFFER_LENGTH,), NO_PROCESS, device="cpu")], peer, OPENING_TAG).wait()
        return None

    files, opened = [file], torch.zeros(1, device="cpu")
    try:
        reader, writer = os.pipe()
        files.append(reader)
        sender = MemorySender(memory, writer, failure)
        offer = torch.tensor([os.getpid(), file, reader, *SECRET.unpack_from(memory)], device="cpu")
        groups.everyone.send([offer], peer, OPENING_TAG).wait()
        groups.everyone.recv([opened], peer, OPENING_TAG).wait()
    finally:
        for number in files:
            os.close(number)

    if not opened:
        sender.close()
        return None
    groups.lines.add(sender)
    return sender


def open_memory_receiver(groups: ProcessGroups, peer: int) -> "MemoryReceiver | None":
    """The receiving end of a new line from the rank `peer`; None at both ends if the two see no memory in common."""
    offer = torch.zeros(OFFER_LENGTH, dtype=torch.int64, device="cpu")
    groups.everyone.recv([offer], peer, OPENING_TAG).wait()
    process, file, pipe, *secret = offer.tolist()
    if process == NO_PROCESS:
        return None

    memory = open_shared_memory(process, file, SECRET.pack(*secret))
    receiver = MemoryReceiver(memory, _open_pipe(process, pipe), groups.topology.timeout) if memory else None
    groups.everyone.send([torch.tensor([float(receiver is not None)], device="cpu")], peer, OPENING_TAG).wait()
    if receiver is not None:
        groups.lines.add(receiver)
    return receiver


def _open_pipe(process: int, file: int) -> int:
    try:
        return os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY)
    except FileNotFoundError as error:
        raise dist.DistError("the sender is gone") from error


_ends: "weakref.WeakSet[_PipeEnd]" = weakref.WeakSet()


def _close_in_a_child() -> None:
    """In a process that a rank forks, a data loader's for instance: the pipe's ends are the rank's alone."""
    for end in list(_ends):
        end.let_go()


if hasattr(os, "register_at_fork"):  # there is none on Windows
    os.register_at_fork(after_in_child=_close_in_a_child)


def _free(memory: mmap.mmap, start: int, process: int) -> None:
    """A message's tensor is gone; in a process forked while it was there that means nothing."""
    if os.getpid() == process:
        memory[start] = FREE


class BlockViews:
    """What lies in the memory's blocks, as tensors: ordinary ones, also where an evaluation makes them in inference mode."""

    @torch.inference_mode(False)
    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._last: dict[int, tuple[TensorSpec, Tensor]] = {}  # start of a block -> what was there last

    def at(self, start: int, spec: TensorSpec) -> Tensor:
        """The memory of the block at `start` as `spec` describes it: nearly always as the time before."""
        last, view = self._last.get(start, (None, self._bytes))
        if last is not spec and (last is None or last.layout != spec.layout):  # an activation is laid out as its gradient
            with torch.inference_mode(False):
                view = message_spec.tensor_from_bytes(
                    self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + spec.bytes], spec
                )
            self._last[start] = spec, view
        return view


class _PipeEnd:
    """One process' end of the pipe."""

    transport_device, way = CPU, "memory that both processes see"

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._close_pipe = weakref.finalize(self, os.close, pipe)
        self._close_pipe.atexit = False  # the system does it then; a `__del__` would run when its module is gone already
        _ends.add(self)

    def close(self) -> None:
        """Take and send no more: the other end is told. Messages that were taken stay."""
        self.let_go()

    def wake(self) -> None:
        """Wait no more, soon; called by another thread."""

    def let_go(self) -> None:
        """Close this process' end of the pipe."""
        self._pipe = -1
        self._close_pipe()


class MemorySender(_PipeEnd):
    """The sending end. From the first large message on, a thread does the copying, in the order of sending."""

    def __init__(self, memory: mmap.mmap, pipe: int, failure: SendFailure) -> None:
        super().__init__(pipe)
        self.blocks, self._views, self._failure = BlockAllocator(memory), BlockViews(memory), failure
        self._copying: SendThread | None = None
        self._writing, self._closed = threading.Lock(), threading.Event()

    def describe(self, packed: Tensor) -> None:
        """Send a description."""
        self.send(packed, message_spec.describe_tensor(packed), "description")

    def send(self, tensor: Tensor, spec: TensorSpec, what: object = "message") -> None:
        """Send a tensor in the layout of `spec`."""
        if self._copying is None and spec.bytes > LARGE:
            self._copying = SendThread("penstock-copy")
        if self._copying is None:
            self._send(tensor, spec)
        else:
            self._copying.do(self._send_in_thread, tensor.detach(), spec, what)

    def _send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Copy `tensor` into a free block, and write the ticket."""
        self._write_ticket(self._copy(tensor, spec), spec.bytes)

    def _copy(self, tensor: Tensor, spec: TensorSpec) -> int:
        """Copy `tensor` into a free block; returns where that begins."""
        start = self.blocks.take(spec.bytes)
        self._views.at(start, spec).copy_(tensor.detach() if tensor.requires_grad else tensor)
        return start

    def _write_ticket(self, start: int, size: int) -> None:
        """Say that a message lies at `start`. If nobody reads, others will tell."""
        try:  # noqa: SIM105 - this runs for every message
            os.write(self._pipe, TICKET.pack(start, size))
        except BrokenPipeError:
            pass

    def _send_in_thread(self, tensor: Tensor, spec: TensorSpec, what: object) -> None:
        """`_send` in the thread, where an error would be lost; one that follows from closing the line is none."""
        try:
            if not self._closed.is_set():
                start = self._copy(tensor, spec)
                with self._writing:
                    if not self._closed.is_set():
                        self._write_ticket(start, spec.bytes)
                if self._closed.is_set():
                    self.let_go()
        except Exception as error:
            try:
                self._failure.tell(what, error)
            finally:
                self.close()

    def close(self) -> None:
        """Let the receiver know that nothing more comes. A thread that writes lets go itself: the pipe's number is in use."""
        self._closed.set()
        if self._writing.acquire(blocking=False):
            self.let_go()
            self._writing.release()


class MemoryReceiver(_PipeEnd):
    """The receiving end. A message lies in its block, whether it is waited for or not: there is nothing to post."""

    def __init__(self, memory: mmap.mmap, pipe: int, timeout: timedelta) -> None:
        super().__init__(pipe)
        self._memory, self._views, self._whole = memory, BlockViews(memory), memoryview(memory)
        self._patience, self._woken = timeout / timedelta(milliseconds=1), False
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def description(self) -> Tensor:
        """Wait for a description."""
        start, size = self._ticket()
        return self._taken(start, TensorSpec((size,), (1,), torch.uint8, False, size))

    def post(self, spec: TensorSpec) -> None:
        """Nothing to do."""

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait for a tensor of `spec`. Raises RuntimeError if the sender is lost or silent."""
        return self._taken(self._ticket()[0], spec) if spec.bytes else message_spec.empty_tensor(spec, CPU)

    def _ticket(self) -> tuple[int, int]:
        waited = 0.0
        while not self._poll.poll(min(GLANCE, self._patience - waited)):
            waited += GLANCE
            if self._woken or waited >= self._patience:
                raise RuntimeError("a rank is lost" if self._woken else "timed out")
        ticket = os.read(self._pipe, TICKET.size)
        if len(ticket) < TICKET.size:
            raise RuntimeError("the sender has closed the pipe")
        start, size = TICKET.unpack(ticket)
        return start, size

    def _taken(self, start: int, spec: TensorSpec) -> Tensor:
        """The message in the block at `start`, a copy or the block itself, which is free when nobody needs it any more."""
        if spec.bytes <= SMALL:
            tensor = self._views.at(start, spec).clone()
            self._memory[start] = FREE
            return tensor
        view = self._whole[start + HEADER_BYTES : start + HEADER_BYTES + spec.bytes]
        weakref.finalize(view, _free, self._memory, start, os.getpid()).atexit = False
        return message_spec.tensor_from_bytes(torch.frombuffer(view, dtype=torch.uint8), spec)

    def wake(self) -> None:
        """Wait no more, soon; called by another thread."""
        self._woken = True
