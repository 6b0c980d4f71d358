"""The search for a plan: every family on balanced cuts first, the best of them on better cuts, then tables made for those."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from random import Random
from typing import Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.partition.balance import starts as balanced
from penstock.plan.advice import nothing_fits
from penstock.plan.bounds import least, why
from penstock.plan.candidate import Candidate, Cutting, Starts, Terms
from penstock.plan.layers import Layer, Layers, as_layers
from penstock.plan.result import Plan
from penstock.plan.stages import ADAM, Line
from penstock.plan.timing import TimedTable
from penstock.schedule import build, search, simulate
from penstock.schedule.catalog import FAMILIES

Effort = Literal["quick", "normal", "long"]
SHOWN = 5  # plans
STEPS = ((24, 30_000), (8, 150_000), (SHOWN, 500_000))  # so many ways go on, each with cuts that cost so many actions to time
PARTS = 0.25, 0.5, 0.75, 1.0  # that bytes have in first cuts, where memory is short
LARGEST = 50_000  # actions of a table that is tried, with several stages on a rank
OVERHEAD = 200  # actions: what a try costs besides, in the time of so many
INTERLEAVED = (2, 3, 4)  # stages on a rank that are tried for a family that leaves them open
NORMAL = ("quick", 3), ("normal", 1)
TABLES = {"quick": (), "normal": NORMAL, "long": (*NORMAL, ("long", 1))}  # with which effort, for how many of the best ways
Progress = Callable[[str, float, float], object]


class Way(NamedTuple):
    """A table, and the best cut that is known for it."""

    cutting: Cutting
    best: Candidate

    @property
    def key(self) -> float:
        """Seconds; what does not fit counts as longer, and may yet come to fit."""
        return self.best.seconds * (1 + 4 * self.best.over / sum(self.cutting.terms.limits))

    @property
    def rank(self) -> tuple[float, ...]:
        """The less, the better: what does not fit; the time; and where that is the same, stages and memory."""
        memory = sum(choice.bytes for choice in self.best.choices)
        return self.best.over, float(f"{self.best.seconds:.6g}"), len(self.best.starts), memory

    def descended(self, actions: int, random: Random) -> "Way":
        """With a better cut, if one is found while so many actions are timed."""
        tries = 1 + actions // (OVERHEAD + len(self.cutting.table.lines))
        return self._replace(best=self.cutting.descended(self.best, tries, random))


def plan(
    layers: Layers | Sequence[Layer],
    ranks: int,
    memory: float | Sequence[float],
    *,
    batch: int,
    microbatches: int | Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    effort: Effort = "normal",
    seed: int = 0,
    optimizer: float = ADAM,
    send: float = 0.0,
    bandwidth: float = float("inf"),
    action: float = 0.0,
    cores: float = float("inf"),
    speeds: Sequence[float] = (),
    fewer: bool = True,
    progress: Progress | None = None,
) -> list[Plan]:
    """The fastest ways to train a model of these `layers`, the best first, at most five.

    `layers`: from `measure`, or `Layer`s, which then say what they cost for one row.
    `ranks`: the most there are; fewer are used where that is faster.
    `memory`: bytes of each rank, for parameters, gradients, optimizer state, activations and messages; or one for each.
    `batch`: rows of a step. `microbatches`: into how many they may be split, by default any number that divides them.
    `schedules`: names of families, by default all, and tables that are made for the model.
    `effort`: `quick` tries families only, `normal` and `long` search for tables too. The same `seed` gives the same plans.
    `optimizer`: bytes of its state for each byte of parameters; by default Adam's.
    `send`, `bandwidth`: seconds that a message takes, and bytes a second; `action`: seconds of the engine for each action.
    `cores`: how many ranks can compute at once, where they share a machine that has fewer.
    `speeds`: of each rank, if they differ: 0.5 for one that takes twice as long as the layers say.
    `fewer`: whether fewer ranks may be used than there are.
    `progress`: told which table is searched for, the share of that which is done, and the seconds of its step so far. If it
    returns something true, the search ends with what it has, as on Ctrl-C.

    Raises PenstockError if nothing fits: which rank misses how many bytes, and what would fit.

        plans = plan(measure(model, (tokens,)), ranks=4, memory=2e9, batch=64, effort="quick")
        print(plans[0])
    """
    layers = as_layers(layers)
    limits = tuple(map(float, memory)) if isinstance(memory, Sequence) else (float(memory),) * ranks
    _check(ranks, limits, tuple(speeds), batch, effort)
    terms, random = Terms(limits, optimizer, send, bandwidth, action, cores, tuple(speeds)), Random(seed)
    counts = _counts(microbatches, batch, ranks)
    lines = {count: Line(layers.at(batch / count)) for count in counts}
    ways = _families(lines, ranks, terms, _names(schedules), random, fewer)
    if ways[0].best.over:
        raise PenstockError(nothing_fits(ways[0].cutting, ways[0].best, _fitting(layers, ranks, terms, batch, counts)))
    if schedules is None:
        with suppress(KeyboardInterrupt):
            for each, many in TABLES[effort]:
                ways = _searched(ways, each, many, seed, random, progress)
    return [_plan(way, batch, layers.names) for way in ways if not way.best.over][:SHOWN]


def _check(ranks: int, limits: Sequence[float], speeds: Sequence[float], batch: int, effort: str) -> None:
    """Raises PenstockError for what cannot be planned for."""
    if ranks < 1 or batch < 1:
        raise PenstockError(f"a plan is for 1 rank or more and 1 row or more, not {ranks} and {batch}")
    if len(limits) != ranks or not min(limits) > 0:
        raise PenstockError(f"memory is {list(limits)} for {ranks} ranks: give bytes above 0, once or for each rank")
    if speeds and (len(speeds) != ranks or not min(speeds) > 0):
        raise PenstockError(f"speeds are {list(speeds)} for {ranks} ranks: give a number above 0 for each rank")
    if effort not in TABLES:
        raise PenstockError(f"effort={effort!r}: use {', '.join(TABLES)}")


def _names(schedules: Sequence[str] | None) -> list[str]:
    names = [name for name in FAMILIES if name != "naive"] if schedules is None else list(schedules)
    if unknown := [name for name in names if name not in FAMILIES]:
        raise PenstockError(f"there is no schedule {unknown[0]!r}: choose from {', '.join(FAMILIES)}")
    return names


def _counts(microbatches: int | Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    """Numbers of microbatches that are tried."""
    if microbatches is None:
        return [count for count in range(max(1, min(batch, ranks) // 4), min(batch, 8 * ranks) + 1) if batch % count == 0]
    counts = [microbatches] if isinstance(microbatches, int) else sorted(set(microbatches))
    if wrong := [count for count in counts if not 1 <= count <= batch]:
        raise PenstockError(f"a batch of {batch} rows cannot be split into {wrong[0]} microbatches: use 1 to {batch}")
    return counts


@lru_cache(maxsize=256)
def _table(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> TimedTable:
    return TimedTable(build(name, ranks, microbatches, stages_per_rank))


def tables(names: Sequence[str], ranks: int, microbatches: int, most: int) -> Iterator[TimedTable]:
    """Those of the families that have no more than `most` stages."""
    for name in names:
        family = FAMILIES[name]
        for stages in INTERLEAVED if "stages_per_rank" in family.options else (family.stages_per_rank,):
            if stages * ranks <= most and (stages == 1 or 3 * stages * ranks * microbatches <= LARGEST):
                yield _table(name, ranks, microbatches, stages)


def _families(
    lines: dict[int, Line], ranks: int, terms: Terms, names: Sequence[str], random: Random, fewer: bool = True
) -> list[Way]:
    """The best families with the best cuts, of any number of ranks that may be as fast as all."""
    ways: list[Way] = []
    most = min(ranks, len(next(iter(lines.values())).layers))
    for used in range(most, 0, -max(1, most // 8)) if fewer else [ranks]:
        here = terms.first(used)
        counts = lines if used == most or not ways or ways[0].best.over else [ways[0].cutting.table.microbatches]
        for count in counts:
            line = lines[count]
            if not ways or ways[0].best.over or least(line.layers, used, count, here.cores, here.speeds) < ways[0].best.seconds:
                cut = lru_cache(partial(_even, line, used, here))
                ways += [_first(Cutting(line, table, here), cut) for table in tables(names, used, count, len(line.layers))]
        ways = sorted(ways, key=lambda way: way.key)[: STEPS[0][0]]
    if not ways:
        raise PenstockError(f"{', '.join(names)}: all have more stages than the {most} layers, or are too large")
    for number, actions in STEPS:
        ways = sorted([way.descended(actions, random) for way in ways[:number]], key=lambda way: way.key)
    return sorted(ways, key=lambda way: way.rank)


def _first(cutting: Cutting, cut: Callable[[int, float], Starts]) -> Way:
    """The table with an even cut: by seconds, and where memory is short also by bytes, or by some of both."""
    stages = len(cutting.table.placement)
    way = Way(cutting, cutting.at(cut(stages, 0.0)))
    if not way.best.over and all(each.recompute is None for each in cutting.ways(way.best.choices)):
        return way
    others = (Way(cutting, cutting.at(cut(stages, part))) for part in PARTS)
    return min(way, *others, key=lambda way: way.key)


def _even(line: Line, ranks: int, terms: Terms, stages: int, part: float) -> Starts:
    """The cut whose dearest stage is as cheap as can be, where bytes count for this `part` and seconds for the rest."""
    memory = [(2 + terms.optimizer) * layer.parameters + ranks * layer.activation for layer in line.layers]
    seconds, bytes_ = sum(line.seconds) or 1.0, sum(memory) or 1.0
    costs = [(1 - part) * one / seconds + part * other / bytes_ for one, other in zip(line.seconds, memory, strict=True)]
    return tuple(balanced(costs, stages))


def _fitting(layers: Layers, ranks: int, terms: Terms, batch: int, counts: Sequence[int]) -> Iterator[str]:
    """What would fit, each change alone: the nearest number of microbatches above those tried, and of ranks."""
    names, random = ("1f1b", "zb-h1", "v-min"), Random(0)
    for count in (count for count in range(max(counts) + 1, batch + 1) if batch % count == 0):
        if not _families({count: Line(layers.at(batch / count))}, ranks, terms, names, random)[0].best.over:
            yield f"{count} microbatches, of {batch // count} rows"
            break
    lines = {count: Line(layers.at(batch / count)) for count in counts}
    for more in range(ranks + 1, min(2 * ranks, len(layers.names)) + 1):
        wider = terms._replace(limits=terms.limits + (max(terms.limits),) * (more - ranks), speeds=())
        if not _families(lines, more, wider, names, random)[0].best.over:
            yield f"{more} ranks"
            break


def _plan(way: Way, batch: int, names: Sequence[str]) -> Plan:
    cutting, best, table = way.cutting, way.best, way.cutting.table.schedule
    terms, ways = cutting.terms, cutting.ways(best.choices)
    costs, line = cutting.costs(best), cutting.line
    timeline = simulate(table, costs)
    seconds = timeline.makespan if terms.cores >= table.ranks else best.seconds
    bound = least(line.layers, table.ranks, table.microbatches, terms.cores, terms.speeds)
    peaks = [held + more for held, more in zip(timeline.peak_memory, cutting.reserved(best), strict=True)]
    cuts = tuple(names[start] for start in best.starts[1:])
    again = table.microbatches * sum(each.seconds for each in ways)
    reason = why(line.layers, timeline, table.microbatches, again)
    recompute = tuple(each.recompute for each in ways)
    return Plan(table, cuts, recompute, table.microbatches, seconds, bound, tuple(peaks), reason, costs, batch)


def _searched(ways: Sequence[Way], effort: str, many: int, seed: int, random: Random, progress: Progress | None) -> list[Way]:
    """`ways`, and tables made for so many of the best of them, on the cuts that are then the best."""
    made = []
    chosen = [way for way in ways if len(way.best.choices) > 1 and not way.best.over][:many]
    for number, way in enumerate(chosen, 1):
        cutting, best, table = way.cutting, way.best, way.cutting.table
        limits = [limit - more for limit, more in zip(cutting.terms.limits, cutting.reserved(best), strict=False)]
        told = progress and partial(progress, f"table {number} of {len(chosen)}, {effort}")
        found = search(cutting.costs(best), table.placement, table.microbatches, limits, effort, seed, table.schedule, told)
        new = Cutting(cutting.line, TimedTable(found.schedule), cutting.terms)
        made.append(Way(new, new.at(best.starts, best.passed)).descended(STEPS[-1][1], random))
    return sorted([*made, *ways], key=lambda way: way.rank)
