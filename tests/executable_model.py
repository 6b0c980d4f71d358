"""What a table does when it is executed: the model that `verify` and `simulate` are judged against.

Nothing in here is shared with the code under test but the data types. Every rank is a coroutine that works through its
row, makes values and waits for values; the network moves a value only when its sender has offered it and its receiver has
posted a receive for it, and nothing that either of them posted before on the same line is left.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from penstock.schedule import Action, Schedule, Skip


class Value(NamedTuple):
    """What one action makes and another takes, and the stage that takes it."""

    what: str  # activation, gradient, saved (for the backward), owed (for the weights)
    stage: int
    microbatch: int
    past: int | None = None  # the stage it comes from, if that is no neighbour


Skips = Collection[Skip]


def takes(action: Action, stages: int, skips: Skips = ()) -> list[Value]:
    """The values `action` works on."""
    kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
    wanted = {"F": ["activation"], "B": ["saved", "gradient"], "I": ["saved", "gradient"], "W": ["owed"]}[kind]
    outside = {"activation": 0, "gradient": stages - 1}  # the batch and the loss come from no stage
    skipping = {
        "activation": [start for start, end in skips if end == stage],
        "gradient": [end for start, end in skips if start == stage],
    }
    near = [Value(what, stage, microbatch) for what in wanted if outside.get(what) != stage]
    return near + [Value(what, stage, microbatch, maker) for what in wanted for maker in skipping.get(what, [])]


def makes(action: Action, stages: int, skips: Skips = ()) -> list[Value]:
    """The values `action` leaves behind, for its own stage, a neighbour or the other end of a skip, from stage to stage."""
    kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
    outputs = [("activation", stage + 1, None), *(("activation", end, stage) for start, end in skips if start == stage)]
    gradients = [("gradient", stage - 1, None), *(("gradient", start, stage) for start, end in skips if end == stage)]
    made = {
        "F": [("saved", stage, None), *outputs],
        "B": gradients,
        "I": [("owed", stage, None), *gradients],
        "W": [],
    }[kind]
    made.sort(key=lambda value: value[1])
    return [Value(what, to, microbatch, past) for what, to, past in made if 0 <= to < stages]


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


def cells(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """The row in groups: the two actions of a pair together, every other one alone."""
    groups: list[tuple[Action, ...]] = []
    for action in schedule.actions[rank]:
        if groups and len(groups[-1]) == 1 and (groups[-1][0], action) in schedule.overlaps:
            groups[-1] = (groups[-1][0], action)
        else:
            groups.append((action,))
    return groups


def pairs_stand(schedule: Schedule) -> bool:
    """Whether every pair can be found in the rows, no action in two of them, and is one forward and one backward."""
    found = [group for rank in range(schedule.ranks) for group in cells(schedule, rank) if len(group) == 2]
    kinds = {"".join(sorted(action.kind.value for action in pair)) for pair in schedule.overlaps}
    return sorted(map(str, found)) == sorted(map(str, schedule.overlaps)) and kinds <= {"BF", "FI"}


Condition = Callable[[], bool]
Channel = tuple[int, int]  # source, destination
Line = Channel | frozenset[int]  # one for each channel, or one for both directions


class Network:
    """What was offered, what receives were posted, what has arrived. Nothing is buffered."""

    def __init__(self, schedule: Schedule, shared: bool, skips: Skips) -> None:
        self.shared = shared
        self.order: dict[Channel, list[Value]] = defaultdict(list)
        for source, row in enumerate(schedule.actions):
            for action in row:
                for value in makes(action, schedule.stages, skips):
                    if schedule.placement[value.stage] != source:
                        self.order[source, schedule.placement[value.stage]].append(value)
        self.channel = {value: channel for channel, queue in self.order.items() for value in queue}
        self.received: dict[Channel, int] = Counter()  # how many receives have been posted
        self.posted: dict[tuple[Line, int], list[Value]] = defaultdict(list)  # at a rank's end of a line, and not moved
        self.arrived: set[Value] = set()

    def line(self, channel: Channel) -> Line:
        return frozenset(channel) if self.shared else channel

    def offer(self, value: Value) -> None:
        channel = self.channel[value]
        self.posted[self.line(channel), channel[0]].append(value)

    def receive(self, channel: Channel, count: int) -> None:
        """Post the receives of a channel's first `count` values, those that have not been."""
        fresh = self.order[channel][self.received[channel] : count]
        self.posted[self.line(channel), channel[1]] += fresh
        self.received[channel] += len(fresh)

    def move(self) -> bool:
        """Move what can be moved; whether anything was."""
        before = len(self.arrived)
        for source, destination in self.order:
            line = self.line((source, destination))
            here, there = self.posted[line, source], self.posted[line, destination]
            while here and there and here[0] == there[0]:
                self.arrived.add(here.pop(0))
                there.pop(0)
        return len(self.arrived) > before


class ExecutionModel(NamedTuple):
    """The question that is asked of a table."""

    sends: str = "async"
    channels: str = "directed"

    @property
    def ahead(self) -> bool:
        """Whether receives are posted before they are needed."""
        return self == ExecutionModel("async", "directed")


MODELS = [ExecutionModel(sends, channels) for sends in ("async", "blocking") for channels in ("directed", "shared")]


def _rank(
    schedule: Schedule, rank: int, network: Network, model: ExecutionModel, skips: Skips, at: list[int]
) -> Iterator[Condition]:
    """One rank at work; yields a condition whenever it cannot go on before that holds."""
    stages, here = schedule.stages, set[Value]()
    if model.ahead:
        for channel, queue in network.order.items():
            network.receive(channel, len(queue) if channel[1] == rank else 0)
    for group in cells(schedule, rank):
        wanted = [value for action in group for value in takes(action, stages, skips)]
        coming = [value for value in wanted if value in network.channel and network.channel[value][1] == rank]
        for value in coming:
            channel = network.channel[value]
            network.receive(channel, network.order[channel].index(value) + 1)
        yield lambda wanted=wanted, coming=coming: all(
            value in (network.arrived if value in coming else here) for value in wanted
        )
        at[rank] += len(group)
        for value in (value for action in group for value in makes(action, stages, skips)):
            if schedule.placement[value.stage] == rank:
                here.add(value)
            else:
                network.offer(value)
                if model.sends == "blocking":
                    yield lambda value=value: value in network.arrived


def execution(
    schedule: Schedule, model: ExecutionModel = MODELS[0], seed: int = 0, skips: Skips = ()
) -> tuple[tuple[int, ...], Network]:
    """Execute the table until nothing moves any more: how many of its actions each rank has run, and the network then.

    `seed` decides which rank is looked at when.
    """
    dice, network, at = random.Random(seed), Network(schedule, model.channels == "shared", skips), [0] * schedule.ranks
    ranks = {rank: _rank(schedule, rank, network, model, skips, at) for rank in range(schedule.ranks)}
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
    return tuple(at), network


def is_right(schedule: Schedule, model: ExecutionModel = MODELS[0], seed: int = 0, skips: Skips = ()) -> bool:
    """Whether executing the table is one whole training step and comes to its end."""
    if not does_the_work(schedule) or not pairs_stand(schedule):
        return False
    return execution(schedule, model, seed, skips)[0] == tuple(map(len, schedule.actions))
