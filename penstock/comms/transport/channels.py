"""Channels: the transfers from one rank to a neighbour, in order, sent without waiting and received ahead.

There is one channel for each direction between two ranks, over a line of its own (see `schedule/program.py` for its order
and `schedule/verify.py` for why it cannot hang). A line takes tensors on its `carrier`, and they arrive there: for stages
elsewhere, on GPUs whose messages go through host memory, the channel copies. All lines are opened before anything is sent. The
first step of a new batch signature sends a description before every message; both ends remember them, and every later step
with that signature sends bare memory into receives posted ahead.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.comms.control_group import WaitError, convert_transport_errors
from penstock.comms.process_groups import DESTINATION_RANK, SOURCE_RANK, ProcessGroups, is_transport_error
from penstock.comms.system import convert_os_errors, explain_error, is_out_of_resources
from penstock.comms.topology import CPU, Topology
from penstock.comms.transport import message_spec
from penstock.comms.transport.group_transport import GroupReceiver, GroupSender, PendingSends
from penstock.comms.transport.memory_transport import MemoryReceiver, MemorySender, open_memory_receiver, open_memory_sender
from penstock.comms.transport.message_spec import MessageSpec
from penstock.comms.transport.send_thread import SendFailure
from penstock.errors import MismatchError, PenstockError, ResourceError
from penstock.schedule.program import Program, Transfer
from penstock.trees import flatten

MessageSpecs = dict[Transfer, MessageSpec]
SendingLine = MemorySender | GroupSender
ReceivingLine = MemoryReceiver | GroupReceiver


class Channels:
    """All channels of one rank, for one pipeline."""

    def __init__(self, program: Program, topology: Topology, groups: ProcessGroups | None) -> None:
        self.outgoing: dict[int, SendChannel] = {}
        self.incoming: dict[int, ReceiveChannel] = {}
        self.lines: dict[str, SendingLine | ReceivingLine] = {}  # by the ranks at their ends
        self._outbox: PendingSends | None = None
        if groups is None:
            return
        outbox = self._outbox = PendingSends(SendFailure(groups))
        rank, of_job, opening = groups.topology.rank, topology.get_global_rank, next(groups.openings)
        for source, destination in opening_order(program.channels):  # the same order everywhere: opening one waits for its peer
            start, end = of_job(source), of_job(destination)
            name, in_store = f"{start}-{end}", f"{opening}/{start}-{end}"
            with (
                convert_os_errors(f"rank {rank} could not open the line {name}"),
                convert_transport_errors("for the other ranks to open their lines"),
            ):
                if rank == start:
                    self.lines[name] = line = open_sender(groups, in_store, end, outbox)
                    self.outgoing[destination] = SendChannel(line, outbox.failure)
                elif rank == end:
                    self.lines[name] = arriving = open_receiver(groups, in_store, start)
                    self.incoming[source] = ReceiveChannel(arriving, rank, start)
        with convert_transport_errors(
            "for the other ranks to open their lines"
        ):  # so that no rank goes ahead where another fails to
            groups.everyone.barrier().wait()

    def begin(self, specs: MessageSpecs | None) -> None:
        """Start a step whose messages are described in `specs`; None: each is described when it is sent."""
        for end in self._ends():
            end.specs, end.known = ({}, False) if specs is None else (specs, True)

    def learned(self) -> MessageSpecs:
        """What this rank's messages of the step were like."""
        return {transfer: spec for end in self._ends() for transfer, spec in end.specs.items()}

    def _ends(self) -> "list[SendChannel | ReceiveChannel]":
        return [*self.outgoing.values(), *self.incoming.values()]

    def end(self) -> None:
        """The step is over on all ranks, so everything that was sent has been received. Raises ResourceError if it was not."""
        if self._outbox is not None:
            self._outbox.failure.check()
            self._outbox.empty()


