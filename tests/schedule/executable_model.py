"""What a table does when it is executed: the model that `verify` and `simulate` are judged against.

Nothing in here is shared with the code under test but the data types. Every rank is a coroutine that works through its
row, makes values and waits for values; the network moves a value only while its sender offers it and its receiver has
posted a receive for it, in the order in which the sender's row makes them.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.schedule import Action, Schedule


class Value(NamedTuple):
    """What one action makes and another takes, and the stage that takes it."""

    what: str  # activation, gradient, saved (for the backward), owed (for the weights)
    stage: int
    microbatch: int


def takes(action: Action, stages: int) -> list[Value]:
    """The values `action` works on."""
    kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
    wanted = {"F": ["activation"], "B": ["saved", "gradient"], "I": ["saved", "gradient"], "W": ["owed"]}[kind]
    outside = {"activation": 0, "gradient": stages - 1}  # the batch and the loss come from no stage
    return [Value(what, stage, microbatch) for what in wanted if outside.get(what) != stage]


def makes(action: Action, stages: int) -> list[Value]:
    """The values `action` leaves behind, for its own stage or a neighbour."""
    kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
    made = {
        "F": [("saved", stage), ("activation", stage + 1)],
        "B": [("gradient", stage - 1)],
        "I": [("owed", stage), ("gradient", stage - 1)],
        "W": [],
    }[kind]
    return [Value(what, to, microbatch) for what, to in made if 0 <= to < stages]


def does_the_work(schedule: Schedule) -> bool:
    """Whether the rows, in any order, are one training step: all of it, once, each part on its own rank."""
    found = Counter(
        (rank, action.stage, action.microbatch, action.kind.value)
        for rank, row in enumerate(schedule.actions)
        for action in row
    )
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            place = rank, stage, microbatch
            step = "FB" if (*place, "B") in found else "FIW"
            for kind in step:
                if found.pop((*place, kind), 0) != 1:
                    return False
    return not found


Condition = Callable[[], bool]


class Network:
    """Values offered, receives posted, values arrived. Nothing is buffered."""

    def __init__(self, schedule: Schedule) -> None:
        self.order: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for source, row in enumerate(schedule.actions):
            for action in row:
                for value in makes(action, schedule.stages):
                    if schedule.placement[value.stage] != source:
                        self.order[source, schedule.placement[value.stage]].append(value)
        self.offered: set[Value] = set()
        self.posted: dict[tuple[int, int], int] = Counter()  # channel -> how many of its receives
        self.moved: dict[tuple[int, int], int] = Counter()
        self.arrived: set[Value] = set()

    def move(self) -> bool:
        """Move what can be moved; whether anything was."""
        before = len(self.arrived)
        for channel, queue in self.order.items():
            while self.moved[channel] < self.posted[channel] and queue[self.moved[channel]] in self.offered:
                self.arrived.add(queue[self.moved[channel]])
                self.moved[channel] += 1
        return len(self.arrived) > before


def _rank(schedule: Schedule, rank: int, network: Network, blocking: bool, at: list[int]) -> Iterator[Condition]:
    """One rank at work; yields a condition whenever it cannot go on before that holds."""
    stages, here = schedule.stages, set[Value]()
    incoming = {value: channel for channel, queue in network.order.items() if channel[1] == rank for value in queue}
    if not blocking:  # all receives are posted ahead
        for channel in set(incoming.values()):
            network.posted[channel] = len(network.order[channel])
    for action in schedule.actions[rank]:
        for value in takes(action, stages):
            if value in incoming:
                queue = network.order[incoming[value]]
                network.posted[incoming[value]] = max(network.posted[incoming[value]], queue.index(value) + 1)
                yield lambda value=value: value in network.arrived
            else:
                yield lambda value=value: value in here
        at[rank] += 1
        for value in makes(action, stages):
            if schedule.placement[value.stage] == rank:
                here.add(value)
            else:
                network.offered.add(value)
                if blocking:
                    yield lambda value=value: value in network.arrived


def execute(schedule: Schedule, blocking: bool = False, seed: int = 0) -> tuple[int, ...]:
    """Execute the table; for every rank, how many of its actions have run when nothing moves any more.

    `seed` decides which rank is looked at when.
    """
    dice, network, at = random.Random(seed), Network(schedule), [0] * schedule.ranks
    ranks = {rank: _rank(schedule, rank, network, blocking, at) for rank in range(schedule.ranks)}
    waiting: dict[int, Condition] = dict.fromkeys(ranks, lambda: True)
    progress = True
    while progress:
        progress = False
        for rank in dice.sample(sorted(waiting), len(waiting)):
            while rank in waiting and waiting[rank]():
                progress = True
                following = next(ranks[rank], None)
                if following is None:
                    del waiting[rank]
                else:
                    waiting[rank] = following
            progress |= network.move()
    return tuple(at)


def is_right(schedule: Schedule, blocking: bool = False, seed: int = 0) -> bool:
    """Whether executing the table is one whole training step and comes to its end."""
    return does_the_work(schedule) and execute(schedule, blocking, seed) == tuple(map(len, schedule.actions))
