"""A line between two processes of one machine for tensors on a GPU: the same memory and pipe, and copies beside the compute.

The driver is told of the blocks, so that the device reads and writes them by itself, on a stream of the line's own. A thread
tells it to. At the sending end that waits until a message has been copied out, and writes the ticket then; at the receiving end
it waits for the ticket, and the stream that computes waits, on the device, for the copy into a buffer posted ahead. So neither
device nor host stand still for a message, but for one that has not been sent yet.
"""

import mmap
import queue
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from penstock.comms.messages import wire
from penstock.comms.messages.blocks import FREE, HEADER, PAGE
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender
from penstock.comms.messages.wire import TensorSpec
from penstock.comms.messages.worker import SendFailure, Worker

WAY = "host memory that both processes see"


class Copies:
    """Copies between a device and memory that two processes share, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.module, self._device = torch.get_device_module(device), device
        self.stream = self.module.Stream(device)

    def now(self) -> Any:
        """What the stream that computes has been told so far."""
        event = self.module.Event()
        event.record(self.module.current_stream(self._device))
        return event

    def begin(self, to: Tensor, source: Tensor, spec: TensorSpec, after: Sequence[Any], copied: Any) -> None:
        """Begin to copy once the device has done what the events `after` stand for; `copied` is to stand for the copy."""
        with self.module.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            wire.memory(to, spec).copy_(wire.memory(source, spec), non_blocking=True)
            copied.record(self.stream)

    def wait(self, copied: Any) -> None:
        """Have the stream that computes wait for a copy."""
        self.module.current_stream(self._device).wait_event(copied)

    def are_done(self) -> bool:
        """Whether the device has done all that it was told. Raises RuntimeError if it has failed."""
        return self.stream.query() and self.module.current_stream(self._device).query()


class Known:
    """The blocks of a line's memory that the driver of a device knows."""

    def __init__(self, memory: mmap.mmap, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._known: dict[int, int] = {}  # where a block begins -> so many bytes of it the driver knows
        self._refused = False  # by a system that lets no device at such memory: copies are right there, and slower

    def add(self, start: int, size: int) -> None:
        """Have the driver know of the block at `start`, with a message of `size` bytes."""
        size = max(PAGE, 1 << (HEADER + size - 1).bit_length())  # no more than the block has
        if self._refused or self._known.get(start, 0) >= size:
            return
        driver = self._module.cudart()
        if start in self._known:
            driver.cudaHostUnregister(self._address + start)
        with self._module.device(self._device):  # a thread begins with the first one
            self._refused = int(driver.cudaHostRegister(self._address + start, size, 0)) != 0
        if self._refused:
            with suppress(RuntimeError):  # the next launch tells of it, once
                torch.zeros(1, device=self._device)
        else:
            self._known[start] = size

    def close(self) -> None:
        """Have the driver forget all blocks."""
        while self._known:
            start, _ = self._known.popitem()
            self._module.cudart().cudaHostUnregister(self._address + start)


class DeviceSender(MemorySender):
    """The sending end."""

    way = WAY

    def __init__(self, memory: mmap.mmap, writer: int, failure: SendFailure, device: torch.device) -> None:
        super().__init__(memory, writer, failure, spare=sys.maxsize)  # memory that the driver knows must not be given back
        self.carrier, self._copies = device, Copies(device)
        self._driver = Known(memory, self._copies.module, device)
        self._copying: Worker = Worker("penstock-copy")

    def send(self, tensor: Tensor, spec: TensorSpec, what: object = "message") -> None:
        """Send a tensor in the layout of `spec`."""
        self._copying.do(self._send_after, self._copies.now(), tensor.detach(), spec, what)

    def _send_after(self, after: Any, tensor: Tensor, spec: TensorSpec, what: object) -> None:
        self._after = after
        self._send_beside(tensor, spec, what)

    def _put(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        self._driver.add(start, spec.bytes)
        copied = self._copies.module.Event(blocking=True)  # a thread that waits for it sleeps
        self._copies.begin(self._views.at(start, spec), tensor, spec, [self._after], copied)
        copied.synchronize()

    def close(self) -> None:
        """Let the receiver know that nothing more comes, once the thread has done what it is about."""
        super().close()
        self._copying.do(self._driver.close)


class DeviceReceiver(MemoryReceiver):
    """The receiving end. A thread takes messages as they come, into buffers that were posted."""

    way = WAY

    def __init__(self, memory: mmap.mmap, pipe: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(memory, pipe, timeout)
        self.carrier, self._copies = device, Copies(device)
        self._driver = Known(memory, self._copies.module, device)
        self._taking = Worker("penstock-take")

    def post(self, spec: TensorSpec) -> Any:
        """A buffer for a tensor of `spec`, and where it will be told that the copy into it has begun."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with torch.inference_mode(False):
            buffer = wire.empty(spec, self.carrier)
        if spec.bytes:
            self._taking.do(self._take, buffer, spec, self._copies.now(), arrived)
        return buffer, arrived

    def _take(self, buffer: Tensor, spec: TensorSpec, after: Any, arrived: "queue.SimpleQueue[Any]") -> None:
        """In the thread: the next message into `buffer`, which the stream that computes may use up to `after`."""
        try:
            if self._woken:
                raise RuntimeError("a rank is lost")
            start, _ = self._ticket()
            self._driver.add(start, spec.bytes)
            copied = self._copies.module.Event(blocking=True)
            self._copies.begin(buffer, self._views.at(start, spec), spec, [after], copied)
            arrived.put(copied)
            copied.synchronize()
            self._memory[start] = FREE
        except Exception as error:
            arrived.put(error)

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait until a tensor of `spec` is being copied. Raises RuntimeError if the sender is lost or silent."""
        buffer, arrived = posted
        if spec.bytes:
            copied = arrived.get()
            if isinstance(copied, Exception):
                raise copied
            self._copies.wait(copied)
        return buffer

    def close(self) -> None:
        """Let go of the pipe, once the thread has done what it is about; messages that were taken stay."""
        self.wake()
        self._taking.do(self._end)

    def _end(self) -> None:
        self.let_go()
        self._driver.close()