def opening_order(channels: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The channels in an order in which many can be opened at once: round after round, a rank in one channel of each at most.

    Along a pipeline each rank's first is with the one neighbour, then the other's turn comes: four rounds, however long it is.
    """
    rounds: dict[tuple[int, int], int] = {}
    taken = defaultdict[int, set[int]](set)  # rank -> the rounds it has a channel in
    for source, destination in sorted(channels):
        busy = taken[source] | taken[destination]
        rounds[source, destination] = turn = next(turn for turn in count() if turn not in busy)
        taken[source].add(turn)
        taken[destination].add(turn)
    return sorted(rounds, key=lambda channel: (rounds[channel], channel))


def open_sender(groups: ProcessGroups, name: str, peer: int, outbox: PendingSends) -> SendingLine:
    """The sending end of the new line `name` to the rank `peer`: NCCL between GPUs, memory on one machine, else Gloo."""
    line = open_memory_sender(groups, peer, outbox.failure) if groups.topology.backend != "nccl" else None
    return line or GroupSender(*_groups_of_two(groups, name, SOURCE_RANK), outbox)


def open_receiver(groups: ProcessGroups, name: str, peer: int) -> ReceivingLine:
    """The receiving end of the new line `name` from the rank `peer`."""
    line = open_memory_receiver(groups, peer) if groups.topology.backend != "nccl" else None
    return line or GroupReceiver(*_groups_of_two(groups, name, DESTINATION_RANK))


def _groups_of_two(groups: ProcessGroups, name: str, end: int) -> tuple[Any, Any, torch.device]:
    """What carries descriptions, what carries tensors, and where those must be."""
    gloo = groups.gloo(name, end, 2)
    if groups.topology.backend != "nccl":
        return gloo, gloo, CPU
    return gloo, groups.nccl(f"{name}-nccl", end), groups.topology.transport_device


class SendChannel:
    """The sending end of a channel."""

    def __init__(self, line: SendingLine, failure: SendFailure) -> None:
        self.line, self._failure = line, failure
        self.specs: MessageSpecs = {}
        self.known = False

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as `transfer` without waiting.

        Raises MismatchError if it is not what was agreed, ResourceError if this rank cannot send it, or one before it. Of a
        receiver that is lost, whoever waits for it tells.
        """
        self._failure.check()
        try:
            if self.known and isinstance(value, Tensor) and (spec := self.specs[transfer]).describes(value):  # the common case
                self._send(transfer, value, spec.leaves[0])
            else:
                self._send_tree(transfer, value)
        except (OSError, MemoryError, RuntimeError) as error:
            if is_out_of_resources(error):
                self._failure.tell(transfer, error)
                self._failure.check()
            if not is_transport_error(error):
                raise

    def _send_tree(self, transfer: Transfer, value: Any) -> None:
        leaves, tree = flatten(value)
        spec = message_spec.describe_message(leaves, tree)
        if not self.known:
            self.specs[transfer] = spec
            self.line.describe(message_spec.pack_spec(spec))
        elif spec != (agreed := self.specs[transfer]):
            leaves, spec = _fit(transfer, leaves, spec, agreed), agreed
        for leaf, leaf_spec in zip(leaves, spec.leaves, strict=True):
            self._send(transfer, leaf, leaf_spec)

    def _send(self, transfer: Transfer, leaf: Any, spec: message_spec.TensorSpec | message_spec.ConstantSpec) -> None:
        if isinstance(spec, message_spec.TensorSpec) and spec.bytes:
            carrier = self.line.transport_device
            self.line.send(leaf if leaf.device == carrier else leaf.detach().to(carrier), spec, transfer)


def _fit(transfer: Transfer, leaves: list[Any], spec: MessageSpec, agreed: MessageSpec) -> list[Any]:
    """`leaves` as `agreed` describes them, where only the layout differs or a gradient is absent; else MismatchError."""
    fitted = []
    for leaf, leaf_spec, wanted in zip(leaves, spec.leaves, agreed.leaves, strict=False):
        if isinstance(wanted, message_spec.TensorSpec) and leaf is None:
            leaf = torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu")
        elif not isinstance(wanted, message_spec.TensorSpec) or not isinstance(leaf_spec, message_spec.TensorSpec):
            if leaf_spec != wanted:
                break
        elif leaf_spec._replace(stride=wanted.stride) != wanted:
            break
        fitted.append(leaf)
    if len(fitted) != len(agreed.leaves) or len(leaves) != len(agreed.leaves) or spec.tree != agreed.tree:
        raise MismatchError(
            f"the {transfer} is ({spec}), but in an earlier step with the same batch shapes it was ({agreed}): "
            "what passes between stages may depend on the shapes of the batch, not on its values; "
            "a number that changes passes as a tensor"
        )
    return fitted


class ReceiveChannel:
    """The receiving end of a channel."""

    def __init__(self, line: ReceivingLine, rank: int, source: int) -> None:
        self.line, self.rank, self.source = line, rank, source
        self.specs: MessageSpecs = {}
        self.known = False
        self.posted: deque[tuple[Transfer, list[tuple[Any, message_spec.TensorSpec]]]] = deque()
        self.early: dict[Transfer, Any] = {}  # arrived, to be consumed later; rarely anything

    def post(self, transfer: Transfer) -> None:
        """Post the receives of `transfer`, the next of this channel; raises as `take`."""
        try:
            self.posted.append((transfer, self._post(self.specs[transfer]) if self.known else []))
        except (OSError, MemoryError, RuntimeError) as error:
            raise self._failure(transfer, error) from error

    def take(self, transfer: Transfer, device: torch.device) -> Any:
        """Wait for `transfer` and return its message on `device`.

        Raises WaitFailed if the peer is lost or silent, ResourceError if this rank cannot take what comes.
        """
        while not self.early or transfer not in self.early:
            arriving, posted = self.posted.popleft()
            try:
                if not self.known:
                    self.specs[arriving] = message_spec.unpack_spec(self.line.description())
                    posted = self._post(self.specs[arriving])
                spec = self.specs[arriving]
                tensors = [self.line.wait(each, leaf) for each, leaf in posted]
            except (OSError, MemoryError, RuntimeError) as error:
                raise self._failure(arriving, error) from error
            if device != self.line.transport_device:
                tensors = [tensor.to(device) for tensor in tensors]
            message = message_spec.rebuild_message(spec, tensors)
            if arriving is transfer:
                return message
            self.early[arriving] = message
        return self.early.pop(transfer)

    def _failure(self, transfer: Transfer, error: Exception) -> PenstockError:
        """What it means that a receive has ended with `error`."""
        if is_out_of_resources(error):
            return ResourceError(f"rank {self.rank} could not receive the {transfer}: {explain_error(error)}")
        return WaitError(f"for the {transfer} from rank {self.source}", self.source, error)

    def _post(self, spec: MessageSpec) -> list[tuple[Any, message_spec.TensorSpec]]:
        return [(self.line.post(leaf), leaf) for leaf in spec.tensors]
