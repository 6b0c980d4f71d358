"""A line over process groups: between machines by Gloo, between GPUs by NCCL."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.comms.breaking import break_off_backend
from penstock.comms.encoding import as_bytes, checked_size
from penstock.comms.groups import DESTINATION, SOURCE, is_of_transport
from penstock.comms.lines import wire
from penstock.comms.lines.wire import TensorSpec
from penstock.comms.lines.worker import SendFailure, Worker

SMALL = 2**16  # bytes; a larger message is not copied
MOST_COPIED = 2**22  # bytes of small messages kept until the end of the step


class GroupSender:
    """The sending end: `gloo` for descriptions, `data` for tensors on `carrier`."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device, outbox: "Outbox") -> None:
        self._gloo, self._data, self.carrier, self._outbox = gloo, data, carrier, outbox
        self.way = f"a {data.name()} group of their own"

    def describe(self, packed: Tensor) -> None:
        """Send a description, its size before it."""
        for part in (torch.tensor([packed.numel()], device="cpu"), packed):
            self._outbox.post(self._gloo, part, wire.describe_tensor(part), "description")

    def send(self, tensor: Tensor, spec: TensorSpec, what: object = "message") -> None:
        """Send a tensor in the layout of `spec`."""
        self._outbox.post(self._data, tensor, spec, what)


class GroupReceiver:
    """The receiving end. Receives are posted ahead, into fresh buffers, so that data travels while the rank computes."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device) -> None:
        self._gloo, self._data, self.carrier = gloo, data, carrier
        self.way = f"a {data.name()} group of their own"

    def description(self) -> Tensor:
        """Wait for a description. Raises MismatchError where none can be as long as is told."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._gloo.recv([size], SOURCE, 0).wait()
        data = torch.empty(checked_size(int(size)), dtype=torch.uint8, device="cpu")
        self._gloo.recv([data], SOURCE, 0).wait()
        return data

    def post(self, spec: TensorSpec) -> tuple[Tensor, Any]:
        """Post the receive of a tensor of `spec`.

        Where a rank fails, a GPU goes on with what never came, and breaks if it is to look up what is no index: 0 is one.
        """
        buffer = wire.empty(spec, self.carrier)
        if self._data is not self._gloo and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            buffer.zero_()
        return buffer, self._data.recv([as_bytes(wire.memory(buffer, spec))], SOURCE, 0) if spec.bytes else None

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait for it. Raises RuntimeError if the sender is lost or silent."""
        buffer, work = posted
        if work is not None:
            work.wait()
        return buffer


class Outbox:
    """What a rank is sending through groups, kept alive until it is gone.

    NCCL tells whether a message is gone: looking whenever another is sent will do. Gloo tells only those who wait. So small
    ones are copied, and the copies stay, a bounded amount, until the step is over; for large ones a thread waits.
    """

    def __init__(self, failure: SendFailure) -> None:
        self.failure = failure
        self._kept: list[tuple[Any, Tensor]] = []
        self._room = MOST_COPIED
        self._waiting: Worker | None = None

    def post(self, group: Any, tensor: Tensor, spec: TensorSpec, what: object) -> None:
        """Send `tensor` as `spec` through `group`."""
        data = as_bytes(wire.memory(tensor, spec))
        if group.name() == "nccl":
            self._kept = [(work, kept) for work, kept in self._kept if not work.is_completed()]
            self._kept.append((group.send([data], DESTINATION, 0), data))
        elif spec.bytes <= min(SMALL, self._room):
            data = data.clone()
            self._room -= spec.bytes
            self._kept.append((group.send([data], DESTINATION, 0), data))
        else:
            self._waiting = self._waiting or Worker("penstock-sent")
            self._waiting.do(_wait, group.send([data], DESTINATION, 0), data, group, what, self.failure)

    def empty(self) -> None:
        """Let go of what the step before sent."""
        for work, _ in self._kept:
            with suppress(RuntimeError):  # a peer that has what it needs may have ended
                work.wait()
        self._kept.clear()
        self._room = MOST_COPIED


def _wait(work: Any, data: Tensor, group: Any, what: object, failure: SendFailure) -> None:
    """Until `data` is gone. Of a receiver that is lost, whoever waits for it tells."""
    try:
        work.wait()
    except Exception as error:
        if not is_of_transport(error):
            failure.tell(what, error)
            break_off_backend(group)
