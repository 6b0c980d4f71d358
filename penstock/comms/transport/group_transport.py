"""A line over process groups: between machines by Gloo, between GPUs by NCCL."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.comms.abort import abort_backend
from penstock.comms.encoding import check_value_size, view_as_bytes
from penstock.comms.process_groups import DESTINATION_RANK, SOURCE_RANK, is_transport_error
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import TensorSpec
from penstock.comms.transport.send_thread import SendFailure, SendThread

SMALL = 2**16  # bytes; a larger message is not copied
MOST_COPIED = 2**22  # bytes of small messages kept until the end of the step


class GroupSender:
    """The sending end: `gloo` for descriptions, `data` for tensors on `carrier`."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device, outbox: "PendingSends") -> None:
        self._gloo, self._data, self.transport_device, self._outbox = gloo, data, carrier, outbox
        self.way = f"a {data.name()} group of their own"

    def describe(self, packed: Tensor) -> None:
        """Send a description, its size before it."""
        for part in (torch.tensor([packed.numel()], device="cpu"), packed):
            self._outbox.post(self._gloo, part, message_spec.describe_tensor(part), "description")

    def send(self, tensor: Tensor, spec: TensorSpec, what: object = "message") -> None:
        """Send a tensor in the layout of `spec`."""
        self._outbox.post(self._data, tensor, spec, what)


class GroupReceiver:
    """The receiving end. Receives are posted ahead, into fresh buffers, so that data travels while the rank computes."""

    def __init__(self, gloo: Any, data: Any, carrier: torch.device) -> None:
        self._gloo, self._data, self.transport_device = gloo, data, carrier
        self.way = f"a {data.name()} group of their own"

    def description(self) -> Tensor:
        """Wait for a description. Raises MismatchError where none can be as long as is told."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._gloo.recv([size], SOURCE_RANK, 0).wait()
        data = torch.empty(check_value_size(int(size)), dtype=torch.uint8, device="cpu")
        self._gloo.recv([data], SOURCE_RANK, 0).wait()
        return data

    def post(self, spec: TensorSpec) -> tuple[Tensor, Any]:
        """Post the receive of a tensor of `spec`.

        Where a rank fails, a GPU goes on with what never came, and breaks if it is to look up what is no index: 0 is one.
        """
        buffer = message_spec.empty_tensor(spec, self.transport_device)
        if self._data is not self._gloo and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            buffer.zero_()
        return buffer, self._data.recv(
            [view_as_bytes(message_spec.flat_memory(buffer, spec))], SOURCE_RANK, 0
        ) if spec.bytes else None

    def wait(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait for it. Raises RuntimeError if the sender is lost or silent."""
        buffer, work = posted
        if work is not None:
            work.wait()
        return buffer


class PendingSends:
    """What a rank is sending through groups, kept alive until it is gone.

    NCCL tells whether a message is gone: looking whenever another is sent will do. Gloo tells only those who wait. So small
    ones are copied, and the copies stay, a bounded amount, until the step is over; for large ones a thread waits.
    """

    def __init__(self, failure: SendFailure) -> None:
        self.failure = failure
        self._kept: list[tuple[Any, Tensor]] = []
        self._room = MOST_COPIED
        self._waiting: SendThread | None = None

    def post(self, group: Any, tensor: Tensor, spec: TensorSpec, what: object) -> None:
        """Send `tensor` as `spec` through `group`."""
        data = view_as_bytes(message_spec.flat_memory(tensor, spec))
        if group.name() == "nccl":
            self._kept = [(work, kept) for work, kept in self._kept if not work.is_completed()]
            self._kept.append((group.send([data], DESTINATION_RANK, 0), data))
        elif spec.bytes <= min(SMALL, self._room):
            data = data.clone()
            self._room -= spec.bytes
            self._kept.append((group.send([data], DESTINATION_RANK, 0), data))
        else:
            self._waiting = self._waiting or SendThread("penstock-sent")
            self._waiting.do(_wait, group.send([data], DESTINATION_RANK, 0), data, group, what, self.failure)

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
        if not is_transport_error(error):
            failure.tell(what, error)
            abort_backend(group)
