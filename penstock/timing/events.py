"""The events of one step: when every action ran, or would run."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.memory import ActivationSize
from penstock.schedule.table import Action, Chains, OverlappedPair, Skip, dependencies, receiving_stages


class Event(NamedTuple):
    """One action of one rank, from `start` to `end` in the time unit of its timeline."""

    rank: int
    action: Action
    start: float
    end: float
    sent: float | None = None  # when the rank had handed over its result, if that was measured


class MessageCost(NamedTuple):
    """The cost of a message from one stage to another, or back, if they are on different ranks."""

    transmission: float = 0.0  # time for which it occupies its channel
    latency: float = 0.0  # time it then travels, in parallel with others


@dataclass(slots=True)
class Channel:
    """A channel for the messages of one rank to another: one at a time, first in, first out."""

    free: float = float("-inf")  # when the last message has left it

    def transmit(self, ready_time: float, border: MessageCost, factor: float = 1.0) -> float:
        """Return when a message over `border`, of `factor` times the bytes, arrives if it is handed over at `ready_time`."""
        self.free = max(self.free, ready_time) + border.transmission * factor
        return self.free + border.latency


class Arrival(NamedTuple):
    """The arrival time of a message, and the event whose end began the queue that it waited in."""

    time: float
    queue_began: Event


@dataclass(frozen=True)
class TimelineEvents:
    """The events of a step, and what follows directly from them: the base of `Timeline`."""

    name: str
    rows: tuple[tuple[Event, ...], ...]  # rank -> its events, in order
    message_costs: tuple[MessageCost, ...] = ()  # stage s -> what a message between s and s+1 costs; empty when measured
    activation_sizes: tuple[ActivationSize, ...] = ()  # stage -> the size of its activations; empty: one each
    overlaps: frozenset[OverlappedPair] = frozenset()  # actions that ran as one pair
    skips: Mapping[Skip, MessageCost] = field(default_factory=dict)  # what a message of each skip costs
    memory_unit: str = ""  # "bytes", or "" for activations or the unit of the sizes
    between_steps: tuple[float, ...] = ()  # rank -> time since its last step: optimizer, next batch; empty: not measured
    averaging: tuple[float, ...] = ()  # rank -> time after its last action until gradients were averaged; empty: no replicas
    microbatch_factors: tuple[float, ...] = ()  # microbatch -> multiplier of its messages and activations; empty: 1
    message_bytes: float = 0.0  # of the largest message; 0: unknown
    microbatch_sizes: tuple[float, ...] = ()  # microbatch -> elements of its largest input; empty: unknown
    pairs_send_together: bool = False  # the engine hands over what both of an overlapped pair made once both have run
    chains: Chains | None = None  # of the stages, where some have F only; None: one chain, all trained
    teacher_output: float = 0.0  # memory of a teacher's output of a microbatch
    recut_call: str = ""  # the call that cuts the model anew, of a step whose pipeline has one

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of all ranks, rank by rank, each rank's in the order it ran them."""
        return tuple(event for row in self.rows for event in row)

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages that ran something, S."""
        return 1 + max((event.action.stage for event in self.events), default=-1)

    @cached_property
    def stage_chains(self) -> Chains:
        """The chains of the stages."""
        return self.chains or Chains(self.num_stages)

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch, K."""
        return 1 + max((event.action.slice for event in self.events), default=0)

    def cells(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """Yield the events of `rank` in order, one at a time or as the two of an overlapped pair."""
        row, firsts = iter(self.rows[rank]), self._first_actions_of_pairs
        for event in row:
            yield (event, next(row)) if event.action in firsts else (event,)

    def all_cells(self) -> Iterator[tuple[Event, ...]]:
        """Yield the cells of all ranks, rank by rank."""
        return (cell for rank in range(self.ranks) for cell in self.cells(rank))

    @cached_property
    def _first_actions_of_pairs(self) -> frozenset[Action]:
        return frozenset(first for first, _ in self.overlaps)

    def needed_events(self, event: Event) -> Iterator[Event]:
        """Yield the events that must end before `event` starts."""
        at = self._at
        for options in dependencies(event.action, self.stage_chains, self.skips, self.slices):
            yield from [at[action] for action in options if action in at]

    def remote_needs(self, cell: Iterable[Event]) -> Iterator[Event]:
        """Yield the events on other ranks that must end before `cell` starts."""
        return (needed for event in cell for needed in self.needed_events(event) if needed.rank != event.rank)

    def last_remote_need(self, cell: Iterable[Event]) -> Event | None:
        """Return the event to end last of `remote_needs`; None if there is none."""
        return max(self.remote_needs(cell), key=lambda event: event.end, default=None)

    @cached_property
    def _at(self) -> dict[Action, Event]:
        return {event.action: event for event in self.events}

    @cached_property
    def arrivals(self) -> dict[tuple[Action, int], Arrival]:
        """The arrival of every message to another rank, by (action, receiving stage), at the costs of messages."""
        home = {event.action.stage: event.rank for event in self.events}
        receivers = receiving_stages(self.stage_chains, [skip for skip in self.skips if skip[1] < self.num_stages])
        channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
        queue_began: dict[tuple[int, int], Event] = {}
        arrivals = {}
        for event in self.events:
            kind, stage, microbatch, _ = event.action
            factor = (self.microbatch_factors[microbatch] if self.microbatch_factors else 1.0) / self.slices
            for receiver in receivers[kind][stage]:
                ends = event.rank, home.get(receiver, event.rank)
                if ends[0] != ends[1]:
                    if channels[ends].free <= event.end:
                        queue_began[ends] = event
                    when = channels[ends].transmit(
                        event.end, self._message_cost_between(min(stage, receiver), max(stage, receiver)), factor
                    )
                    arrivals[event.action, receiver] = Arrival(when, queue_began[ends])
        return arrivals

    def _message_cost_between(self, low: int, high: int) -> MessageCost:
        """Return the cost of a message between two stages; nothing if it is not known."""
        return self.skips[low, high] if high > low + 1 else self.message_costs[low] if self.message_costs else MessageCost()

    @cached_property
    def start(self) -> float:
        """The time at which the first action of any rank starts."""
        return min((row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """The time at which the last action of any rank ends."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def makespan(self) -> float:
        """The last end - first start over all ranks: the time of a step that ends in an ordinary optimizer step."""
        return self.end - self.start

    @cached_property
    def span(self) -> float:
        """The longest (last end - first start) of any one rank: what the zero-bubble papers report."""
        return max((row[-1].end - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that every rank spent in actions; that of a pair counts once."""
        return tuple(map(_busy, self.rows))


def _busy(row: Sequence[Event]) -> float:
    """Return the time for which at least one event of `row` ran."""
    busy, free = 0.0, float("-inf")
    for _, _, start, end, _ in row:
        busy += max(0.0, end - max(start, free))
        free = max(free, end)
    return busy
