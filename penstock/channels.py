"""Channels: the transfers from one rank to a neighbour, in order, sent without waiting and received ahead.

There is one channel for each direction between two ranks, and each is a process group of its own (see
`schedule/program.py` for its order and `schedule/verify.py` for why it cannot hang). The first step of a new batch
signature sends a description before every message; both ends remember them, and every later step with that signature
sends bare memory into receives that are posted ahead.
"""

import queue
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock import wire
from penstock.comms import Topology
from penstock.control import WaitFailed
from penstock.errors import MismatchError
from penstock.groups import Groups
from penstock.schedule.program import Program, Transfer
from penstock.shared import Borrower, Lender, accept, offer
from penstock.wire import MessageSpec

SOURCE, DESTINATION = 0, 1  # the two ranks of a channel's group
SMALL = 2**16  # bytes; a larger message is worth shared memory, or a thread that waits for it
MOST_COPIED = 2**22  # bytes of small messages kept until the end of the step

Specs = dict[Transfer, MessageSpec]


class Channels:
    """All channels of one rank, for one pipeline."""

    def __init__(self, program: Program, topology: Topology, groups: Groups | None) -> None:
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self._outbox = Outbox()
        if groups is None:
            return
        for source, destination in sorted(program.channels):  # the same order everywhere: opening one waits for its peer
            name = f"{source}-{destination}"
            if topology.rank == source:
                self.outgoing[destination] = Outgoing(Line(groups, topology, name, SOURCE), self._outbox)
            elif topology.rank == destination:
                self.incoming[source] = Incoming(Line(groups, topology, name, DESTINATION), source)

    def begin(self, specs: Specs, known: bool) -> None:
        """Start a step whose messages are described in `specs`, or will be by the time it ends."""
        for outgoing in self.outgoing.values():
            outgoing.begin(specs, known)
        for incoming in self.incoming.values():
            incoming.begin(specs, known)

    def end(self) -> None:
        """The step is over on all ranks, so everything that was sent has been received."""
        self._outbox.empty()


class Line:
    """What a channel goes over: a group for descriptions, one for data, and memory of this machine that both ends see."""

    def __init__(self, groups: Groups, topology: Topology, name: str, end: int) -> None:
        self.gloo = self.data = groups.gloo(name, end, 2)
        self.carrier = torch.device("cpu")
        self.lender: Lender | None = None
        self.borrower: Borrower | None = None
        if topology.backend == "nccl":
            self.data, self.carrier = groups.nccl(f"{name}-nccl", end, 2), topology.device
        elif end == SOURCE:
            self.lender = offer(self.gloo, DESTINATION)
        else:
            self.borrower = accept(self.gloo, SOURCE)


