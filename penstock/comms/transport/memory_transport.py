"""The transport between two processes of one machine: shared memory, and a pipe with the positions of messages in it.

    sender                                             receiver
    1. copies the tensor into a free block
    2. writes the block's start into the pipe   ->     3. waits for the pipe
                                                       4. small message: copies it out, and marks the block free
                                                          large message: returns a tensor that views the block, and marks
                                                          the block free when it is deleted, in the microbatch's backward
    5. uses the block again

Sockets would take two copies instead of one, and wake two threads instead of one process.

If the receiver does not expect such a message (see `channels.py`), its description is in the same block, behind the tensor.

Messages of all sizes share the blocks (shared_memory.py), so there is one mapping, whatever the number of messages. Neither
the memory nor the pipe has a name: the sender sends its pid and descriptors, and the receiver opens them through the sender's
/proc entry. A pipe whose sender has died reads as closed.
"""

import mmap
import os
import select
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comms.process_groups import ProcessGroups
from penstock.comms.time_limits import ABORT_CHECK_MILLISECONDS
from penstock.comms.topology import CPU
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import MessageSpec, TensorSpec
from penstock.comms.transport.send_thread import SendFailure, TaskThread
from penstock.comms.transport.shared_memory import (
    FREE,
    HEADER_BYTES,
    SECRET,
    BlockAllocator,
    create_shared_memory,
    mapping_bytes_to_reserve,
    open_shared_memory,
)

MAX_COPIED_BYTES = 2**16  # the receiver copies a message of up to this size out of its block
MIN_THREAD_BYTES = 2**20  # the sender copies a larger message in a thread
PIPE_RECORD = struct.Struct("qqq")  # the start of a block; the bytes of the tensor in it, and of a description behind

OPENING_TAG = 3  # of the messages by which the two ends open a transport
OFFER_NUMBERS = 3 + SECRET.size // 8  # the sender's pid, its descriptors of the memory and the pipe, the secret
NO_PID = -1  # instead of the pid if the sender has no memory to share


def open_memory_sender(groups: ProcessGroups, peer: int, failure: SendFailure) -> "MemorySender | None":
    """Open the sending end of a transport to the rank `peer`; None at both ends if the two cannot share memory."""
    memory, memory_fd = create_shared_memory(mapping_bytes_to_reserve())
    if memory is None:
        groups.world_group.send([torch.full((OFFER_NUMBERS,), NO_PID, device="cpu")], peer, OPENING_TAG).wait()
        return None

    fds, is_open = [memory_fd], torch.zeros(1, device="cpu")
    try:
        reader, writer = os.pipe()
        fds.append(reader)
        sender = MemorySender(memory, writer, failure)
        offer = torch.tensor([os.getpid(), memory_fd, reader, *SECRET.unpack_from(memory)], device="cpu")
        groups.world_group.send([offer], peer, OPENING_TAG).wait()
        groups.world_group.recv([is_open], peer, OPENING_TAG).wait()
    finally:
        for fd in fds:
            os.close(fd)

    if not is_open:
        sender.close()
        return None
    groups.transports.add(sender)
    return sender


def open_memory_receiver(groups: ProcessGroups, peer: int) -> "MemoryReceiver | None":
    """Open the receiving end of a transport from the rank `peer`; None at both ends if the two cannot share memory."""
    offer = torch.zeros(OFFER_NUMBERS, dtype=torch.int64, device="cpu")
    groups.world_group.recv([offer], peer, OPENING_TAG).wait()
    pid, memory_fd, pipe_fd, *secret = offer.tolist()
    if pid == NO_PID:
        return None

    memory = open_shared_memory(pid, memory_fd, SECRET.pack(*secret))
    receiver = MemoryReceiver(memory, _open_pipe(pid, pipe_fd), groups.topology.timeout) if memory else None
    is_open = torch.tensor([float(receiver is not None)], device="cpu")
    groups.world_group.send([is_open], peer, OPENING_TAG).wait()
    if receiver is not None:
        groups.transports.add(receiver)
    return receiver


