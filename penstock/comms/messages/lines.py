"""Lines: what a channel's messages travel over - shared memory on one machine, else a process group of two."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.comms.groups import Groups
from penstock.comms.messages import wire
from penstock.comms.messages.shared import SMALL, SharedReceiver, SharedSender, accept, offer
from penstock.comms.messages.wire import TensorSpec
from penstock.comms.topology import CPU

SOURCE, DESTINATION = 0, 1  # the two ranks of a line's group
LARGE = 2**20  # bytes; copying more is worth a thread
MOST_COPIED = 2**22  # bytes of small messages kept until the end of the step


class SendingLine(Protocol):
    """The sending end: messages arrive in the order in which they are sent; sending never waits for the receiver."""

    carrier: torch.device  # where tensors must be to be sent

    def describe(self, packed: Tensor) -> None:
        """Send a description."""

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send a tensor in the layout of `spec`."""


class ReceivingLine(Protocol):
    """The receiving end."""

    carrier: torch.device  # where tensors arrive

    def description(self) -> Tensor:
        """Wait for a description."""

    def post(self, spec: TensorSpec) -> Any:
        """Be ready for a tensor of `spec`; returns what `wait` asks for."""

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait for it. Raises RuntimeError if the sender is lost or silent."""


def sending_line(groups: Groups, name: str, outbox: "Outbox") -> SendingLine:
    """The sending end of the new line `name`."""
    gloo = groups.gloo(name, SOURCE, 2)
    if groups.topology.backend == "nccl":
        return GroupSender(gloo, groups.nccl(f"{name}-nccl", SOURCE, 2), groups.topology.device, outbox)
    shared = offer(gloo, DESTINATION, groups)
    return MemorySender(shared) if shared else GroupSender(gloo, gloo, CPU, outbox)


def receiving_line(groups: Groups, name: str) -> ReceivingLine:
    """The receiving end of the new line `name`."""
    gloo = groups.gloo(name, DESTINATION, 2)
    if groups.topology.backend == "nccl":
        return GroupReceiver(gloo, groups.nccl(f"{name}-nccl", DESTINATION, 2), groups.topology.device)
    shared = accept(gloo, SOURCE, groups)
    return MemoryReceiver(shared) if shared else GroupReceiver(gloo, gloo, CPU)


class MemorySender:
    """Over shared memory. From the first large message on, a thread does the copying, in the order of sending."""

    carrier = CPU

    def __init__(self, shared: SharedSender) -> None:
        self._shared = shared
        self._copying: Worker | None = None

    def describe(self, packed: Tensor) -> None:
        """Send a description."""
        self.send(packed, wire.describe_tensor(packed))

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send a tensor in the layout of `spec`."""
        if self._copying is None and spec.bytes > LARGE:
            self._copying = Worker("penstock-copy")
        if self._copying is None:
            self._shared.send(tensor, spec)
        else:
            self._copying.do(self._shared.send, tensor.detach(), spec)


class MemoryReceiver:
    """Over shared memory. A message lies in its block, whether it is waited for or not: there is nothing to post."""

    carrier = CPU

    def __init__(self, shared: SharedReceiver) -> None:
        self._shared = shared

    def description(self) -> Tensor:
        """Wait for a description."""
        return self._shared.receive(None)

    def post(self, spec: TensorSpec) -> None:
        """Nothing to do."""

    def wait(self, posted: None, spec: TensorSpec) -> Tensor:
        """Wait for a tensor of `spec`."""
        return self._shared.receive(spec) if spec.bytes else wire.empty(spec, CPU)


class GroupSender:
    """Over a process group: `gloo` for descriptions, `data` for tensors on `carrier`."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device, outbox: "Outbox") -> None:
        self._gloo, self._data, self.carrier, self._outbox = gloo, data, carrier, outbox

    def describe(self, packed: Tensor) -> None:
        """Send a description, its size before it."""
        for part in (torch.tensor([packed.numel()]), packed):
            self._outbox.post(self._gloo, part, wire.describe_tensor(part))

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send a tensor in the layout of `spec`."""
        self._outbox.post(self._data, tensor, spec)


class GroupReceiver:
    """Over a process group. Receives are posted ahead, into fresh buffers, so that data travels while the rank computes."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device) -> None:
        self._gloo, self._data, self.carrier = gloo, data, carrier

    def description(self) -> Tensor:
        """Wait for a description."""
        size = torch.empty(1, dtype=torch.int64)
        self._gloo.recv([size], SOURCE, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._gloo.recv([data], SOURCE, 0).wait()
        return data

    def post(self, spec: TensorSpec) -> tuple[Tensor, Any]:
        """Post the receive of a tensor of `spec`."""
        buffer = wire.empty(spec, self.carrier)
        return buffer, self._data.recv([wire.memory(buffer, spec)], SOURCE, 0) if spec.bytes else None

    def wait(self, posted: tuple[Tensor, Any], spec: TensorSpec) -> Tensor:
        """Wait for it."""
        buffer, work = posted
        if work is not None:
            work.wait()
        return buffer


class Outbox:
    """What a rank is sending through groups, kept alive until it is gone.

    Gloo tells only those who wait that a message is gone. So small ones are copied, and the copies stay, a bounded amount,
    until the step is over; for large ones a thread waits. (On NCCL, waiting makes only that thread's stream wait.)
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Tensor]] = []
        self._room = MOST_COPIED
        self._waiting: Worker | None = None

    def post(self, group: Any, tensor: Tensor, spec: TensorSpec) -> None:
        """Send `tensor` as `spec` through `group`."""
        if spec.bytes <= min(SMALL, self._room):
            data = wire.copied(tensor, spec)
            self._room -= spec.bytes
            self._kept.append((group.send([data], DESTINATION, 0), data))
        else:
            data = wire.memory(tensor, spec)
            self._wait_for(group.send([data], DESTINATION, 0), data)

    def _wait_for(self, work: Any, data: Tensor) -> None:
        self._waiting = self._waiting or Worker("penstock-sent")
        self._waiting.do(_wait, work, data)

    def empty(self) -> None:
        """Let go of what the step before sent."""
        for work, _ in self._kept:
            with suppress(RuntimeError):  # a peer that has what it needs may have ended
                work.wait()
        self._kept.clear()
        self._room = MOST_COPIED


def _wait(work: Any, data: Tensor) -> None:
    if data.is_cuda:
        with torch.cuda.stream(torch.cuda.Stream(data.device)):  # never the stream that computes
            work.wait()
            torch.cuda.current_stream().synchronize()
    else:
        work.wait()


class Worker:
    """A thread that does one thing after the other, beside the compute; it ends when nobody has the worker any more."""

    def __init__(self, name: str) -> None:
        self._things: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_do_each, args=(self._things,), name=name, daemon=True).start()

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Do `function(*args)` after all that came before."""
        self._things.put((function, *args))

    def __del__(self) -> None:
        self._things.put(None)


def _do_each(things: "queue.SimpleQueue[Any]") -> None:
    while (thing := things.get()) is not None:
        with suppress(RuntimeError, OSError):  # the line is closed; whoever waits on it tells why
            thing[0](*thing[1:])
        thing = None  # let the tensor go before waiting for the next
