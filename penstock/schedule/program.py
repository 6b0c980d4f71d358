"""The program: a table lowered to what each rank does: its actions, and when it posts and waits for which transfers.

A *channel* carries the transfers from one rank to another; each direction has its own. Its order is the order in which
the sender's table makes them. The receiver posts its receives in the same order, whatever order it needs them in.
First-in-first-out transports require this agreement (NCCL: a communicator runs its operations in the order they were
posted).

Every stage sends to the next one. A model that is not a chain also has *skips*: a stage's output goes straight to a later
stage, and its gradient straight back.

A *script* is what `prove` runs: the same, post by post. A program is read as one; PyTorch's lowered tables are scripts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.table import (
    Action,
    Cell,
    Chains,
    Kind,
    Skip,
    Table,
    pause_garbage_collection,
    receiving_stages,
    sending_stages,
)

RECEIVES_AHEAD = 2  # receives of a channel: one that is waited for, one that travels while the rank computes


class Transfer(NamedTuple):
    """A tensor that `source` gives `destination` after `action`: the stage's output after F, its input's gradient after B or I.

    If both are the same rank, nothing is sent.
    """

    action: Action
    source: int
    destination: int
    skip_stage: int | None = None  # the receiving stage, if it is not the neighbour

    @property
    def is_remote(self) -> bool:
        """Return whether it goes to another rank."""
        return self.source != self.destination

    def __str__(self) -> str:
        what = "output" if self.action.kind is Kind.F else "gradient"
        return f"{what} of {self.action}" + ("" if self.skip_stage is None else f" for stage {self.skip_stage}")


class ProgramLine(NamedTuple):
    """An action in a rank's program: post `receives`, wait for `needs`, run `action`, post `outputs`."""

    action: Action
    receives: tuple[Transfer, ...]
    needs: tuple[Transfer, ...]  # one for each stage that it receives from, in stage order
    outputs: tuple[Transfer, ...]  # one for each stage that it sends to, in stage order


class Compute(NamedTuple):
    """An instruction to wait for `needs` and then run `cell`: an action, a pair at once, or nothing."""

    cell: Cell | None
    needs: tuple[Transfer, ...]


Instruction = Transfer | Compute  # a transfer: post its send on its source, its receive on its destination


@dataclass(frozen=True)
class Script:
    """The instructions of every rank. They run the table, and post each end of every transfer once, before it is needed."""

    schedule: Table
    rows: tuple[tuple[Instruction, ...], ...]

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Return the instructions of `rank`."""
        return iter(self.rows[rank])


@dataclass(frozen=True)
class Program:
    """The program of a table: made when it is read, for one rank or for all.

    `ahead`: the most receives of a channel that may be posted and not yet consumed; 0 posts each when it is needed.
    """

    schedule: Table
    ahead: int = RECEIVES_AHEAD
    skips: frozenset[Skip] = frozenset()

    @cached_property
    def lines(self) -> tuple[tuple[ProgramLine, ...], ...]:
        """The lines of every rank. A rank that needs only its own calls `rank_lines`."""
        return tuple(self._lines_of_rank(rank, self._transfers) for rank in range(self.schedule.ranks))

    @cached_property
    def channels(self) -> dict[tuple[int, int], tuple[Transfer, ...]]:
        """The transfers of every channel (source, destination), in the order in which they are made."""
        return {ends: tuple(queue) for ends, queue in self._transfers.channels.items()}

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """The channels that the table may need, as (source, destination)."""
        return channels_between(self.schedule.placement, self.schedule.chains, self.skips)

    @cached_property
    def _transfers(self) -> "TransferTable":
        return TransferTable(self.schedule, self.skips, range(self.schedule.ranks))

    @pause_garbage_collection()
    def rank_lines(self, rank: int) -> tuple[ProgramLine, ...]:
        """Return the lines of `rank`. Only the rows of `rank` and of those that send to it are read."""
        sources = {source for source, destination in self.links if destination == rank}
        return self._lines_of_rank(rank, TransferTable(self.schedule, self.skips, sorted({rank, *sources})))

    def _lines_of_rank(self, rank: int, transfers: "TransferTable") -> tuple[ProgramLine, ...]:
        inboxes = {
            source: _ReceiveQueue(queue, self.ahead)
            for (source, destination), queue in transfers.channels.items()
            if destination == rank
        }
        return tuple(_lines_of_row(self.schedule.actions[rank], dict(self.schedule.overlaps), transfers, inboxes))

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Yield the instructions of `rank`. A pair runs after the receives, and before the sends, of both its actions."""
        steps = iter(self.lines[rank])
        for cell in self.schedule.cells(rank):
            _, receives, needs, gives = next(steps)
            if not isinstance(cell, Action):
                _, *more = next(steps)
                receives, needs, gives = receives + more[0], needs + more[1], gives + more[2]
            yield from receives
            yield Compute(cell, remote_transfers(needs))
            yield from remote_transfers(gives)