def _open_pipe(pid: int, fd: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    except FileNotFoundError as error:
        raise dist.DistError("the sender is gone") from error


_pipe_ends: "weakref.WeakSet[_OsPipeEnd]" = weakref.WeakSet()


def _close_pipes_in_child() -> None:
    """Close the pipes in a forked child of a rank, for instance a DataLoader's worker: else a dead rank's pipe stays open."""
    for end in list(_pipe_ends):
        end.close_pipe()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_pipes_in_child)


def _free_block(memory: mmap.mmap, start: int, pid: int) -> None:
    """Mark the block of a deleted tensor as free; do nothing in a child that was forked while the tensor existed."""
    if os.getpid() == pid:
        memory[start] = FREE


class BlockViews:
    """Tensors that view the memory's blocks. They are never inference tensors, even if an evaluation creates them."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._last_view: dict[int, tuple[TensorSpec, Tensor]] = {}  # start of a block -> its last view

    def view(self, start: int, spec: TensorSpec) -> Tensor:
        """Return the message in the block at `start` as a tensor of `spec`: the block's last view if its layout is the same."""
        last = self._last_view.get(start)
        if last is not None and (last[0] is spec or last[0].layout == spec.layout):
            return last[1]

        count, offset = max(1, spec.bytes // spec.dtype.itemsize), start + HEADER_BYTES
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            elements = torch.frombuffer(self._memory, dtype=spec.dtype, count=count, offset=offset)
            view = elements.as_strided(spec.shape, spec.stride)
        self._last_view[start] = spec, view
        return view


class _OsPipeEnd:
    """One process's end of the pipe."""

    transport_device, medium = CPU, "memory that both processes see"

    def __init__(self, pipe_fd: int) -> None:
        self._pipe_fd = pipe_fd
        self._close_fd = weakref.finalize(self, os.close, pipe_fd)
        self._close_fd.atexit = False  # the system closes it at exit
        _pipe_ends.add(self)

    def close(self) -> None:
        """Close this end, which the other end sees. Messages that have been received stay valid."""
        self.close_pipe()

    def abort_waits(self) -> None:
        """Make a wait of another thread end soon."""

    def close_pipe(self) -> None:
        """Close this process's end of the pipe."""
        self._pipe_fd = -1
        self._close_fd()


class MemorySender(_OsPipeEnd):
    """The sending end. From the first large message on, a thread copies all of them, in the order of sending."""

    def __init__(self, memory: mmap.mmap, pipe_fd: int, failure: SendFailure) -> None:
        super().__init__(pipe_fd)
        self._memory, self.allocator, self._views = memory, BlockAllocator(memory), BlockViews(memory)
        self._failure = failure
        self._thread: TaskThread | None = None
        self._pipe_lock, self._closed = threading.Lock(), threading.Event()

    def send(
        self, tensors: Sequence[Tensor], spec: MessageSpec, expected: MessageSpec | None, message: object = "message"
    ) -> None:
        """Send the parts of a message, without waiting; first its description if the receiver expects another one, or none.

        `expected`: what the receiver expects, `spec` itself if that is what it gets. `message`: its name, for errors.
        """
        description = b"" if spec is expected else message_spec.pack_spec(spec)
        for tensor, part in zip(tensors, spec.parts, strict=True):
            self._send(tensor, part, description, message)
            description = b""

    def _send(self, tensor: Tensor, spec: TensorSpec, description: bytes, message: object) -> None:
        if self._thread is None and spec.bytes > MIN_THREAD_BYTES:
            self._thread = TaskThread("penstock-copy")
        if self._thread is None:
            self._send_now(tensor, spec, description)
        else:
            self._thread.enqueue(self._send_in_thread, tensor.detach(), spec, description, message)

    def _send_now(self, tensor: Tensor, spec: TensorSpec, description: bytes = b"") -> None:
        self._write_to_pipe(self._copy_into_block(tensor, spec, description))

    def _copy_into_block(self, tensor: Tensor, spec: TensorSpec, description: bytes) -> bytes:
        """Copy `tensor` and a `description`, which may be empty, into a free block. Return its record for the pipe."""
        start = self.allocator.allocate(spec.bytes + len(description))
        self._views.view(start, spec).copy_(tensor.detach() if tensor.requires_grad else tensor)
        if description:
            first = start + HEADER_BYTES + spec.bytes
            self._memory[first : first + len(description)] = description
        return PIPE_RECORD.pack(start, spec.bytes, len(description))

    def _write_to_pipe(self, record: bytes) -> None:
        """Tell the receiver that there is a message in this block. If it is gone, a later wait will show that."""
        try:  # noqa: SIM105 - this runs for every message
            os.write(self._pipe_fd, record)
        except BrokenPipeError:
            pass

    def _send_in_thread(self, tensor: Tensor, spec: TensorSpec, description: bytes, message: object) -> None:
        """Do as `_send_now` unless the transport is closed; publish an error instead of raising it."""
        try:
            if not self._closed.is_set():
                record = self._copy_into_block(tensor, spec, description)
                with self._pipe_lock:
                    if not self._closed.is_set():
                        self._write_to_pipe(record)
                if self._closed.is_set():
                    self.close_pipe()
        except Exception as error:
            try:
                self._failure.record_and_publish(message, error)
            finally:
                self.close()

    def close(self) -> None:
        """Close this end, which the receiver sees. If the thread is writing to the pipe, the thread closes it afterwards."""
        self._closed.set()
        if self._pipe_lock.acquire(blocking=False):
            self.close_pipe()
            self._pipe_lock.release()


class MemoryReceiver(_OsPipeEnd):
    """The receiving end. Messages wait in their blocks, so nothing is posted."""

    def __init__(self, memory: mmap.mmap, pipe_fd: int, timeout: timedelta) -> None:
        super().__init__(pipe_fd)
        self._memory, self._views, self._memory_view = memory, BlockViews(memory), memoryview(memory)
        self._timeout_milliseconds, self._aborted = timeout / timedelta(milliseconds=1), False
        self._poll = select.poll()
        self._poll.register(pipe_fd, select.POLLIN)

    def post_receive(self, expected: MessageSpec | None) -> MessageSpec | None:
        """Return what `receive` needs: what the next message is expected to be, None if nothing is known of it."""
        return expected

    def receive(self, expected: Any) -> tuple[MessageSpec, list[Tensor]]:
        """Wait for the next message; return its spec and its parts. Raises DistError if the sender is lost or silent."""
        start, tensor_bytes, description_bytes = self._read_from_pipe()
        spec = expected
        if description_bytes:
            first = start + HEADER_BYTES + tensor_bytes
            spec = message_spec.unpack_spec(self._memory[first : first + description_bytes])
        elif spec is None:
            raise message_spec.invalid_description_error()

        tensors = [self._take_message(start, spec.parts[0])]
        for part in spec.parts[1:]:
            start, _, _ = self._read_from_pipe()
            tensors.append(self._take_message(start, part))
        return spec, tensors

    def _read_from_pipe(self) -> tuple[int, int, int]:
        """Wait for the next record, and return it."""
        waited = 0.0
        while not self._poll.poll(min(ABORT_CHECK_MILLISECONDS, self._timeout_milliseconds - waited)):
            waited += ABORT_CHECK_MILLISECONDS
            if self._aborted or waited >= self._timeout_milliseconds:
                raise dist.DistError("a rank is lost" if self._aborted else "timed out")

        record = os.read(self._pipe_fd, PIPE_RECORD.size)
        if len(record) < PIPE_RECORD.size:
            raise dist.DistError("the sender has closed the pipe")
        start, tensor_bytes, description_bytes = PIPE_RECORD.unpack(record)
        return start, tensor_bytes, description_bytes

    def _take_message(self, start: int, spec: TensorSpec) -> Tensor:
        """Return the message in the block at `start`: a copy, or a view that marks the block free when it is deleted."""
        if spec.bytes <= MAX_COPIED_BYTES:
            tensor = self._views.view(start, spec).clone()
            self._memory[start] = FREE
            return tensor

        view = self._memory_view[start + HEADER_BYTES : start + HEADER_BYTES + spec.bytes]
        weakref.finalize(view, _free_block, self._memory, start, os.getpid()).atexit = False
        return message_spec.tensor_from_bytes(torch.frombuffer(view, dtype=torch.uint8), spec)

    def abort_waits(self) -> None:
        """Make a wait of another thread end soon."""
        self._aborted = True
