"""The search: published tables and others that fit the limit, the best of them annealed, and what was found, with its bound."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Schedule
from penstock.schedule.searching import starts
from penstock.schedule.searching.annealing import anneal
from penstock.schedule.searching.bounds import bound
from penstock.schedule.searching.machine import TOLERANCE, Machine, Rows
from penstock.schedule.searching.position import INFINITE, Position, State
from penstock.schedule.table import Table, must_be_table
from penstock.schedule.timing.simulate import Costs, simulate
from penstock.schedule.transform import with_full_backwards
from penstock.schedule.verify import verify

EFFORTS = {"quick": 2_500_000, "normal": 25_000_000, "long": 150_000_000}  # steps of a position
Progress = Callable[[float, float], object]  # the share that is done, the best makespan so far -> true to stop


@dataclass(frozen=True)
class Found:
    """What a search found, and what that is measured by."""

    schedule: Schedule  # verified
    makespan: float  # of `schedule`, as `simulate` has it
    bound: float  # no table within the limit is shorter
    because: str  # what keeps a table from being shorter than the bound
    family: str | None  # the best published table with these stages within the limit; None: there is none
    family_makespan: float | None

    @property
    def proven(self) -> bool:
        """Whether no table is shorter."""
        return self.makespan <= self.bound * (1 + TOLERANCE)


class _Enough(Exception):
    """It is proven that there is no better, or whoever watches the progress wants no more."""


def search(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    limit: float | Sequence[float] | None = None,
    effort: str = "normal",
    seed: int = 0,
    start: Table | None = None,
    progress: Progress | None = None,
) -> Found:
    """The table with the shortest step, within a limit on memory, that was found for these costs.

    `costs`: of the stages of `placement`, as for `simulate`. Pairs of actions that overlap are not searched for.
    `placement`: the rank of every stage.
    `microbatches`: M, into how many a batch is split.
    `limit`: the most that the activations of a rank may take at once (`Timeline.peak_memory`), in the unit of `costs.act`:
    a number, or one for each rank. By default any amount.
    `effort`: `quick`, `normal` or `long`: about 1, 10 and 60 seconds. What is counted is work, not time: the same arguments
    give the same table anywhere.
    `start`: one more table to begin with, for example one found before.
    `progress`: told the share of the work that is done and the best makespan so far, some ten times a second. If it returns
    something true the search ends with what it has, as it does on Ctrl-C.

    The table is never longer than the best published one within the limit. Raises ScheduleError for a limit that no table
    keeps, and for costs, a placement or numbers that are none.

        found = search(Costs(3, 4, 2), placement=(0, 1, 2, 2, 1, 0), microbatches=8, limit=4)
        found.makespan, found.bound, found.family_makespan
    """
    if effort not in EFFORTS:
        raise ScheduleError(f"effort={effort!r}: use {', '.join(EFFORTS)}")
    placement = _checked(placement, microbatches)
    limits = _limits(limit, costs, placement)
    machine = Machine(costs, placement, microbatches, limits)
    best = _Best(machine, start, EFFORTS[effort], progress)
    with suppress(KeyboardInterrupt, _Enough):
        _anneal(best, random.Random(seed))
    return best.found()


def _checked(placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """`placement`, if it is one."""
    homes = tuple(placement)
    if not homes or any(not isinstance(home, int) for home in homes) or set(homes) != set(range(max(homes) + 1)):
        raise ScheduleError(f"placement={placement!r} is none: give the rank of every stage, each rank from 0 on at least one")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ScheduleError(f"microbatches={microbatches!r}: use a whole number of 1 or more")
    return homes


def _limits(limit: float | Sequence[float] | None, costs: Costs, placement: tuple[int, ...]) -> list[float]:
    """The limit of every rank, each enough for one microbatch."""
    ranks = max(placement) + 1
    given = float("inf") if limit is None else limit
    limits = [float(given)] * ranks if isinstance(given, int | float) else [float(each) for each in given]
    if len(limits) != ranks:
        raise ScheduleError(f"limit has {len(limits)} numbers for {ranks} ranks: give one number, or one for each rank")
    least = [0.0] * ranks
    for size, home in zip(costs.sizes(len(placement)), placement, strict=True):
        least[home] += size.act
    short = [rank for rank in range(ranks) if not least[rank] <= limits[rank] * (1 + TOLERANCE)]
    if short:
        told = ", ".join(f"rank {rank} {least[rank]:g} (limit {limits[rank]:g})" for rank in short)
        raise ScheduleError(f"no table keeps the limit: the activations of one microbatch take on {told}")
    return limits


class _Best:
    """The best that was found so far, of the search's work how much is done, and who wants to know."""

    def __init__(self, machine: Machine, start: Table | None, work: int, progress: Progress | None) -> None:
        self.machine, self.work, self.progress, self.done = machine, work, progress, 0
        self.published = list(starts.families(machine.placement, machine.microbatches))
        if start is not None:
            must_be_table(start)
            verify(start)
        self.tables = [*self.published, *([start] if start else [])]
        self.times = [self._time(table) for table in self.tables]
        self.makespan = min(self.times, default=INFINITE)
        self.bound = bound(machine)
        self.state: State | None = None  # None: one of the tables

    def _time(self, table: Table) -> float:
        """The makespan of `table`, infinite if it does not keep the limit."""
        timeline = simulate(table, self.machine.costs)
        fits = all(peak <= limit for peak, limit in zip(timeline.peak_memory, self.machine.limits, strict=True))
        return timeline.makespan if fits else INFINITE

    def report(self, steps: int, position: Position) -> None:
        """`steps` more are done, and the search is at `position`."""
        self.done += steps
        if position.makespan < self.makespan:
            self.makespan, self.state = position.makespan, position.state()
        if self.makespan <= self.bound.time * (1 + TOLERANCE):
            raise _Enough
        if self.progress and self.progress(min(1.0, self.done / self.work), self.makespan):
            raise _Enough

    def table(self) -> Schedule:
        """The best table."""
        if self.state is None:
            best = self.tables[self.times.index(self.makespan)]
            return Schedule(best.name, best.placement, best.microbatches, best.actions, best.overlaps)
        position = Position(self.machine, self.state.rows, self.state.slack)
        table = self.machine.table(position.whole_rows())
        return min(table, with_full_backwards(table), key=self._time)

    def found(self) -> Found:
        """What is told of it."""
        table, times = self.table(), self.times[: len(self.published)]
        verify(table, skips=list(self.machine.costs.skips))
        time = self._time(table)
        of_family = min(times, default=INFINITE)
        name, family_makespan = None, None
        if of_family < INFINITE:
            name, family_makespan = self.published[times.index(of_family)].name, of_family
        return Found(table, time, min(self.bound.time, time), self.bound.because, name, family_makespan)


