"""Channels: messages from one rank to a neighbour, in the order of the schedule, over a transport that is chosen here.

There is one channel for each direction between two ranks, with its own transport (order of messages: `schedule/program.py`; why
it cannot deadlock: `schedule/proof.py`). A transport sends and receives tensors on its `transport_device`. For stages on GPUs
whose messages go through host memory, the channel copies them. All transports are opened before anything is sent.

The first step with a microbatch of a new signature sends a description before its messages. Both ends keep the descriptions
(`spec_cache.py`). Later steps send only the bytes, into receives that were posted early. A description says of each value
whether it is there, its shape and whether it needs a gradient, or which constant it is. A message that does not match the known
description, because a mask is None in this microbatch for instance, is sent with its own:

    first step:    description, bytes; description, bytes; ..
    later steps:   bytes; bytes; description, bytes; bytes; ..
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.comms.process_groups import DESTINATION_RANK, SOURCE_RANK, ProcessGroups
from penstock.comms.system import is_out_of_resources
from penstock.comms.topology import CPU, Topology
from penstock.comms.transport import message_spec
from penstock.comms.transport.group_transport import GroupReceiver, GroupSender, PendingSends
from penstock.comms.transport.memory_transport import MemoryReceiver, MemorySender, open_memory_receiver, open_memory_sender
from penstock.comms.transport.message_spec import MessageSpec, TensorSpec
from penstock.comms.transport.send_thread import SendFailure
from penstock.comms.transport.spec_cache import MessageSpecCache
from penstock.comms.wait_errors import convert_errors, is_transport_error
from penstock.schedule.program import Transfer
from penstock.trees import flatten

Sender = MemorySender | GroupSender
Receiver = MemoryReceiver | GroupReceiver


class Channels:
    """All channels of one rank for one pipeline.

    `links`: (source, destination) of those of all ranks. `groups`: None in a world of one, which has no channels.
    """

    def __init__(self, links: Iterable[tuple[int, int]], topology: Topology, groups: ProcessGroups | None) -> None:
        self.outgoing: dict[int, SendChannel] = {}  # destination rank in the pipeline -> channel
        self.incoming: dict[int, ReceiveChannel] = {}  # source rank in the pipeline -> channel
        self.transports: dict[str, Sender | Receiver] = {}  # by the ranks at their ends, as `0-1`
        self._device, self._specs = topology.device, MessageSpecCache()
        self._failure: SendFailure | None = None
        self._pending: PendingSends | None = None  # if messages go through groups
        if groups is None:
            return

        self._failure = SendFailure(groups)
        pending = PendingSends(self._failure)
        rank, number = groups.topology.rank, next(groups.channels_count)
        for source, destination in opening_order(links):  # in one order on all ranks: opening waits for the peer
            sender, receiver = topology.get_global_rank(source), topology.get_global_rank(destination)
            name, key = f"{sender}-{receiver}", f"{number}/{sender}-{receiver}"
            failure = f"rank {rank} could not open the channel {name}"
            with convert_errors("for the other ranks to open their channels", failure=failure):
                if rank == sender:
                    self.transports[name] = outgoing = open_sender(groups, key, receiver, pending)
                    self.outgoing[destination] = SendChannel(outgoing, pending.failure, self._specs)
                elif rank == receiver:
                    self.transports[name] = incoming = open_receiver(groups, key, sender)
                    self.incoming[source] = ReceiveChannel(incoming, rank, sender, self._specs)

        self._pending = pending if any(isinstance(end, GroupSender) for end in self.transports.values()) else None
        with convert_errors("for the other ranks to open their channels"):
            groups.world_group.barrier().wait()  # else a rank could begin the step while another fails to open a transport

    def begin_step(self, signatures: Sequence[Hashable]) -> None:
        """Begin a step whose microbatches have these `signatures`, the same on all ranks: see `spec_cache.py`."""
        self._specs.begin_step(signatures)

    def receive(self, transfer: Transfer) -> Any:
        """Wait for the message of `transfer`, and return it. Raises as `ReceiveChannel.receive`."""
        return self.incoming[transfer.source].receive(transfer, self._device)

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as the message of `transfer`, without waiting. Raises as `SendChannel.send`."""
        self.outgoing[transfer.destination].send(transfer, value)

    def end_step(self) -> None:
        """Free sent messages, once the step is over on all ranks. Raises ResourceError if this rank could not send one."""
        self._specs.end_step()
        if self._failure is not None:
            self._failure.raise_if_failed()
        if self._pending is not None:
            self._pending.finish_step()


