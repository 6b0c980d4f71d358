"""The transport through process groups: between machines by Gloo, between GPUs by NCCL."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.comms.abort import abort_backend
from penstock.comms.encoding import check_announced_size, view_as_bytes
from penstock.comms.process_groups import DESTINATION_RANK, SOURCE_RANK, call_unprofiled, is_transport_error
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import TensorSpec
from penstock.comms.transport.send_thread import SendFailure, TaskThread

MAX_COPIED_MESSAGE_BYTES = 2**16  # a larger message is not copied
MAX_COPIED_BYTES_PER_STEP = 2**22


class GroupSender:
    """The sending end. `description_group` is Gloo's; `tensor_group` takes tensors on `transport_device`."""

    def __init__(
        self, description_group: Any, tensor_group: Any, transport_device: torch.device, pending: "PendingSends"
    ) -> None:
        self._description_group, self._tensor_group = description_group, tensor_group
        self.transport_device, self.pending = transport_device, pending
        self.medium = f"a {tensor_group.name()} group of their own"

    def send_description(self, packed: Tensor) -> None:
        """Send the description of a message, `packed` as bytes, after its size."""
        for tensor in (torch.tensor([packed.numel()], device="cpu"), packed):
            self.pending.send(self._description_group, tensor, message_spec.tensor_spec_of(tensor), "description")

    def send(self, tensor: Tensor, spec: TensorSpec, message: object = "message") -> None:
        """Send `tensor` in the layout of `spec`, without waiting. `message`: its name, for errors."""
        self.pending.send(self._tensor_group, tensor, spec, message)


class GroupReceiver:
    """The receiving end. Receives are posted early, into new buffers, so that tensors arrive while the rank computes."""

    def __init__(self, description_group: Any, tensor_group: Any, transport_device: torch.device) -> None:
        self._description_group, self._tensor_group = description_group, tensor_group
        self.transport_device = transport_device
        self.medium = f"a {tensor_group.name()} group of their own"

    def receive_description(self) -> Tensor:
        """Wait for the description of a message; return its bytes (uint8). Raises MismatchError if its size is impossible."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._description_group.recv([size], SOURCE_RANK, 0).wait()
        packed = torch.empty(check_announced_size(int(size)), dtype=torch.uint8, device="cpu")
        self._description_group.recv([packed], SOURCE_RANK, 0).wait()
        return packed

    def post_receive(self, spec: TensorSpec) -> tuple[Tensor, Any]:
        """Post the receive of a tensor of `spec`; return the buffer and the work, for `wait_receive`.

        After another rank has failed, a GPU may compute with a tensor that never arrived. An invalid index in it would be an
        error of the GPU. So buffers of integers are filled with 0, a valid index.
        """
        buffer = message_spec.empty_tensor(spec, self.transport_device)
        is_nccl = self._tensor_group is not self._description_group
        if is_nccl and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            buffer.zero_()
        if not spec.bytes:
            return buffer, None
        data = view_as_bytes(message_spec.flat_memory(buffer, spec))
        return buffer, self._tensor_group.recv([data], SOURCE_RANK, 0)

    def wait_receive(self, posted: Any, spec: TensorSpec) -> Tensor:
        """Wait for the posted tensor, and return it. Raises RuntimeError if the sender is lost or silent."""
        buffer, work = posted
        if work is not None:
            work.wait()
        return buffer


class PendingSends:
    """The messages that a rank is sending through groups. Their tensors are kept alive until they are sent.

    | group | message | kept alive                                                                  |
    |-------|---------|-----------------------------------------------------------------------------|
    | NCCL  | any     | until its work is completed, which is checked at the next send              |
    | Gloo  | small   | as a copy until the step is over, MAX_COPIED_BYTES_PER_STEP at most         |
    | Gloo  | large   | by a thread that waits, as Gloo's work does not show that it is completed   |
    """

    def __init__(self, failure: SendFailure) -> None:
        self.failure = failure
        self._pending: list[tuple[Any, Tensor]] = []
        self._copy_budget = MAX_COPIED_BYTES_PER_STEP
        self._thread: TaskThread | None = None

    def send(self, group: Any, tensor: Tensor, spec: TensorSpec, message: object) -> None:
        """Send `tensor` in the layout of `spec` through `group`, without waiting. `message`: its name, for errors."""
        data = view_as_bytes(message_spec.flat_memory(tensor, spec))
        if group.name() == "nccl":
            self._pending = [(work, memory) for work, memory in self._pending if not work.is_completed()]
            self._pending.append((group.send([data], DESTINATION_RANK, 0), data))
        elif spec.bytes <= min(MAX_COPIED_MESSAGE_BYTES, self._copy_budget):
            data = data.clone()
            self._copy_budget -= spec.bytes
            self._pending.append((group.send([data], DESTINATION_RANK, 0), data))
        else:
            self._thread = self._thread or TaskThread("penstock-sent")
            work = call_unprofiled(group.send, [data], DESTINATION_RANK, 0)
            self._thread.enqueue(_wait_and_publish_failure, work, data, group, message, self.failure)

    def finish_step(self) -> None:
        """Wait for the step's messages, which have all been received, and delete them."""
        for work, _ in self._pending:
            with suppress(RuntimeError):  # a peer that has received everything may have ended
                work.wait()
        self._pending.clear()
        self._copy_budget = MAX_COPIED_BYTES_PER_STEP


def _wait_and_publish_failure(work: Any, data: Tensor, group: Any, message: object, failure: SendFailure) -> None:
    """Wait until `data` is sent; publish this rank's own error. A lost receiver is reported by ranks that wait for it."""
    try:
        work.wait()
    except Exception as error:
        if not is_transport_error(error):
            failure.record_and_publish(message, error)
            abort_backend(group)