def channels_between(placement: Sequence[int], chains: Chains, skips: Collection[Skip] = ()) -> list[tuple[int, int]]:
    """Return the channels that tables of these stages may need, as (source, destination): both ways between two ranks."""
    pairs = [(placement[start], placement[end]) for start, end in chains.links(skips)]
    return sorted({ends for pair in pairs for ends in (pair, pair[::-1]) if ends[0] != ends[1]})


def remote_transfers(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Return the transfers that go to another rank."""
    return tuple([transfer for transfer in transfers if transfer.is_remote])


def check_skips(skips: Collection[Skip], num_stages: int) -> None:
    """Raise ScheduleError for a skip that a model of `num_stages` stages cannot have."""
    for start, end in skips:
        if not 0 <= start < end - 1 < num_stages - 1:
            raise ScheduleError(f"no skip goes from stage {start} to stage {end} of {num_stages}: it passes at least one by")


class TransferTable:
    """The transfers that `sources` make, ranks of a table: by action, and by channel in the order in which they are made."""

    def __init__(self, schedule: Table, skips: Collection[Skip], sources: Iterable[int]) -> None:
        self.channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        # (stage, receiving stage) -> microbatch + M x slice -> transfer
        self.by_stages: dict[tuple[int, int], dict[int, Transfer]] = defaultdict(dict)
        self._microbatches = schedule.microbatches
        links, receivers = self.by_stages, receiving_stages(schedule.chains, skips)
        senders = sending_stages(schedule.chains, skips)
        self._makes = {kind: [[(to, links[s, to]) for to in ends] for s, ends in enumerate(receivers[kind])] for kind in Kind}
        self._needs = {kind: [[links[start, s] for start in starts] for s, starts in enumerate(senders[kind])] for kind in Kind}
        for source in sources:
            for action in schedule.actions[source]:
                kind, stage, microbatch, slice_ = action
                for receiver, link in self._makes[kind][stage]:
                    destination, skip_stage = schedule.placement[receiver], receiver if abs(receiver - stage) > 1 else None
                    transfer = Transfer(action, source, destination, skip_stage)
                    link[microbatch + slice_ * schedule.microbatches] = transfer
                    if source != destination:
                        self.channels[source, destination].append(transfer)

    def outputs_of(self, action: Action) -> tuple[Transfer, ...]:
        """Return the transfers of what `action` makes, one for each stage that needs it."""
        number = action.microbatch + action.slice * self._microbatches
        return tuple([link[number] for _, link in self._makes[action.kind][action.stage]])

    def inputs_of(self, action: Action) -> tuple[Transfer, ...]:
        """Return the transfers of the inputs of `action`, without those that the table does not make."""
        number = action.microbatch + action.slice * self._microbatches
        return tuple([link[number] for link in self._needs[action.kind][action.stage] if number in link])


def lower(schedule: Table, ahead: int = RECEIVES_AHEAD, skips: Collection[Skip] = ()) -> Program:
    """Return the program of `schedule`, whose actions must be in range (`verify` checks that first).

    `ahead`: the most receives of a channel that may be posted and not yet consumed; 0 posts each when it is needed. More are
    posted only where the table consumes a channel in another order than it is filled. The inputs of an overlapping pair are
    posted before its first action, so that the pair can wait for both.
    `skips`: of the model, as in `verify`.
    """
    return Program(schedule, ahead, frozenset(skips))


class _ReceiveQueue:
    """The receiving end of one channel while its rank's program is written. It decides which receives to post when."""

    def __init__(self, queue: list[Transfer], ahead: int) -> None:
        self.queue, self.ahead = queue, ahead
        self.position = {transfer: index for index, transfer in enumerate(queue)}
        self.posted = self.consumed = 0

    def take_receives_up_to(self, end_position: int) -> list[Transfer]:
        """Return the receives up to `end_position` of the queue that are not posted yet, and count them as posted."""
        fresh = self.queue[self.posted : end_position]
        self.posted += len(fresh)
        return fresh

    def take_receives_before(self, transfer: Transfer) -> list[Transfer]:
        """Return the receives to post before `transfer` can be waited for."""
        return self.take_receives_up_to(self.position[transfer] + 1)

    def take_receives_after_use(self) -> list[Transfer]:
        """Return the receives to post after one more transfer has been used."""
        self.consumed += 1
        return self.take_receives_up_to(self.consumed + self.ahead)


def _lines_of_row(
    row: Iterable[Action], pair_partners: dict[Action, Action], transfers: TransferTable, inboxes: dict[int, _ReceiveQueue]
) -> Iterator[ProgramLine]:
    fresh = [transfer for inbox in inboxes.values() for transfer in inbox.take_receives_up_to(inbox.ahead)]
    for action in row:
        needs = transfers.inputs_of(action)
        awaited = needs + transfers.inputs_of(pair_partners[action]) if action in pair_partners else needs
        for transfer in awaited:
            if transfer.is_remote:
                fresh += inboxes[transfer.source].take_receives_before(transfer)
        yield ProgramLine(action, tuple(fresh), needs, transfers.outputs_of(action))
        fresh = [
            late for transfer in needs if transfer.is_remote for late in inboxes[transfer.source].take_receives_after_use()
        ]
