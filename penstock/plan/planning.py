"""The search for a plan: every family on balanced cuts first, the best of them on better cuts, then tables made for those."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from random import Random
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.partition.balance import balanced_starts as balanced
from penstock.plan import arguments
from penstock.plan.arguments import nothing_fits_message
from penstock.plan.bounds import bottleneck_sentence, min_step_seconds
from penstock.plan.model_profile import LayerCost, ModelProfile, as_profile
from penstock.plan.partition_search import EvaluatedPartition, Limits, PartitionSearch, StageStarts
from penstock.plan.result import Plan
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import ADAM_STATE_RATIO, LayerChain
from penstock.schedule import build, search, simulate
from penstock.schedule.catalog import FAMILIES

Effort = Literal["quick", "normal", "long"]
MAX_PLANS = 5  # plans
IMPROVEMENT_ROUNDS = (
    (24, 60_000),
    (8, 300_000),
    (2, 1_200_000),
)  # so many ways get better cuts, which cost so many actions to time
MEMORY_WEIGHTS = 0.25, 0.5, 0.75, 1.0  # that bytes have in first cuts, where memory is short
MAX_INTERLEAVED_ACTIONS = 50_000  # actions of a table that is tried, with several stages on a rank
INTERLEAVED_STAGES_PER_RANK = (2, 3, 4)  # stages on a rank that are tried for a family that leaves them open
TABLE_SEARCHES = {  # are searched for with which effort, for how many of the best ways
    "quick": (),
    "normal": (("quick", 2), ("quick", 1)),
    "long": (("quick", 3), ("normal", 1), ("long", 1)),
}
Progress = Callable[[str, float, float], object]


class Candidate(NamedTuple):
    """A table, and the best cut that is known for it."""

    search: PartitionSearch
    best: EvaluatedPartition

    @property
    def penalized_seconds(self) -> float:
        """Seconds; what does not fit counts as longer, and may yet come to fit."""
        return self.best.seconds * (1 + 4 * self.best.excess_bytes / sum(self.search.limits.memory_bytes))

    @property
    def sort_key(self) -> tuple[float, ...]:
        """The less, the better: what does not fit; the time; and where that is the same, recomputation, stages and memory."""
        best, memory = self.best, sum(choice.peak_bytes for choice in self.best.choices)
        return best.excess_bytes, float(f"{best.seconds:.6g}"), best.recompute_seconds, len(best.starts), memory

    def improve(self, actions: int, random: Random) -> "Candidate":
        """With a better cut, if one is found while so many actions are timed."""
        return self._replace(best=self.search.improve(self.best, actions, random))

    def with_best_partition_of(self, others: Sequence["Candidate"]) -> "Candidate":
        """With the cut of another table that has as many stages, where that is better."""
        cuts = {way.best.starts for way in others if len(way.best.starts) == len(self.best.starts)}
        found = [self.best, *map(self.search.evaluate, cuts - {self.best.starts})]
        return self._replace(best=min(found, key=lambda each: (each.excess_bytes, each.seconds)))


class ReplicaTask(NamedTuple):
    """What one replica of the pipeline is planned for."""

    profile: ModelProfile
    rows: int  # of a step
    microbatch_counts: Sequence[int]  # into how many microbatches they may be split
    limits: Limits

    @property
    def num_ranks(self) -> int:
        """The most there are."""
        return len(self.limits.memory_bytes)

    def layer_chain(self, microbatches: int) -> LayerChain:
        """The layers at so many microbatches: the time of the usual one, the bytes of the one with the most rows."""
        usual, largest = self.profile.costs_at(self.rows / microbatches), self.profile.costs_at(-(-self.rows // microbatches))
        sizes = ("activation", "keep", "output", "ends")
        return LayerChain(
            [one._replace(**{name: getattr(most, name) for name in sizes}) for one, most in zip(usual, largest, strict=True)]
        )


def plan(
    layers: ModelProfile | Sequence[LayerCost],
    ranks: int,
    memory: float | str | Sequence[float | str],
    *,
    batch: int,
    dp: int | Sequence[int] = 1,
    microbatches: int | Sequence[int] | None = None,
    schedules: str | Sequence[str] | None = None,
    effort: Effort = "normal",
    seed: int = 0,
    optimizer: float = ADAM_STATE_RATIO,
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
    layers = as_profile(layers)
    ranks, batch, seed = arguments.check_arguments(layers, ranks, batch, seed, effort, TABLE_SEARCHES)
    beside = arguments.check_numbers(optimizer=optimizer, send=send, bandwidth=bandwidth, action=action, cores=cores)
    tasks = []
    for replicas in arguments.replica_counts(dp, ranks, batch):
        here, rows = ranks // replicas, batch // replicas
        limits, own = arguments.memory_of_ranks(memory, here), arguments.speeds_of_ranks(speeds, here)
        terms = Limits(limits, speeds=own, dp=replicas, **{**beside, "cores": beside["cores"] / replicas})
        if counts := arguments.microbatch_counts(microbatches, batch, rows, here, layers.max_rows):
            tasks.append(ReplicaTask(layers, rows, counts, terms))
    if not tasks:
        raise PenstockError(f"dp={dp} replicas have less rows each than the {microbatches} microbatches that are asked for")
    names, random = arguments.family_names(schedules), Random(seed)
    ways = sorted(
        (way for task in tasks for way in _best_family_candidates(task, names, random, fewer)), key=lambda way: way.sort_key
    )
    if ways[0].best.excess_bytes:
        [task] = [task for task in tasks if task.limits.dp == ways[0].search.limits.dp]
        raise PenstockError(nothing_fits_message(ways[0].search, ways[0].best, _changes_that_fit(task)))
    if schedules is None:
        with suppress(KeyboardInterrupt):
            for each, many in TABLE_SEARCHES[effort]:
                ways = _with_searched_tables(ways, each, many, seed, random, progress)
    different: dict[tuple[Any, ...], Candidate] = {}
    for way in ways:
        if not way.best.excess_bytes:
            different.setdefault((way.search.timer.schedule.actions, way.best.starts, way.search.limits.dp), way)
    return [_plan_from_candidate(way, batch, layers.layer_names) for way in [*different.values()][:MAX_PLANS]]


@lru_cache(maxsize=256)
def _family_timer(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> ScheduleTimer:
    return ScheduleTimer(build(name, ranks, microbatches, stages_per_rank))


def family_timers(names: Sequence[str], ranks: int, microbatches: int, most: int) -> Iterator[ScheduleTimer]:
    """Those of the families that have no more than `most` stages."""
    for name in names:
        family = FAMILIES[name]
        for stages in INTERLEAVED_STAGES_PER_RANK if "stages_per_rank" in family.options else (family.stages_per_rank,):
            if stages * ranks <= most and (stages == 1 or 3 * stages * ranks * microbatches <= MAX_INTERLEAVED_ACTIONS):
                yield _family_timer(name, ranks, microbatches, stages)


def _best_family_candidates(
    task: ReplicaTask,
    names: Sequence[str],
    random: Random,
    fewer: bool = True,
    steps: Sequence[tuple[int, int]] = IMPROVEMENT_ROUNDS,
) -> list[Candidate]:
    """The best families with the best cuts, of any number of ranks that may be as fast as all."""
    ways: list[Candidate] = []
    lines = {count: task.layer_chain(count) for count in task.microbatch_counts}
    most = min(task.num_ranks, len(task.profile.layer_names))
    for used in range(most, 0, -max(1, most // 8)) if fewer else [task.num_ranks]:
        here = task.limits.for_first_ranks(used)
        counts = lines if used == most or not ways or ways[0].best.excess_bytes else [ways[0].search.timer.microbatches]
        for count in counts:
            line = lines[count]
            if (
                not ways
                or ways[0].best.excess_bytes
                or min_step_seconds(line.layers, used, count, here.cores, here.speeds) < ways[0].best.seconds
            ):
                cut = lru_cache(partial(_balanced_starts, line, used, here))
                ways += [
                    _balanced_candidate(PartitionSearch(line, table, here), cut)
                    for table in family_timers(names, used, count, len(line.layers))
                ]
        ways = sorted(ways, key=lambda way: way.penalized_seconds)[: IMPROVEMENT_ROUNDS[0][0]]
    if not ways:
        raise PenstockError(f"{', '.join(names)}: all have more stages than the {most} layers, or are too large")
    for number, actions in steps:
        ways[:number] = [way.with_best_partition_of(ways[:number]).improve(actions, random) for way in ways[:number]]
        ways.sort(key=lambda way: way.penalized_seconds)
    return sorted(ways, key=lambda way: way.sort_key)


def _balanced_candidate(cutting: PartitionSearch, cut: Callable[[int, float], StageStarts]) -> Candidate:
    """The table with an even cut: by seconds, and where memory is short also by bytes, or by some of both."""
    stages = len(cutting.timer.placement)
    way = Candidate(cutting, cutting.evaluate(cut(stages, 0.0)))
    if not way.best.excess_bytes and all(each.recompute is None for each in cutting.stage_policies(way.best.choices)):
        return way
    others = (Candidate(cutting, cutting.evaluate(cut(stages, part))) for part in MEMORY_WEIGHTS)
    return min(way, *others, key=lambda way: way.penalized_seconds)


def _balanced_starts(line: LayerChain, ranks: int, terms: Limits, stages: int, part: float) -> StageStarts:
    """The cut whose dearest stage is as cheap as can be, where bytes count for this `part` and seconds for the rest."""
    memory = [(2 + terms.optimizer) * layer.parameters + ranks * (layer.activation + layer.ends) for layer in line.layers]
    seconds, bytes_ = sum(line.layer_seconds) or 1.0, sum(memory) or 1.0
    costs = [(1 - part) * one / seconds + part * other / bytes_ for one, other in zip(line.layer_seconds, memory, strict=True)]
    return tuple(balanced(costs, stages))


def _changes_that_fit(task: ReplicaTask) -> Iterator[str]:
    """What would fit, each change alone: the nearest number of microbatches above those tried, and of ranks."""
    names, random, ranks = ("1f1b", "zb-h1", "v-min"), Random(0), task.num_ranks
    for count in (count for count in range(max(task.microbatch_counts) + 1, task.rows + 1) if task.rows % count == 0):
        if not _best_family_candidates(task._replace(microbatch_counts=[count]), names, random, steps=IMPROVEMENT_ROUNDS[:2])[
            0
        ].best.excess_bytes:
            yield f"{count} microbatches, of {task.rows // count} rows"
            break
    for more in range(ranks + 1, min(2 * ranks, len(task.profile.layer_names)) + 1):
        limits = task.limits.memory_bytes + (max(task.limits.memory_bytes),) * (more - ranks)
        wider = task._replace(limits=task.limits._replace(memory_bytes=limits, speeds=()))
        if not _best_family_candidates(wider, names, random, steps=IMPROVEMENT_ROUNDS[:2])[0].best.excess_bytes:
            yield f"{more * task.limits.dp} ranks"
            break


def _plan_from_candidate(way: Candidate, batch: int, names: Sequence[str]) -> Plan:
    cutting, best, table = way.search, way.best, way.search.timer.schedule
    terms, ways, stages = cutting.limits, cutting.stage_policies(best.choices), cutting.stage_costs(best.starts)
    costs, layers = cutting.simulation_costs(best), cutting.chain.layers
    timeline, reduced = simulate(table, costs), cutting.gradient_reduce_seconds(stages)
    seconds = timeline.makespan + reduced if terms.cores >= table.ranks else best.seconds
    shared = terms.gradient_reduce_seconds(sum(layer.parameters for layer in layers) / table.ranks)
    bound = min_step_seconds(layers, table.ranks, table.microbatches, terms.cores, terms.speeds) + shared
    peaks = [held + more for held, more in zip(timeline.peak_memory, cutting.unsimulated_bytes(best), strict=True)]
    again = table.microbatches * sum(each.recompute_seconds for each in ways)
    return Plan(
        table,
        cuts=tuple(names[start] for start in best.starts[1:]),
        recompute=tuple(each.recompute for each in ways),
        microbatches=table.microbatches,
        seconds=seconds,
        bound=bound,
        peak_memory=tuple(peaks),
        why=bottleneck_sentence(layers, timeline, table.microbatches, again, reduced),
        costs=costs,
        batch=batch,
        dp=terms.dp,
        layers=tuple(names),
    )


def _with_searched_tables(
    ways: Sequence[Candidate], effort: str, many: int, seed: int, random: Random, progress: Progress | None
) -> list[Candidate]:
    """`ways`, and tables made for so many of the best of them, on the cuts that are then the best."""
    made = []
    chosen = [way for way in ways if len(way.best.choices) > 1 and not way.best.excess_bytes][:many]
    for number, way in enumerate(chosen, 1):
        cutting, best, table = way.search, way.best, way.search.timer
        limits = [
            limit - more for limit, more in zip(cutting.limits.memory_bytes, cutting.unsimulated_bytes(best), strict=False)
        ]
        told = progress and partial(progress, f"table {number} of {len(chosen)}, {effort}")
        found = search(
            cutting.simulation_costs(best), table.placement, table.microbatches, limits, effort, seed, table.schedule, told
        )
        new = PartitionSearch(cutting.chain, ScheduleTimer(found.schedule), cutting.limits)
        made.append(Candidate(new, new.evaluate(best.starts, best.skipped_choices)).improve(IMPROVEMENT_ROUNDS[-1][1], random))
    return sorted([*made, *ways], key=lambda way: way.sort_key)
