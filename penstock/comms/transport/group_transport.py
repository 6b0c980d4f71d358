"""The transport through process groups: between machines by Gloo, between GPUs by NCCL.

A receiver posts its receives before it knows what arrives. If another message is sent than the expected one, its receives are
filled with bytes of no meaning, and the message follows through host memory:

    message        tag            bytes
    expected       TENSORS        of each tensor
    unexpected     TENSORS        REPLACED, and zeros, as many as are expected
                   DESCRIPTIONS   of the description and of each tensor
    none expected  DESCRIPTIONS   of the description
                   TENSORS        of each tensor; nothing behind is posted until the description has arrived

Each tag has its own order, so receives that are posted behind an unexpected message stay valid. The first part of a message
shows whether it is REPLACED, at no cost. A message that happens to begin so is sent as if it were unexpected. Where tensors
go by NCCL, the host does not see them: there each message has a head, by Gloo.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comms.abort import abort_backend
from penstock.comms.encoding import check_announced_size, tensor_bytes, tensor_of_bytes, view_as_bytes
from penstock.comms.process_groups import DESTINATION_RANK, SOURCE_RANK, call_unprofiled
from penstock.comms.topology import CPU
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import MessageSpec, TensorSpec
from penstock.comms.transport.send_thread import SendFailure, TaskThread
from penstock.comms.wait_errors import is_transport_error

TENSORS, DESCRIPTIONS, HEADS = 0, 1, 2  # tags
REPLACED = bytes.fromhex("9fd1c50d4aa3e87ebb2681f03c76d95a")  # chosen at random: messages rarely begin so
HEAD_BYTES = len(REPLACED)

MAX_COPIED_MESSAGE_BYTES = 2**16  # a larger message is not copied
MAX_COPIED_BYTES_PER_STEP = 2**22


class GroupSender:
    """The sending end. `description_group` is Gloo's; `tensor_group` takes tensors on `transport_device`."""

    def __init__(
        self, description_group: Any, tensor_group: Any, transport_device: torch.device, pending: "PendingSends"
    ) -> None:
        self._description_group, self._tensor_group = description_group, tensor_group
        self._has_heads = tensor_group is not description_group
        self.transport_device, self.pending = transport_device, pending
        self.medium = f"a {tensor_group.name()} group of their own"

    def send(
        self, tensors: Sequence[Tensor], spec: MessageSpec, expected: MessageSpec | None, message: object = "message"
    ) -> None:
        """Send the parts of a message, without waiting. `message`: its name, for errors.

        `expected`: what the receiver expects, `spec` itself if that is what it gets.
        """
        parts = [
            view_as_bytes(message_spec.flat_memory(tensor, part)) for tensor, part in zip(tensors, spec.parts, strict=True)
        ]
        if expected is None:
            self._send_description(spec)
        elif spec is expected and (self._has_heads or not _is_replaced(parts[0])):
            parts = self._with_head(parts, b"")
        else:
            zeros = [torch.zeros(part.bytes, dtype=torch.uint8, device=self.transport_device) for part in expected.parts]
            self._send_parts(self._tensor_group, self._with_head(zeros, REPLACED), "replaced message", TENSORS)
            self._send_description(spec)
            self._send_parts(self._description_group, [part.cpu() for part in parts], message, DESCRIPTIONS)
            return
        self._send_parts(self._tensor_group, parts, message, TENSORS)

    def _with_head(self, parts: Sequence[Tensor], head: bytes) -> list[Tensor]:
        """Return what to send into the receives of an expected message, whose first bytes become `head`."""
        first, *others = parts
        if self._has_heads:
            self.pending.send(self._description_group, tensor_of_bytes(head.ljust(HEAD_BYTES, b"\0")), "head", HEADS)
            return [first, *others]
        if first.numel() < HEAD_BYTES:
            first = torch.cat([first, first.new_zeros(HEAD_BYTES - first.numel())])
        if head:
            first[:HEAD_BYTES] = tensor_of_bytes(head)
        return [first, *others]

    def _send_description(self, spec: MessageSpec) -> None:
        """Send the description of a message, after its size in bytes."""
        packed = tensor_of_bytes(message_spec.pack_spec(spec))
        size = view_as_bytes(torch.tensor([packed.numel()], device="cpu"))
        self._send_parts(self._description_group, [size, packed], "description", DESCRIPTIONS)

    def _send_parts(self, group: Any, parts: Sequence[Tensor], message: object, tag: int) -> None:
        for data in parts:
            if data.numel():
                self.pending.send(group, data, message, tag)


class PostedMessage:
    """A message to receive. `spec`: what it is, or is expected to be; None until its description has arrived."""

    def __init__(self, spec: MessageSpec | None) -> None:
        self.spec = spec
        self.head: Tensor | None = None  # its first bytes, if it may be replaced
        self.tensors: list[Tensor] = []
        self.works: list[dist.Work] = []  # to wait for before the tensors are read