def opening_order(channels: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the channels (source, destination) in an order in which many are opened at the same time: in rounds.

    In each round a rank opens one channel at most. A pipeline takes four rounds, whatever its length:

        round 0:  0-1  2-3        round 1:  1-0  3-2        round 2:  1-2        round 3:  2-1
    """
    round_of_channel: dict[tuple[int, int], int] = {}
    rounds_of_rank = defaultdict[int, set[int]](set)
    for source, destination in sorted(channels):
        busy = rounds_of_rank[source] | rounds_of_rank[destination]
        round_of_channel[source, destination] = first_free = next(number for number in count() if number not in busy)
        rounds_of_rank[source].add(first_free)
        rounds_of_rank[destination].add(first_free)
    return sorted(round_of_channel, key=lambda channel: (round_of_channel[channel], channel))


def open_sender(groups: ProcessGroups, name: str, peer: int, pending: PendingSends) -> Sender:
    """Open the sending end of a transport `name` to rank `peer`: NCCL between GPUs, memory on one machine, else Gloo."""
    sender = open_memory_sender(groups, peer, pending.failure) if groups.topology.backend != "nccl" else None
    return sender or GroupSender(*_open_description_and_tensor_groups(groups, name, SOURCE_RANK), pending)


def open_receiver(groups: ProcessGroups, name: str, peer: int) -> Receiver:
    """Open the receiving end of a transport `name` from rank `peer`."""
    receiver = open_memory_receiver(groups, peer) if groups.topology.backend != "nccl" else None
    return receiver or GroupReceiver(*_open_description_and_tensor_groups(groups, name, DESTINATION_RANK))


def _open_description_and_tensor_groups(groups: ProcessGroups, name: str, rank: int) -> tuple[Any, Any, torch.device]:
    """Open the group for descriptions and the group for tensors; return both, and the device for tensors."""
    gloo = groups.open_gloo_group(name, rank, 2)
    if groups.topology.backend != "nccl":
        return gloo, gloo, CPU
    return gloo, groups.open_nccl_pair(f"{name}-nccl", rank), groups.topology.transport_device


class SendChannel:
    """The sending end of a channel."""

    def __init__(self, transport: Sender, failure: SendFailure, specs: MessageSpecCache) -> None:
        self.transport, self._failure, self._specs = transport, failure, specs

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as the message of `transfer`, without waiting.

        Raises MismatchError for a value that cannot be sent, ResourceError if this rank cannot send it, or could not send an
        earlier one. A lost receiver raises nothing here: ranks that wait for it report it.
        """
        self._failure.raise_if_failed()
        try:
            expected = self._specs.step_specs[transfer]
            if expected is not None and isinstance(value, Tensor) and expected.describes(value):  # the common case
                self.transport.send((self._on_transport_device(value),), expected, expected, transfer)
            else:
                self._send_tree(transfer, value, expected)
        except (OSError, MemoryError, RuntimeError) as error:
            if is_out_of_resources(error):
                self._failure.record_and_publish(transfer, error)
                self._failure.raise_if_failed()
            if not is_transport_error(error):
                raise

    def _send_tree(self, transfer: Transfer, value: Any, expected: MessageSpec | None) -> None:
        """Send a message that is not a single tensor, or another than the receiver expects."""
        leaves, tree = flatten(value)
        spec = message_spec.message_spec_of(leaves, tree)
        if expected is not None and spec.fits_layout_of(expected):
            spec = expected
        else:
            self._specs.add(transfer, spec)
        self.transport.send(self._parts(leaves, spec), spec, expected, transfer)

    def _parts(self, leaves: Sequence[Any], spec: MessageSpec) -> Sequence[Tensor]:
        """Return the tensors for `spec.parts`, on the transport's device."""
        pairs = zip(leaves, spec.leaves, strict=True)
        tensors = [leaf for leaf, leaf_spec in pairs if isinstance(leaf_spec, TensorSpec) and leaf_spec.bytes]
        return list(map(self._on_transport_device, tensors)) or [_NOTHING]

    def _on_transport_device(self, tensor: Tensor) -> Tensor:
        device = self.transport.transport_device
        return tensor if tensor.device == device else tensor.detach().to(device)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class ReceiveChannel:
    """The receiving end of a channel."""

    def __init__(self, transport: Receiver, rank: int, source: int, specs: MessageSpecCache) -> None:
        self.transport, self.rank, self.source, self._specs = transport, rank, source, specs
        self.posted: deque[tuple[Transfer, MessageSpec | None, Any]] = deque()  # what is expected, and the transport's receives
        self.out_of_order: dict[Transfer, Any] = {}  # messages that arrived before one that is needed first; rarely any

    def post_receive(self, transfer: Transfer) -> None:
        """Post the receives for the message of `transfer`, the next in this channel. Raises as `receive`."""
        try:
            expected = self._specs.step_specs[transfer]
            self.posted.append((transfer, expected, self.transport.post_receive(expected)))
        except (OSError, MemoryError, RuntimeError):
            with self._convert_errors(transfer):
                raise

    def receive(self, transfer: Transfer, device: torch.device) -> Any:
        """Wait for the message of `transfer`, and return it on `device`.

        Raises WaitError if the peer is lost or silent, ResourceError if this rank has no memory for it.
        """
        while not self.out_of_order or transfer not in self.out_of_order:
            arriving, expected, posted = self.posted.popleft()
            try:
                spec, tensors = self.transport.receive(posted)
            except (OSError, MemoryError, RuntimeError):
                with self._convert_errors(arriving):
                    raise

            if spec is not expected:
                self._specs.add(arriving, spec)
            if device != self.transport.transport_device:
                tensors = [tensor.to(device) for tensor in tensors]
            message = message_spec.rebuild_message(spec, tensors, device)
            if arriving is transfer:
                return message
            self.out_of_order[arriving] = message
        return self.out_of_order.pop(transfer)

    def _convert_errors(self, transfer: Transfer) -> convert_errors:
        # Entered for an error only: these texts are not made for every message.
        failure = f"rank {self.rank} could not receive the {transfer}"
        return convert_errors(f"for the {transfer} from rank {self.source}", self.source, failure)
