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
from penstock.wire import MessageSpec

SOURCE, DESTINATION = 0, 1  # the two ranks of a channel's group

Specs = dict[Transfer, MessageSpec]


class Channels:
    """All channels of one rank, for one pipeline."""

    def __init__(self, program: Program, topology: Topology, groups: Groups | None) -> None:
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        if groups is None:
            return
        kept = _Kept() if topology.backend == "gloo" else _KeptOnGpu()
        for source, destination in sorted(program.channels):  # the same order everywhere: opening one waits for its peer
            if topology.rank == source:
                self.outgoing[destination] = Outgoing(*_open(groups, topology, source, destination), kept)
            elif topology.rank == destination:
                self.incoming[source] = Incoming(*_open(groups, topology, source, destination), source)

    def begin(self, specs: Specs, known: bool) -> None:
        """Start a step whose messages are described in `specs`, or will be by the time it ends."""
        channels: list[Outgoing | Incoming] = [*self.outgoing.values(), *self.incoming.values()]
        for channel in channels:
            channel.specs, channel.known = specs, known


def _open(groups: Groups, topology: Topology, source: int, destination: int) -> tuple[Any, Any, torch.device]:
    """The groups of a channel for descriptions and for data, and the device data is carried on."""
    end, name = (SOURCE if topology.rank == source else DESTINATION), f"{source}-{destination}"
    gloo = groups.gloo(name, end, 2)
    if topology.backend == "nccl":
        return gloo, groups.nccl(f"{name}-nccl", end, 2), topology.device
    return gloo, gloo, torch.device("cpu")


class Outgoing:
    """The sending end of a channel."""

    def __init__(self, headers: Any, group: Any, carrier: torch.device, kept: "_Kept | _KeptOnGpu") -> None:
        self.headers, self.group, self.carrier, self.kept = headers, group, carrier, kept
        self.specs: Specs = {}
        self.known = False

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as `transfer` without waiting. Raises MismatchError if it is not what was agreed."""
        leaves, tree = wire.flatten(value)
        spec = wire.describe(leaves, tree)
        if not self.known:
            self.specs[transfer] = spec
            self._send_description(spec)
        elif spec != (agreed := self.specs[transfer]):
            leaves, spec = _fit(transfer, leaves, spec, agreed), agreed
        for leaf, leaf_spec in zip(leaves, spec.leaves, strict=True):
            if isinstance(leaf_spec, wire.TensorSpec) and leaf.numel():
                data = wire.memory(leaf.to(self.carrier), leaf_spec)
                self.kept.add(self.group.send([data], DESTINATION, 0), data)

    def _send_description(self, spec: MessageSpec) -> None:
        data = wire.pack(spec)
        for part in (torch.tensor([data.numel()]), data):
            self.kept.add(self.headers.send([part], DESTINATION, 0), part)


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


class Incoming:
    """The receiving end of a channel."""

    def __init__(self, headers: Any, group: Any, carrier: torch.device, source: int) -> None:
        self.headers, self.group, self.carrier, self.source = headers, group, carrier, source
        self.specs: Specs = {}
        self.known = False
        self.posted: deque[tuple[Transfer, list[Tensor], list[Any]]] = deque()
        self.early: dict[Transfer, Any] = {}  # arrived, to be consumed later

    def post(self, transfer: Transfer) -> None:
        """Post the receives of `transfer`, the next of this channel, into fresh buffers."""
        buffers, works = self._receive(self.specs[transfer]) if self.known else ([], [])
        self.posted.append((transfer, buffers, works))

    def take(self, transfer: Transfer, device: torch.device) -> Any:
        """Wait for `transfer` and return its message on `device`. Raises WaitFailed if the peer is lost or silent."""
        while transfer not in self.early:
            arriving, buffers, works = self.posted.popleft()
            try:
                if not self.known:
                    self.specs[arriving] = self._receive_description()
                    buffers, works = self._receive(self.specs[arriving])
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise WaitFailed(f"for the {transfer} from rank {self.source}", self.source, error) from error
            self.early[arriving] = wire.rebuild(self.specs[arriving], [buffer.to(device) for buffer in buffers])
        return self.early.pop(transfer)

    def _receive(self, spec: MessageSpec) -> tuple[list[Tensor], list[Any]]:
        buffers = [wire.empty(leaf, self.carrier) for leaf in spec.tensors]
        flat = [wire.memory(buffer, leaf) for buffer, leaf in zip(buffers, spec.tensors, strict=True)]
        return buffers, [self.group.recv([data], SOURCE, 0) for data in flat if data.numel()]

    def _receive_description(self) -> MessageSpec:
        size = torch.empty(1, dtype=torch.int64)
        self.headers.recv([size], SOURCE, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.headers.recv([data], SOURCE, 0).wait()
        return wire.unpack(data)


class _Kept:
    """Sent tensors, kept alive until they are gone. Gloo only tells those who wait, so a thread of its own waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_wait_for_each, args=(self._queue,), name="penstock-sent", daemon=True).start()

    def add(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is done."""
        self._queue.put((work, tensor))

    def __del__(self) -> None:
        self._queue.put(None)


def _wait_for_each(sent: "queue.SimpleQueue[Any]") -> None:
    while (item := sent.get()) is not None:
        with suppress(RuntimeError):  # the group is closed; whoever waits on it tells why
            item[0].wait()
        item = None  # let the tensor go before waiting for the next


class _KeptOnGpu:
    """Sent tensors, kept alive until they are gone. NCCL's works can be asked; waiting would block the compute stream."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def add(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is done; let go of those that are."""
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