class GroupReceiver:
    """The receiving end. Receives are posted early, into new buffers, so that tensors arrive while the rank computes."""

    def __init__(self, description_group: Any, tensor_group: Any, transport_device: torch.device) -> None:
        self._description_group, self._tensor_group = description_group, tensor_group
        self._has_heads = tensor_group is not description_group
        self.transport_device = transport_device
        self.medium = f"a {tensor_group.name()} group of their own"
        self._not_posted: deque[PostedMessage] = deque()  # a message without a description, and those behind it

    def post_receive(self, expected: MessageSpec | None) -> PostedMessage:
        """Post the receives of the next message, once those before it are posted. Return it, for `receive`.

        `expected`: what the message is expected to be, None if nothing is known of it.
        """
        message = PostedMessage(expected)
        self._not_posted.append(message)
        self._post_described()
        return message

    def receive(self, message: Any) -> tuple[MessageSpec, list[Tensor]]:
        """Wait for the message that `post_receive` has returned; return its spec and its parts.

        Raises RuntimeError if the sender is lost or silent, MismatchError if its description is impossible.
        """
        if message.spec is None:
            message.spec = self._receive_description()
            self._post(self._not_posted.popleft(), may_be_replaced=False)
            self._post_described()
        for work in message.works:
            work.wait()
        if message.head is not None and _is_replaced(message.head):
            return self._receive_replacement()
        return message.spec, message.tensors

    def _post_described(self) -> None:
        """Post the receives of messages whose spec is known, up to the first one without.

        A group delivers messages in the order of posted receives. So none is posted behind a message without a description.
        """
        while self._not_posted and self._not_posted[0].spec is not None:
            self._post(self._not_posted.popleft(), may_be_replaced=True)

    def _post(self, message: PostedMessage, may_be_replaced: bool) -> None:
        """Post the receives of one message.

        After another rank has failed, a GPU may compute with a tensor that never arrived. An invalid index in it would be an
        error of the GPU. So buffers of integers are filled with 0, a valid index.
        """
        assert message.spec is not None
        if may_be_replaced and self._has_heads:
            message.head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
            message.works.append(self._description_group.recv([message.head], SOURCE_RANK, HEADS))

        for part in message.spec.parts:
            if may_be_replaced and message.head is None:
                tensor, data = _tensor_with_head(part)
                message.head = data
            else:
                tensor = message_spec.empty_tensor(part, self.transport_device)
                data = view_as_bytes(message_spec.flat_memory(tensor, part))
            if self._has_heads and not (part.dtype.is_floating_point or part.dtype.is_complex):
                tensor.zero_()
            message.tensors.append(tensor)
            if data.numel():
                message.works.append(self._tensor_group.recv([data], SOURCE_RANK, TENSORS))

    def _receive_description(self) -> MessageSpec:
        """Wait for a description. Raises MismatchError if its size is impossible."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._receive(size)
        packed = torch.empty(check_announced_size(int(size)), dtype=torch.uint8, device="cpu")
        self._receive(packed)
        return message_spec.unpack_spec(tensor_bytes(packed))

    def _receive_replacement(self) -> tuple[MessageSpec, list[Tensor]]:
        """Wait for the message that has come instead of the expected one."""
        spec = self._receive_description()
        tensors = [message_spec.empty_tensor(part, CPU) for part in spec.parts]
        for tensor, part in zip(tensors, spec.parts, strict=True):
            if part.bytes:
                self._receive(view_as_bytes(message_spec.flat_memory(tensor, part)))
        return spec, [tensor.to(self.transport_device) for tensor in tensors]

    def _receive(self, data: Tensor) -> None:
        self._description_group.recv([data], SOURCE_RANK, DESCRIPTIONS).wait()


def _is_replaced(data: Tensor) -> bool:
    """Return whether these bytes of the CPU begin as those of a message that is replaced."""
    return data.numel() >= HEAD_BYTES and ctypes.string_at(data.data_ptr(), HEAD_BYTES) == REPLACED


def _tensor_with_head(spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return a new tensor on the CPU, and its memory as bytes: HEAD_BYTES at least."""
    if spec.bytes >= HEAD_BYTES:
        tensor = message_spec.empty_tensor(spec, CPU)
        return tensor, view_as_bytes(message_spec.flat_memory(tensor, spec))
    data = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
    return message_spec.tensor_from_bytes(data[: spec.bytes], spec), data


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
        self._sending: list[tuple[dist.Work, Tensor]] = []  # by NCCL
        self._copies: list[tuple[dist.Work, Tensor]] = []  # of this step's messages
        self._copy_budget = MAX_COPIED_BYTES_PER_STEP
        self._thread: TaskThread | None = None

    def send(self, group: Any, data: Tensor, message: object, tag: int) -> None:
        """Send `data`, flat and of bytes, through `group`, without waiting. `message`: its name, for errors."""
        if group.name() == "nccl":
            self._sending = [(work, memory) for work, memory in self._sending if not work.is_completed()]
            self._sending.append((group.send([data], DESTINATION_RANK, tag), data))
        elif data.numel() <= min(MAX_COPIED_MESSAGE_BYTES, self._copy_budget):
            data = data.clone()
            self._copy_budget -= data.numel()
            self._copies.append((group.send([data], DESTINATION_RANK, tag), data))
        else:
            self._thread = self._thread or TaskThread("penstock-sent")
            work = call_unprofiled(group.send, [data], DESTINATION_RANK, tag)
            self._thread.enqueue(_wait_and_publish_failure, work, data, group, message, self.failure)

    def finish_step(self) -> None:
        """Wait for the step's messages, which have all been received, and delete them."""
        for work, _ in (*self._sending, *self._copies):
            with suppress(RuntimeError):  # a peer that has received everything may have ended
                work.wait()
        self._sending.clear()
        self._copies.clear()
        self._copy_budget = MAX_COPIED_BYTES_PER_STEP


def _wait_and_publish_failure(work: dist.Work, data: Tensor, group: Any, message: object, failure: SendFailure) -> None:
    """Wait until `data` is sent; publish this rank's own error. A lost receiver is reported by ranks that wait for it."""
    try:
        work.wait()
    except Exception as error:
        if not is_transport_error(error):
            failure.record_and_publish(message, error)
            abort_backend(group)
