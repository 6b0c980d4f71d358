"""A line between two processes of one machine for tensors on GPUs, without a copy through the host: CUDA IPC.

A block is memory of the sender's GPU, which the receiver opens once, with an event that both know. They take turns with it:

    sender     copies a message into the block, in the stream that computes, and records the event; then writes the ticket
    receiver   has a stream wait for the event, copy the message out, and record the event; then marks the block as free
    sender     uses the block again once it is marked, and its event has been reached

These are orders to a device, and no host waits until one is carried out. To record gives the event a new meaning, and who asks
for it asks for what it means then. So nobody may ask before the other side has recorded it, which ticket and mark tell. Both
are in memory of the host, as descriptions are. What a block is opened by follows its first ticket, and that of a message
larger than any it had before.

There may be two GPUs: each process sees the memory from its own. Not every system lets processes do this (a container may not),
so the two try it on the secret of their line, before they use it.
"""

import mmap
import select
import sys
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import torch_private
from penstock.comms.encoding import bytes_of, decode, encoded
from penstock.comms.messages import wire
from penstock.comms.messages.blocks import FREE, Blocks
from penstock.comms.messages.device_line import Copies
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender
from penstock.comms.messages.wire import TensorSpec
from penstock.comms.messages.worker import SendFailure
from penstock.comms.shared_memory import SECRET

NAP = 1e-4  # seconds between looks whether what was taken has arrived
WAY = "memory of a GPU that both processes open (CUDA IPC)"
ON_TRIAL = TensorSpec((SECRET.size,), (1,), torch.uint8, False, SECRET.size)  # a line's secret


class Place(NamedTuple):
    """Where a block is on the device, as this process sees it."""

    memory: Tensor  # bytes
    event: Any  # of the last copy into it or out of it

    def of(self, spec: TensorSpec) -> Tensor:
        """The message that lies there."""
        return wire.shaped(self.memory[: spec.bytes], spec)


# Events that other processes know. They must not end before those have: so they are used again, and never end.
_idle_events: dict[torch.device, list[Any]] = defaultdict(list)

# What this process had opened for lines that are closed: see `_let_go`.
_closed: list[tuple[Copies, dict[int, Place]]] = []


def is_new(places: dict[int, Place], start: int, size: int) -> bool:
    """Whether a message of `size` bytes needs new memory for the block at `start`; both ends find the same."""
    return start not in places or places[start].memory.numel() < size


class DeviceBlocks(Blocks):
    """Blocks whose messages are on a device; tickets and marks know them by where they begin in the host's memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory, spare=sys.maxsize)  # of which hardly any is taken
        self.places: dict[int, Place] = {}

    def is_free(self, start: int) -> bool:
        """Whether the receiver's device has copied what lies in the block at `start`."""
        return super().is_free(start) and (start not in self.places or self.places[start].event.query())


class IpcSender(MemorySender):
    """The sending end. It needs no thread: a message is sent when the device has been told to copy it."""

    way = WAY

    def __init__(self, memory: mmap.mmap, pipe: int, failure: SendFailure, device: torch.device) -> None:
        super().__init__(memory, pipe, failure)
        self.carrier, self._memory, self._device = device, memory, torch.get_device_module(device)
        self.blocks: DeviceBlocks = DeviceBlocks(memory)

    def describe(self, packed: Tensor) -> None:
        """Send a description, through the host's memory."""
        self._send(packed, wire.describe_tensor(packed))

    def send(self, tensor: Tensor, spec: TensorSpec, what: object = "message") -> None:
        """Send a tensor in the layout of `spec`."""
        start, places = self.blocks.take(spec.bytes), self.blocks.places
        handles = self._make(start, spec.bytes) if is_new(places, start, spec.bytes) else None
        wire.memory(places[start].of(spec), spec).copy_(wire.memory(tensor, spec), non_blocking=True)
        places[start].event.record(self._device.current_stream(self.carrier))
        self._tell(start, spec.bytes)
        if handles is not None:
            self.describe(encoded(handles))

    @torch.inference_mode(False)
    def _make(self, start: int, size: int) -> tuple[Any, bytes]:
        """Put the block at `start` on the device; returns what the receiver opens it by."""
        idle, places = _idle_events[self.carrier], self.blocks.places
        memory = torch.empty(size, dtype=torch.uint8, device=self.carrier)
        event = idle.pop() if idle else self._device.Event(interprocess=True)
        idle += [places[start].event] if start in places else []
        places[start] = Place(memory, event)
        return torch_private.exported(memory), event.ipc_handle()

    def try_out(self) -> None:
        """Send the line's secret."""
        secret = torch.frombuffer(bytearray(self._memory[: SECRET.size]), dtype=torch.uint8)
        self.send(secret.to(self.carrier), ON_TRIAL)

    def close(self) -> None:
        """Let the receiver know that nothing more comes. The blocks' memory is free when it has closed its end, too."""
        super().close()
        _idle_events[self.carrier] += [place.event for place in self.blocks.places.values()]
        self.blocks.places.clear()


class IpcReceiver(MemoryReceiver):
    """The receiving end. A ticket is there long before its message, as a rule: nobody need wait for it in a thread."""

    way = WAY

    def __init__(self, memory: mmap.mmap, pipe: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(memory, pipe, timeout)
        self.carrier, self._copies = device, Copies(device)
        self._places: dict[int, Place] = {}

    def post(self, spec: TensorSpec) -> Any:
        """A buffer for a tensor of `spec`, and what the device has been told before it may be written."""
        with torch.inference_mode(False):
            return wire.empty(spec, self.carrier), self._copies.now()

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait until a tensor of `spec` has been sent. Raises RuntimeError if the sender is lost or silent."""
        buffer, after = posted
        if spec.bytes:
            start, size = self._ticket()
            if is_new(self._places, start, size):
                self._open(start)
            place = self._places[start]
            self._copies.begin(buffer, place.of(spec), spec, [after, place.event], place.event)
            self._copies.wait(place.event)
            self._memory[start] = FREE
        return buffer

    def _open(self, start: int) -> None:
        exported, handle = decode(bytes_of(self.description()))
        with self._copies.module.stream(self._copies.stream), torch.inference_mode(False):
            memory = torch_private.opened(exported, self.carrier)
            self._places[start] = Place(memory, self._copies.module.Event.from_ipc_handle(self.carrier, handle))

    def try_out(self) -> None:
        """Take the line's secret, and see that it is that."""
        secret = self.wait(self.post(ON_TRIAL), ON_TRIAL)
        if bytes_of(secret.cpu()) != self._memory[: SECRET.size]:
            raise RuntimeError("the other process' memory does not have what was written there")

    def settle(self) -> None:
        """Wait until what was taken has arrived. Raises RuntimeError if it does not: a device waits for a lost one for ever."""
        begin = time.monotonic()
        for place in self._places.values():
            while not place.event.query():
                if self._woken or any(state & select.POLLHUP for _, state in self._poll.poll(0)):
                    raise RuntimeError("the sender is gone")
                if time.monotonic() - begin > self._patience / 1e3:
                    raise RuntimeError("timed out")
                time.sleep(NAP)

    def close(self) -> None:
        """Take no more; messages that were taken stay."""
        super().close()
        _closed.append((self._copies, self._places))
        self._places = {}
        _let_go()


def _let_go() -> None:
    """Let go of what closed lines had opened, where the device is idle.

    torch waits for the device then, which may wait for a lost one for ever, or has failed, and says so by ending the process.
    """
    for line in list(_closed):
        with suppress(RuntimeError):
            if line[0].are_done():
                _closed.remove(line)
