"""The program: a table lowered to what each rank does - actions, and which transfers it posts and waits for when.

A *channel* carries the transfers from one rank to another, one channel for each direction. Its order is the order in
which the sender's table makes them; the receiver posts its receives in that same order, whatever order it needs them in.
So both ends of a channel agree by construction, which is what a first-in-first-out transport asks for (NCCL: a
communicator runs its operations in the order they were posted).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schedule.actions import Action, Kind, Schedule

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


@dataclass(frozen=True)
class Program:
    """What every rank does, in order, and the transfers of every channel (source, destination), in order."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    channels: dict[tuple[int, int], tuple[Transfer, ...]]


def lower(schedule: Schedule, ahead: int = RECEIVES_AHEAD) -> Program:
    """The program of `schedule`, with at most `ahead` receives of a channel posted and not yet consumed.

    More are posted only where the table consumes a channel in another order than it is filled. `ahead` = 0 posts a
    receive when it is needed and not before. Expects actions in range (`verify` checks that first).
    """
    transfers, channels = _transfers(schedule)
    steps = tuple(
        tuple(_steps(row, rank, transfers, channels, ahead, schedule.stages)) for rank, row in enumerate(schedule.actions)
    )
    return Program(schedule, steps, {ends: tuple(queue) for ends, queue in channels.items()})


Channels = dict[tuple[int, int], list[Transfer]]


def _transfers(schedule: Schedule) -> tuple[dict[Action, Transfer], Channels]:
    """The transfer every action causes, if any, and the channels they fill."""
    transfers: dict[Action, Transfer] = {}
    channels: Channels = defaultdict(list)
    for source, row in enumerate(schedule.actions):
        for action in row:
            receiver = _receiver(action, schedule.stages)
            if receiver is not None and (destination := schedule.placement[receiver]) != source:
                transfers[action] = transfer = Transfer(action, source, destination)
                channels[source, destination].append(transfer)
    return transfers, channels


def _receiver(action: Action, stages: int) -> int | None:
    """The stage that needs what `action` makes."""
    if action.kind is Kind.F:
        return action.stage + 1 if action.stage + 1 < stages else None
    return action.stage - 1 if action.kind is not Kind.W and action.stage > 0 else None


def _needed(action: Action, transfers: dict[Action, Transfer], stages: int) -> Transfer | None:
    """The transfer `action` waits for, if what it needs is made on another rank."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        return transfers.get(Action(Kind.F, stage - 1, microbatch)) if stage > 0 else None
    if kind is Kind.W or stage + 1 >= stages:
        return None
    full = transfers.get(Action(Kind.B, stage + 1, microbatch))
    return full or transfers.get(Action(Kind.I, stage + 1, microbatch))


@dataclass
class _Inbox:
    """The receiving end of one channel while its rank's program is written."""

    queue: list[Transfer]
    posted: int = 0
    consumed: int = 0
    position: dict[Transfer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = {transfer: index for index, transfer in enumerate(self.queue)}

    def post(self, upto: int) -> list[Transfer]:
        """The receives to post so that `upto` of the queue have been."""
        fresh = self.queue[self.posted : upto]
        self.posted += len(fresh)
        return fresh


def _steps(
    row: tuple[Action, ...], rank: int, transfers: dict[Action, Transfer], channels: Channels, ahead: int, stages: int
) -> list[Step]:
    inboxes = {ends: _Inbox(queue) for ends, queue in channels.items() if ends[1] == rank}
    fresh = [transfer for inbox in inboxes.values() for transfer in inbox.post(ahead)]
    steps = []
    for action in row:
        needs = _needed(action, transfers, stages)
        if needs is not None:
            inbox = inboxes[needs.source, rank]
            fresh += inbox.post(inbox.position[needs] + 1)
        steps.append(Step(action, tuple(fresh), needs, transfers.get(action)))
        fresh = []
        if needs is not None:
            inbox.consumed += 1
            fresh += inbox.post(inbox.consumed + ahead)
    return steps