ROUNDS = ((8, 0.4, 1.0), (3, 0.25, 0.5), (1, 0.15, 0.3))  # how many are annealed, the share of the work for all, how hot


def _anneal(best: _Best, dice: random.Random) -> None:
    """Anneal from the best starts, go on with the best of these, and the best of those; at last with every W in its place."""
    machine, work = best.machine, best.work
    begins = sorted(_starts(best), key=lambda position: position.makespan)
    for position in begins:
        best.report(0, position)
    states = [position.state() for position in begins]
    position = begins[0]
    for many, share, hot in ROUNDS:
        ended = []
        for index in range(many):
            position.go_to(states[index % min(len(states), many)])
            anneal(position, dice, int(work * share / many), hot * machine.typical, hot * machine.typical / 10, best.report)
            ended.append(position.state())
        states = sorted(ended, key=lambda state: state.makespan)
    position.go_to(states[0])
    position = Position(machine, position.whole_rows())
    anneal(position, dice, work // 5, machine.typical / 5, machine.typical / 20, best.report)


def _starts(best: _Best) -> Iterator[Position]:
    machine = best.machine
    begins: list[Rows] = [machine.rows(table) for table in best.tables]
    begins += [starts.one_by_one(machine), *(starts.dispatched(machine, depth) for depth in starts.depths(machine))]
    for rows in begins:
        without = [[action for action in row if action < machine.first_weight] for row in rows]
        if without and (position := Position(machine, without, [0.0] * machine.ranks)).makespan < INFINITE:
            yield position
