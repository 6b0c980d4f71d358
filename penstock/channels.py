"""Channels: the transfers from one rank to a neighbour, in order, sent without waiting and received ahead.

There is one channel for each direction between two ranks, and each is a process group of its own (see
`schedule/program.py` for its order and `schedule/verify.py` for why it cannot hang). The first step of a new batch
signature sends a description before every message; both ends remember them, and every later step with that signature
sends bare memory into receives that are posted ahead.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
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
SMALL = 2**16  # bytes; a larger message is worth a thread and shared memory
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
        self.known = self.threaded = False

    def begin(self, specs: Specs, known: bool) -> None:
        """As `Channels.begin`."""
        self.specs, self.known, self.threaded = specs, known, False

    def send(self, transfer: Transfer, value: Any) -> None:
        """Send `value` as `transfer` without waiting. Raises MismatchError if it is not what was agreed."""
        leaves, tree = wire.flatten(value)
        spec = wire.describe(leaves, tree)
        if not self.known:
            self.specs[transfer] = spec
            for part in wire.pack(spec):
                self._post(self.line.gloo, part, SMALL)
        elif spec != (agreed := self.specs[transfer]):
            leaves, spec = _fit(transfer, leaves, spec, agreed), agreed
        for leaf, leaf_spec in zip(leaves, spec.leaves, strict=True):
            if isinstance(leaf_spec, wire.TensorSpec) and leaf.numel():
                data = wire.memory(leaf.to(self.line.carrier), leaf_spec)
                self._post(self.line.data, data, data.numel() * data.element_size())

    def _post(self, group: Any, data: Tensor, size: int) -> None:
        """Small messages are posted here and now, large ones by the outbox's thread - and then, in this step, all others
        of the channel as well, so that they stay in order.
        """
        self.threaded = self.threaded or size > SMALL
        lender = self.line.lender if size > SMALL else None
        self.outbox.post(group, data, size, lender, self.threaded)


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
                tensors = [self._wait(*each, leaf).to(device) for each, leaf in zip(posted, spec.tensors, strict=True)]
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
            return wire.shaped(self.line.borrower.borrow(buffer, spec.bytes), spec)
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
    until the step is over. Large ones go into shared memory where there is some; else they are waited for by a thread.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Tensor]] = []
        self._room = MOST_COPIED
        self._to_post, self._to_wait = _Thread("penstock-post"), _Thread("penstock-sent")

    def post(self, group: Any, data: Tensor, size: int, lender: Lender | None, threaded: bool) -> None:
        """Send `data`, of `size` bytes, through `group` or `lender`, in a thread or here."""
        if lender is None and size <= min(SMALL, self._room):
            self._room -= size
            data, keep = data.clone(), self._keep
        elif lender is None:
            keep = self._wait_for
        else:
            keep = self._keep
        if threaded:
            self._to_post.do(_post, group, data, lender, keep)
        else:
            _post(group, data, lender, keep)

    def _keep(self, work: Any, data: Tensor) -> None:
        self._kept.append((work, data))

    def _wait_for(self, work: Any, data: Tensor) -> None:
        self._to_wait.do(_wait_and_let_go, work, data)

    def empty(self) -> None:
        """Let go of what the step before sent."""
        for work, _ in self._kept:
            with suppress(RuntimeError):  # a peer that has what it needs may have ended
                work.wait()
        self._kept.clear()
        self._room = MOST_COPIED


def _post(group: Any, data: Tensor, lender: Lender | None, keep: Callable[[Any, Tensor], None]) -> None:
    if lender is not None:
        data = lender.lend(data)
    keep(group.send([data], DESTINATION, 0), data)


def _wait_and_let_go(work: Any, data: Tensor) -> None:
    del data  # the caller's reference is this frame's alone
    work.wait()


class _Thread:
    """Does one thing after another, beside the compute; started when first needed."""

    def __init__(self, name: str) -> None:
        self._name, self._queue, self._started = name, queue.SimpleQueue[Any](), False

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Do `function(*args)` after all that came before."""
        if not self._started:
            threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
            self._started = True
        self._queue.put((function, *args))

    def __del__(self) -> None:
        self._queue.put(None)


def _work(things: "queue.SimpleQueue[Any]") -> None:
    while (thing := things.get()) is not None:
        with suppress(RuntimeError, OSError):  # the group is closed; whoever waits on it tells why
            thing[0](*thing[1:])
        thing = None  # let it go before waiting for the next
