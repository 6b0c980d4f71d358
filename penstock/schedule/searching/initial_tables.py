"""Tables to begin a search with: published ones, one microbatch after the other, and those of ranks that run what they can."""

from collections import deque
from collections.abc import Iterator, Sequence

from penstock.errors import ScheduleError
from penstock.schedule.catalog import FAMILIES, build
from penstock.schedule.schedule import Schedule
from penstock.schedule.searching.problem import Rows, SearchProblem, in_order
from penstock.schedule.table import PLACEMENTS, Kind, receiving_stages

_NOTHING = (float("inf"), 0, 0, 0)
DEPTHS = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


def published_schedules(placement: Sequence[int], microbatches: int) -> Iterator[Schedule]:
    """The published tables with these stages on these ranks."""
    stages, ranks = len(placement), max(placement) + 1
    for name, family in FAMILIES.items():
        if stages % ranks or PLACEMENTS[family.placement](stages, ranks) != tuple(placement):
            continue
        each = stages // ranks
        try:
            yield build(name, ranks, microbatches, None if each == family.stages_per_rank else each)
        except ScheduleError:  # not for so many stages on a rank
            continue


def grouped_rows(machine: SearchProblem, size: int) -> Rows:
    """The F and I of groups of microbatches that go through the whole pipeline and back, one group after the other."""
    rows = []
    for stages in machine.stages_of:
        codes = list[int]()
        for first in range(0, machine.microbatches, size):
            together = min(size, machine.microbatches - first)
            for code in (*stages, *(machine.num_stages + stage for stage in reversed(stages))):
                codes += [code] * together
        rows.append(in_order(codes, machine.microbatches))
    return rows


class Dispatch:
    """Ranks that always run what can begin first, an I before an F, the F of a later stage before that of an earlier one.

    An F only begins if fewer than `depth` of its stage are in flight, and if memory is left for the F of one microbatch on the
    later stages of its rank, without which a rank can fill up with what can never go on.
    """

    def __init__(self, machine: SearchProblem, depth: Sequence[float]) -> None:
        self.machine, self.depth = machine, depth
        self.free, self.held = [0.0] * machine.ranks, [0.0] * machine.ranks
        self.there, self.done = list(machine.there), [0] * (2 * machine.num_stages)
        self.put_off = [deque[int]() for _ in range(machine.ranks)]  # the W that can run
        goes = receiving_stages(machine.num_stages, list(machine.costs.skips))
        self.told = [  # the ranks for which something may be there once a stage has run
            {machine.placement[stage] for stage in (own, *goes[Kind.F][own], *goes[Kind.B][own])}
            for own in range(machine.num_stages)
        ]

    def rows(self) -> Rows:
        """The F and I of every rank; empty if at some time nothing can begin."""
        machine = self.machine
        rows: Rows = [[] for _ in range(machine.ranks)]
        firsts = [min(self._choices(rank), default=_NOTHING) for rank in range(machine.ranks)]
        for _ in range(2 * machine.num_stages * machine.microbatches):
            first = min(firsts)
            if first is _NOTHING:
                return []
            _, _, action, rank = first
            self._run(rank, action)
            rows[rank].append(action)
            for other in self.told[action // machine.microbatches % machine.num_stages]:
                firsts[other] = min(self._choices(other), default=_NOTHING)
        return rows

    def _choices(self, rank: int) -> Iterator[tuple[float, int, int, int]]:
        """The next F and I of `rank` that can begin: when, the smaller the more urgent, number, rank."""
        machine = self.machine
        for stage in machine.stages_of[rank]:
            in_flight = self.done[stage] - self.done[machine.num_stages + stage]
            for code in (stage, machine.num_stages + stage):
                if self.done[code] < machine.microbatches and (code > stage or in_flight < self.depth[stage]):
                    action = code * machine.microbatches + self.done[code]
                    ready, weights = self._ready(action), self._weights_before(rank, action)
                    if ready >= 0 and weights is not None:
                        free = self.free[rank] + sum(machine.cost[weight] for weight in weights)
                        yield max(ready, free), -stage - (machine.num_stages if code > stage else 0), action, rank

    def _ready(self, action: int) -> float:
        """When what `action` needs is there; negative if that is not known yet."""
        slots = [self.there[action], *(self.there[slot] for slot in self.machine.also_needs[action])]
        return max(slots) if min(slots) >= 0 else -1.0

    def _weights_before(self, rank: int, action: int) -> list[int] | None:
        """The W that have to run before `action` for its memory; None if they are not enough."""
        machine, weights, held = self.machine, list[int](), self.held[rank]
        reserved = machine.later[action // machine.microbatches] if action < machine.first_back else 0.0
        if machine.change[action] <= 0.0:
            return weights
        for weight in (*self.put_off[rank], None):
            if held + machine.change[action] + reserved <= machine.limits[rank]:
                return weights
            if weight is not None:
                weights.append(weight)
                held += machine.change[weight]
        return None

    def _run(self, rank: int, action: int) -> None:
        """Run `action`, and before it the W that it needs gone, and those that end before it can begin."""
        machine, waiting, ready = self.machine, self.put_off[rank], self._ready(action)
        needed = len(self._weights_before(rank, action) or ())
        while waiting and (needed > 0 or self.free[rank] + machine.cost[waiting[0]] <= ready):
            weight = waiting.popleft()
            self.free[rank] += machine.cost[weight]
            self.held[rank] += machine.change[weight]
            needed -= 1
        self.free[rank] = max(self.free[rank], ready) + machine.cost[action]
        self.held[rank] += machine.change[action]
        self.done[action // machine.microbatches] += 1
        if action >= machine.first_back and not machine.whole:
            waiting.append(action + machine.first_back)
        for slot, _, transmission, latency in machine.sends[action]:
            self.there[slot] = self.free[rank] + transmission + latency


def depths(machine: SearchProblem) -> Iterator[list[float]]:
    """How many of every stage may be in flight: so many as its round trip takes, times something; and any number."""
    period = max(machine.work) / machine.microbatches
    yield [float("inf")] * machine.num_stages
    for factor in DEPTHS:
        depth = []
        for stage in range(machine.num_stages):
            trip = sum(machine.times[s] + machine.times[machine.num_stages + s] for s in range(stage, machine.num_stages))
            depth.append(max(1.0, factor * trip / period))
        yield depth


def initial_rows(machine: SearchProblem) -> Iterator[Rows]:
    """All there are."""
    yield from map(machine.rows_from_table, published_schedules(machine.placement, machine.microbatches))
    yield from (grouped_rows(machine, size) for size in (1, 2, 3, 4) if size <= machine.microbatches)
    yield from (rows for depth in depths(machine) if (rows := Dispatch(machine, depth).rows()))
