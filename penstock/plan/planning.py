"""The search for a plan: every family on balanced cuts first, the best of them on better cuts, then tables made for those."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from random import Random
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.partition.balance import balanced_starts as balanced
from penstock.plan import request
from penstock.plan.bounds import least, why
from penstock.plan.candidate import Candidate, Cutting, Starts, Terms
from penstock.plan.layers import Layer, Layers, as_layers
from penstock.plan.request import nothing_fits
from penstock.plan.result import Plan
from penstock.plan.stages import ADAM, Line
from penstock.plan.timing import TimedTable
from penstock.schedule import build, search, simulate
from penstock.schedule.catalog import FAMILIES

Effort = Literal["quick", "normal", "long"]
SHOWN = 5  # plans
STEPS = ((24, 60_000), (8, 300_000), (2, 1_200_000))  # so many ways get better cuts, which cost so many actions to time
PARTS = 0.25, 0.5, 0.75, 1.0  # that bytes have in first cuts, where memory is short
LARGEST = 50_000  # actions of a table that is tried, with several stages on a rank
INTERLEAVED = (2, 3, 4)  # stages on a rank that are tried for a family that leaves them open
TABLES = {  # are searched for with which effort, for how many of the best ways
    "quick": (),
    "normal": (("quick", 2), ("quick", 1)),
    "long": (("quick", 3), ("normal", 1), ("long", 1)),
}
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
        """The less, the better: what does not fit; the time; and where that is the same, recomputation, stages and memory."""
        best, memory = self.best, sum(choice.bytes for choice in self.best.choices)
        return best.over, float(f"{best.seconds:.6g}"), best.again, len(best.starts), memory

    def descended(self, actions: int, random: Random) -> "Way":
        """With a better cut, if one is found while so many actions are timed."""
        return self._replace(best=self.cutting.descended(self.best, actions, random))

    def with_cut_of(self, others: Sequence["Way"]) -> "Way":
        """With the cut of another table that has as many stages, where that is better."""
        cuts = {way.best.starts for way in others if len(way.best.starts) == len(self.best.starts)}
        found = [self.best, *map(self.cutting.at, cuts - {self.best.starts})]
        return self._replace(best=min(found, key=lambda each: (each.over, each.seconds)))


class Task(NamedTuple):
    """What one replica of the pipeline is planned for."""

    layers: Layers
    rows: int  # of a step
    counts: Sequence[int]  # into how many microbatches they may be split
    terms: Terms

    @property
    def ranks(self) -> int:
        """The most there are."""
        return len(self.terms.limits)

    def line(self, microbatches: int) -> Line:
        """The layers at so many microbatches: the time of the usual one, the bytes of the one with the most rows."""
        usual, largest = self.layers.at(self.rows / microbatches), self.layers.at(-(-self.rows // microbatches))
        sizes = ("activation", "keep", "output", "ends")
        return Line(
            [one._replace(**{name: getattr(most, name) for name in sizes}) for one, most in zip(usual, largest, strict=True)]
        )


def plan(
    layers: Layers | Sequence[Layer],
    ranks: int,
    memory: float | str | Sequence[float | str],
    *,
    batch: int,
    dp: int | Sequence[int] = 1,
    microbatches: int | Sequence[int] | None = None,
    schedules: str | Sequence[str] | None = None,
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
    `memory`: bytes of each rank, or a text like "2GB", for parameters, gradients, optimizer state, activations and messages;
    or one number for each rank of a pipeline.
    `batch`: rows of a step. `dp`: how many replicas of the pipeline share ranks and rows; or several numbers to choose from.
    `microbatches`: into how many the rows of a replica may be split, by default any number that divides them.
    `schedules`: names of families, by default all, and tables that are made for the model.
    `effort`: `quick` tries families only, `normal` and `long` search for tables too. The same `seed` gives the same plans.
    `optimizer`: bytes of its state for each byte of parameters; by default Adam's.
    `send`, `bandwidth`: seconds that a message takes, and bytes a second; `action`: seconds of the engine for each action.
    `cores`: how many ranks can compute at once, where they share a machine that has fewer.
    `speeds`: of each rank of a pipeline, if they differ: 0.5 for one that takes twice as long as the layers say.
    `fewer`: whether fewer ranks may be used than there are.
    `progress`: told which table is searched for, the share of that which is done, and the seconds of its step so far. If it
    returns something true, the search ends with what it has, as on Ctrl-C.

    Raises PenstockError if nothing fits: which rank misses how many bytes, and what would fit.

        plans = plan(measure(model, (tokens,)), ranks=4, memory=2e9, batch=64, effort="quick")
        print(plans[0])
    """
    layers = as_layers(layers)
    ranks, batch, seed = request.check(layers, ranks, batch, seed, effort, TABLES)
    beside = request.terms(optimizer=optimizer, send=send, bandwidth=bandwidth, action=action, cores=cores)
    tasks = []
    for replicas in request.replicas(dp, ranks, batch):
        here, rows = ranks // replicas, batch // replicas
        limits, own = request.limits(memory, here), request.speeds(speeds, here)
        terms = Terms(limits, speeds=own, dp=replicas, **{**beside, "cores": beside["cores"] / replicas})
        if counts := request.counts(microbatches, batch, rows, here, layers.largest):
            tasks.append(Task(layers, rows, counts, terms))
    if not tasks:
        raise PenstockError(f"dp={dp} replicas have less rows each than the {microbatches} microbatches that are asked for")
    names, random = request.names(schedules), Random(seed)
    ways = sorted((way for task in tasks for way in _families(task, names, random, fewer)), key=lambda way: way.rank)
    if ways[0].best.over:
        [task] = [task for task in tasks if task.terms.dp == ways[0].cutting.terms.dp]
        raise PenstockError(nothing_fits(ways[0].cutting, ways[0].best, _fitting(task)))
    if schedules is None:
        with suppress(KeyboardInterrupt):
            for each, many in TABLES[effort]:
                ways = _searched(ways, each, many, seed, random, progress)
    different: dict[tuple[Any, ...], Way] = {}
    for way in ways:
        if not way.best.over:
            different.setdefault((way.cutting.table.schedule.actions, way.best.starts, way.cutting.terms.dp), way)
    return [_plan(way, batch, layers.names) for way in [*different.values()][:SHOWN]]


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
    task: Task, names: Sequence[str], random: Random, fewer: bool = True, steps: Sequence[tuple[int, int]] = STEPS
) -> list[Way]:
    """The best families with the best cuts, of any number of ranks that may be as fast as all."""
    ways: list[Way] = []
    lines = {count: task.line(count) for count in task.counts}
    most = min(task.ranks, len(task.layers.names))
    for used in range(most, 0, -max(1, most // 8)) if fewer else [task.ranks]:
        here = task.terms.first(used)
        counts = lines if used == most or not ways or ways[0].best.over else [ways[0].cutting.table.microbatches]
        for count in counts:
            line = lines[count]
            if not ways or ways[0].best.over or least(line.layers, used, count, here.cores, here.speeds) < ways[0].best.seconds:
                cut = lru_cache(partial(_even, line, used, here))
                ways += [_first(Cutting(line, table, here), cut) for table in tables(names, used, count, len(line.layers))]
        ways = sorted(ways, key=lambda way: way.key)[: STEPS[0][0]]
    if not ways:
        raise PenstockError(f"{', '.join(names)}: all have more stages than the {most} layers, or are too large")
    for number, actions in steps:
        ways[:number] = [way.with_cut_of(ways[:number]).descended(actions, random) for way in ways[:number]]
        ways.sort(key=lambda way: way.key)
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
    memory = [(2 + terms.optimizer) * layer.parameters + ranks * (layer.activation + layer.ends) for layer in line.layers]
    seconds, bytes_ = sum(line.seconds) or 1.0, sum(memory) or 1.0
    costs = [(1 - part) * one / seconds + part * other / bytes_ for one, other in zip(line.seconds, memory, strict=True)]
    return tuple(balanced(costs, stages))


def _fitting(task: Task) -> Iterator[str]:
    """What would fit, each change alone: the nearest number of microbatches above those tried, and of ranks."""
    names, random, ranks = ("1f1b", "zb-h1", "v-min"), Random(0), task.ranks
    for count in (count for count in range(max(task.counts) + 1, task.rows + 1) if task.rows % count == 0):
        if not _families(task._replace(counts=[count]), names, random, steps=STEPS[:2])[0].best.over:
            yield f"{count} microbatches, of {task.rows // count} rows"
            break
    for more in range(ranks + 1, min(2 * ranks, len(task.layers.names)) + 1):
        limits = task.terms.limits + (max(task.terms.limits),) * (more - ranks)
        wider = task._replace(terms=task.terms._replace(limits=limits, speeds=()))
        if not _families(wider, names, random, steps=STEPS[:2])[0].best.over:
            yield f"{more * task.terms.dp} ranks"
            break


def _plan(way: Way, batch: int, names: Sequence[str]) -> Plan:
    cutting, best, table = way.cutting, way.best, way.cutting.table.schedule
    terms, ways, stages = cutting.terms, cutting.ways(best.choices), cutting.stages(best.starts)
    costs, layers = cutting.costs(best), cutting.line.layers
    timeline, reduced = simulate(table, costs), cutting.reduced(stages)
    seconds = timeline.makespan + reduced if terms.cores >= table.ranks else best.seconds
    shared = terms.reduced(sum(layer.parameters for layer in layers) / table.ranks)
    bound = least(layers, table.ranks, table.microbatches, terms.cores, terms.speeds) + shared
    peaks = [held + more for held, more in zip(timeline.peak_memory, cutting.reserved(best), strict=True)]
    again = table.microbatches * sum(each.seconds for each in ways)
    return Plan(
        table,
        cuts=tuple(names[start] for start in best.starts[1:]),
        recompute=tuple(each.recompute for each in ways),
        microbatches=table.microbatches,
        seconds=seconds,
        bound=bound,
        peak_memory=tuple(peaks),
        why=why(layers, timeline, table.microbatches, again, reduced),
        costs=costs,
        batch=batch,
        dp=terms.dp,
        layers=tuple(names),
    )


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