class Outgoing:
    """The sending end of a channel."""

    def __init__(self, line: Line, outbox: "Outbox") -> None:
        self.line, self.outbox = line, outbox
        self.specs: Specs = {}
        self.known = False

    def begin(self, specs: Specs, known: bool) -> None:
        """As `Channels.begin`."""
        self.specs, self.known = specs, known

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as `transfer` without waiting. Raises MismatchError if it is not what was agreed."""
        if self.known and isinstance(value, Tensor) and self.specs[transfer].describes(value):  # the common case
            self._send(value, self.specs[transfer].leaves[0])
            return
        leaves, tree = wire.flatten(value)
        spec = wire.describe(leaves, tree)
        if not self.known:
            self.specs[transfer] = spec
            for part in wire.pack(spec):
                self.outbox.post(self.line.gloo, part, wire.describe_tensor(part), None)
        elif spec != (agreed := self.specs[transfer]):
            leaves, spec = _fit(transfer, leaves, spec, agreed), agreed
        for leaf, leaf_spec in zip(leaves, spec.leaves, strict=True):
            self._send(leaf, leaf_spec)

    def _send(self, leaf: Any, spec: wire.TensorSpec | wire.Constant) -> None:
        if isinstance(spec, wire.TensorSpec) and leaf.numel():
            self.outbox.post(
                self.line.data, leaf if leaf.device == self.line.carrier else leaf.to(self.line.carrier), spec, self.line.lender
            )


def _fit(transfer: Transfer, leaves: list[Any], spec: MessageSpec, agreed: MessageSpec) -> list[Any]:
    """`leaves` as `agreed` describes them, where only the layout differs or a gradient is absent; else MismatchError."""
    fitted = []
    for leaf, leaf_spec, wanted in zip(leaves, spec.leaves, agreed.leaves, strict=False):
        if isinstance(wanted, wire.TensorSpec) and leaf is None:
            leaf = torch.zeros(wanted.shape, dtype=wanted.dtype)
        elif not isinstance(wanted, wire.TensorSpec) or not isinstance(leaf_spec, wire.TensorSpec):
            if leaf_spec != wanted:
                break
        elif leaf_spec._replace(stride=wanted.stride) != wanted:
            break
        fitted.append(leaf)
    if len(fitted) != len(agreed.leaves) or len(leaves) != len(agreed.leaves) or spec.tree != agreed.tree:
        raise MismatchError(
            f"the {transfer} is ({spec}), but in an earlier step with the same batch shapes it was ({agreed}): "
            "what passes between stages may depend on the shapes of the batch, not on its values"
        )
    return fitted


Posted = tuple[Tensor, Any]  # a buffer or a ticket, and the work that fills it, None if there is nothing to receive


class Incoming:
    """The receiving end of a channel."""

    def __init__(self, line: Line, source: int) -> None:
        self.line, self.source = line, source
        self.specs: Specs = {}
        self.known = False
        self.posted: deque[tuple[Transfer, list[Posted]]] = deque()
        self.early: dict[Transfer, Any] = {}  # arrived, to be consumed later

    def begin(self, specs: Specs, known: bool) -> None:
        """As `Channels.begin`."""
        self.specs, self.known = specs, known

    def post(self, transfer: Transfer) -> None:
        """Post the receives of `transfer`, the next of this channel."""
        posted = [self._post(spec) for spec in self.specs[transfer].tensors] if self.known else []
        self.posted.append((transfer, posted))

    def take(self, transfer: Transfer, device: torch.device) -> Any:
        """Wait for `transfer` and return its message on `device`. Raises WaitFailed if the peer is lost or silent."""
        while transfer not in self.early:
            arriving, posted = self.posted.popleft()
            try:
                if not self.known:
                    self.specs[arriving] = self._receive_description()
                    posted = [self._post(spec) for spec in self.specs[arriving].tensors]
                spec = self.specs[arriving]
                tensors = [self._wait(*each, leaf) for each, leaf in zip(posted, spec.tensors, strict=True)]
                if device != self.line.carrier:
                    tensors = [tensor.to(device) for tensor in tensors]
            except (RuntimeError, OSError) as error:
                raise WaitFailed(f"for the {transfer} from rank {self.source}", self.source, error) from error
            self.early[arriving] = wire.rebuild(spec, tensors)
        return self.early.pop(transfer)

    def _post(self, spec: wire.TensorSpec) -> Posted:
        """Post one receive: of a ticket where the data lies in shared memory, else into a fresh buffer."""
        if self.line.borrower is not None and spec.bytes > SMALL:
            ticket = torch.empty(1, dtype=torch.int64)
            return ticket, self.line.data.recv([ticket], SOURCE, 0)
        buffer = wire.empty(spec, self.line.carrier)
        return buffer, self.line.data.recv([wire.memory(buffer, spec)], SOURCE, 0) if buffer.numel() else None

    def _wait(self, buffer: Tensor, work: Any, spec: wire.TensorSpec) -> Tensor:
        if work is not None:
            work.wait()
        if self.line.borrower is not None and spec.bytes > SMALL:
            return self.line.borrower.borrow(buffer, spec)
        return buffer

    def _receive_description(self) -> MessageSpec:
        size = torch.empty(1, dtype=torch.int64)
        self.line.gloo.recv([size], SOURCE, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.line.gloo.recv([data], SOURCE, 0).wait()
        return wire.unpack(data)


class Outbox:
    """What a rank is sending, kept alive until it is gone.

    Gloo tells only those who wait that a message is gone. So small ones are copied, and the copies stay, a bounded amount,
    until the step is over; large ones are copied into shared memory. Where there is none, a thread waits for them.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Tensor]] = []
        self._room = MOST_COPIED
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = False

    def post(self, group: Any, tensor: Tensor, spec: wire.TensorSpec, lender: Lender | None) -> None:
        """Send `tensor` as `spec` through `group`, or through the memory of `lender` and a ticket for it through `group`."""
        if lender is not None and spec.bytes > SMALL:
            data = lender.lend(tensor, spec)
        elif spec.bytes <= min(SMALL, self._room):
            data = wire.copied(tensor, spec)
            self._room -= spec.bytes
        else:
            data = wire.memory(tensor, spec)
            self._wait_for(group.send([data], DESTINATION, 0), data)
            return
        self._kept.append((group.send([data], DESTINATION, 0), data))

    def _wait_for(self, work: Any, data: Tensor) -> None:
        if not self._waiting:
            threading.Thread(target=_wait_for_each, args=(self._sent,), name="penstock-sent", daemon=True).start()
            self._waiting = True
        self._sent.put((work, data))

    def empty(self) -> None:
        """Let go of what the step before sent."""
        for work, _ in self._kept:
            with suppress(RuntimeError):  # a peer that has what it needs may have ended
                work.wait()
        self._kept.clear()
        self._room = MOST_COPIED

    def __del__(self) -> None:
        self._sent.put(None)


def _wait_for_each(sent: "queue.SimpleQueue[Any]") -> None:
    while (item := sent.get()) is not None:
        with suppress(RuntimeError):  # the group is closed; whoever waits on it tells why
            item[0].wait()
        item = None  # let the tensor go before waiting for the next
