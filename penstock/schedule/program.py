"""The program: a table lowered to what each rank does - actions, and which transfers it posts and waits for when.

A *channel* carries the transfers from one rank to another, one channel for each direction. Its order is the order in
which the sender's table makes them; the receiver posts its receives in that same order, whatever order it needs them in.
So both ends of a channel agree by construction, which is what a first-in-first-out transport asks for (NCCL: a
communicator runs its operations in the order they were posted).

A *script* is what `prove` runs: the same, post by post. A program is read as one; a lowered table of somebody else is one.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.actions import Action, Cell, Kind, Schedule

RECEIVES_AHEAD = 2  # of one channel: the one being waited for, and one that travels while the rank computes


class Transfer(NamedTuple):
    """What `source` sends to `destination` after `action`: the stage's output after F, its input's gradient after B or I."""

    action: Action
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{'output' if self.action.kind is Kind.F else 'gradient'} of {self.action}"


class Step(NamedTuple):
    """One action of a rank's program: post `receives`, wait for `needs`, run `action`, post `sends`."""

    action: Action
    receives: tuple[Transfer, ...]
    needs: Transfer | None
    sends: Transfer | None


class Run(NamedTuple):
    """Wait for `needs`, then run `cell`: an action, a pair at once, or nothing."""

    cell: Cell | None
    needs: tuple[Transfer, ...]


Instruction = Transfer | Run  # a transfer: post it, that is its send on its source and its receive on its destination


@dataclass(frozen=True)
class Script:
    """What every rank does, one after the other: it runs its table, and posts its end of each transfer once, in time."""

    schedule: Schedule
    rows: tuple[tuple[Instruction, ...], ...]

    def row(self, rank: int) -> Iterator[Instruction]:
        """What `rank` does."""
        return iter(self.rows[rank])


@dataclass(frozen=True)
class Program:
    """What every rank does, in order, and the transfers of every channel (source, destination), in order."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    channels: dict[tuple[int, int], tuple[Transfer, ...]]

    def row(self, rank: int) -> Iterator[Instruction]:
        """What `rank` does, post by post. A pair runs after the receives, and before the sends, of both its actions."""
        steps = iter(self.steps[rank])
        for cell in self.schedule.cells(rank):
            if isinstance(cell, Action):
                _, receives, needs, sends = next(steps)
                yield from receives
                yield Run(cell, () if needs is None else (needs,))
                if sends is not None:
                    yield sends
            else:
                first, second = next(steps), next(steps)
                yield from (*first.receives, *second.receives)
                yield Run(cell, tuple(filter(None, (first.needs, second.needs))))
                yield from filter(None, (first.sends, second.sends))


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """The actions that stand in one place of a table."""
    return (cell,) if isinstance(cell, Action) else cell


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: tables are many small tuples without a circle; looking for one takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Transfers:
    """All transfers of a table: by what they carry, and by channel in the order in which the table makes them."""

    def __init__(self, schedule: Schedule) -> None:
        home, stages = schedule.placement, range(schedule.stages)
        # stage -> microbatch -> transfer; one entry more, empty, for what no stage makes: the batch [-1] and the loss [S]
        self.outputs: list[dict[int, Transfer]] = [{} for _ in (*stages, None)]
        self.gradients: list[dict[int, Transfer]] = [{} for _ in (*stages, None)]
        self.channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for source, row in enumerate(schedule.actions):
            for action in row:
                kind, stage, microbatch = action
                if kind is Kind.W:
                    continue
                carried, taker = (self.outputs, stage + 1) if kind is Kind.F else (self.gradients, stage - 1)
                if taker in stages and home[taker] != source:
                    carried[stage][microbatch] = transfer = Transfer(action, source, home[taker])
                    self.channels[source, home[taker]].append(transfer)

    def made_by(self, action: Action) -> Transfer | None:
        """What takes to another rank what `action` makes."""
        kind, stage, microbatch = action
        if kind is Kind.F:
            return self.outputs[stage].get(microbatch)
        return self.gradients[stage].get(microbatch) if kind is not Kind.W else None

    def needed_by(self, action: Action) -> Transfer | None:
        """What brings from another rank what `action` works on."""
        kind, stage, microbatch = action
        if kind is Kind.F:
            return self.outputs[stage - 1].get(microbatch)
        return self.gradients[stage + 1].get(microbatch) if kind is not Kind.W else None


@collector_paused()
def lower(schedule: Schedule, ahead: int = RECEIVES_AHEAD) -> Program:
    """The program of `schedule`, with at most `ahead` receives of a channel posted and not yet consumed.

    More are posted only where the table consumes a channel in another order than it is filled. `ahead` = 0 posts a
    receive when it is needed and not before. What an overlapping pair needs is posted with its first action, so that the
    pair can wait for both. Expects actions in range (`verify` checks that first).
    """
    transfers, together = Transfers(schedule), dict(schedule.overlaps)
    inboxes: dict[int, dict[int, _Inbox]] = {rank: {} for rank in range(schedule.ranks)}
    for (source, destination), queue in transfers.channels.items():
        inboxes[destination][source] = _Inbox(queue, ahead)
    steps = tuple(tuple(_steps(row, together, transfers, inboxes[rank])) for rank, row in enumerate(schedule.actions))
    return Program(schedule, steps, {ends: tuple(queue) for ends, queue in transfers.channels.items()})


class _Inbox:
    """The receiving end of one channel while its rank's program is written."""

    def __init__(self, queue: list[Transfer], ahead: int) -> None:
        self.queue, self.ahead = queue, ahead
        self.position = {transfer: index for index, transfer in enumerate(queue)}
        self.posted = self.consumed = 0

    def post(self, upto: int) -> list[Transfer]:
        """The receives to post so that `upto` of the queue have been."""
        fresh = self.queue[self.posted : upto]
        self.posted += len(fresh)
        return fresh

    def expect(self, transfer: Transfer) -> list[Transfer]:
        """The receives to post before `transfer` can be waited for."""
        return self.post(self.position[transfer] + 1)

    def consume(self) -> list[Transfer]:
        """The receives to post when one more transfer has been used."""
        self.consumed += 1
        return self.post(self.consumed + self.ahead)


def _steps(
    row: Iterable[Action], together: dict[Action, Action], transfers: Transfers, inboxes: dict[int, _Inbox]
) -> Iterator[Step]:
    fresh = [transfer for inbox in inboxes.values() for transfer in inbox.post(inbox.ahead)]
    for action in row:
        needs = transfers.needed_by(action)
        if needs is not None:
            fresh += inboxes[needs.source].expect(needs)
        if action in together and (also := transfers.needed_by(together[action])) is not None:
            fresh += inboxes[also.source].expect(also)
        yield Step(action, tuple(fresh), needs, transfers.made_by(action))
        fresh = [] if needs is None else inboxes[needs.source].consume()
