"""Search for a plan: families with balanced partitions, then better partitions for the best, then tables made for these."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import product
from random import Random
from typing import Any, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.partition.balance import balanced_starts
from penstock.plan import argument_checks
from penstock.plan.argument_checks import nothing_fits_message
from penstock.plan.model_profile import LayerCost, ModelProfile, as_profile
from penstock.plan.partition_search import Candidate, Limits, PartitionSearch, StageStarts
from penstock.plan.result import Plan
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.search.table_search import search
from penstock.plan.stage_costs import ADAM_STATE_RATIO, LayerChain
from penstock.plan.step_bound import bottleneck_sentence, min_step_seconds
from penstock.plan.teacher_cut import (
    check_teacher_profile,
    limits_beside_teacher,
    min_seconds_with_teacher,
    partition_with_teacher,
)
from penstock.schedule.catalog import FAMILIES, build
from penstock.timing.simulate import simulate

Effort = Literal["quick", "normal", "long"]
Progress = Callable[[str, float, float], object]

MAX_PLANS = 5  # that `plan` returns
MAX_WITH_TEACHER = 4  # candidates that get a teacher
IMPROVEMENT_ROUNDS = ((24, 60_000), (8, 300_000), (2, 1_200_000))  # (candidates improved, actions timed for each)
MEMORY_WEIGHTS = 0.25, 0.5, 0.75, 1.0  # of bytes against seconds in balanced cuts, if memory is short
MAX_INTERLEAVED_ACTIONS = 50_000  # of a table with several stages on a rank
INTERLEAVED_STAGES_PER_RANK = (2, 3, 4)  # tried for a family that leaves it open
TABLE_SEARCHES = {  # (effort of the search, candidates that it makes tables for)
    "quick": (),
    "normal": (("quick", 2), ("quick", 1)),
    "long": (("quick", 3), ("normal", 1), ("long", 1)),
}


class ReplicaTask(NamedTuple):
    """The task of planning one replica of the pipeline."""

    profile: ModelProfile
    rows: int  # of a step
    microbatch_counts: Sequence[int]  # allowed numbers of microbatches
    slice_counts: Sequence[int]  # allowed numbers of slices of a microbatch
    limits: Limits
    teacher: ModelProfile | None = None

    @property
    def num_ranks(self) -> int:
        """The most ranks that a plan may use."""
        return len(self.limits.memory_bytes)

    def layer_chain(self, microbatches: int) -> LayerChain:
        """Return the layers' costs for `microbatches`: seconds of the mean one, bytes of the one with the most rows."""
        return LayerChain(self._layers(self.profile, microbatches))

    def layer_chain_with_teacher(self, microbatches: int) -> LayerChain:
        """Return the same, with the layers of the teacher behind the model's."""
        assert self.teacher is not None
        return LayerChain(self._layers(self.profile, microbatches), self._layers(self.teacher, microbatches))

    def _layers(self, profile: ModelProfile, microbatches: int) -> list[LayerCost]:
        mean_rows, most_rows = self.rows / microbatches, -(-self.rows // microbatches)
        byte_fields = ("activation", "keep", "output", "ends", "keys_and_values")
        return [
            mean._replace(**{field: getattr(largest, field) for field in byte_fields})
            for mean, largest in zip(profile.costs_at(mean_rows), profile.costs_at(most_rows), strict=True)
        ]


def plan(
    layers: ModelProfile | Sequence[LayerCost],
    ranks: int,
    memory: float | str | Sequence[float | str],
    *,
    batch: int,
    dp: int | Sequence[int] = 1,
    microbatches: int | Sequence[int] | None = None,
    slices: int | Sequence[int] = 1,
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
    teacher: ModelProfile | Sequence[LayerCost] | None = None,
) -> list[Plan]:
    """Return the fastest plans to train a model of these `layers`, the best first, at most five.

    `layers`: from `measure`, or a list of `LayerCost` for one row.
    `ranks`: how many there are; a plan uses fewer if that is faster.
    `memory`: bytes of each rank, or a text like "2GB", for parameters, gradients, optimizer state, activations and messages;
    or one number for each rank of a pipeline.
    `batch`: rows of a step. `dp`: number of replicas of the pipeline, which share ranks and rows; or several to choose from.
    `microbatches`: number, or numbers to choose from, of a replica's microbatches; by default any that divides its rows.
    `slices`: number of slices of a microbatch's tokens; or several to choose from. Each slice is assumed to cost an equal
    share.
    `schedules`: names of families, by default all, and tables that are made for the model.
    `effort`: `quick` tries families only, `normal` and `long` search for tables too. The same `seed` gives the same plans.
    `optimizer`: bytes of its state for each byte of parameters; by default Adam's.
    `send`, `bandwidth`: seconds of a message, and bytes a second. `action`: seconds of the engine for each action.
    `cores`: how many ranks can compute at once, if they share a machine with fewer cores.
    `speeds`: of each rank of a pipeline, if they differ: 0.5 for one that takes twice as long as the layers say.
    `fewer`: whether fewer ranks may be used than there are.
    `progress`: called with the schedule, the share of the search that is done, and the best seconds so far. If it
    returns a true value, the search ends with the best plans so far, as on Ctrl-C.
    `teacher`: the layers of a second, frozen model, as `layers`, of which the forwards count. The plans are for
    `Pipeline(plan=plan, teacher=model)` and steps with `next_args`. Both models are cut by what each rank has idle, and memory
    also holds the teacher's parameters and the outputs that wait for their losses.

    Raises PenstockError if nothing fits, with the bytes that a rank lacks and what would fit.

        plans = plan(measure(model, (tokens,)), ranks=4, memory=2e9, batch=64, effort="quick")
        print(plans[0])
    """
    profile = as_profile(layers)
    ranks, batch, seed = argument_checks.parse_ranks_batch_and_seed(profile, ranks, batch, seed, effort, TABLE_SEARCHES)
    numbers = argument_checks.parse_numbers(optimizer=optimizer, send=send, bandwidth=bandwidth, action=action, cores=cores)

    names = argument_checks.family_names(schedules)
    slice_counts = argument_checks.slice_counts(slices, names)
    teacher_profile, max_rows = None if teacher is None else as_profile(teacher), profile.max_rows
    if teacher_profile is not None:
        check_teacher_profile(teacher_profile, slice_counts)
        max_rows = min(max_rows, teacher_profile.max_rows)
    tasks = []
    for replicas in argument_checks.replica_counts(dp, ranks, batch):
        replica_ranks, rows = ranks // replicas, batch // replicas
        memory_bytes = argument_checks.memory_of_ranks(memory, replica_ranks)
        rank_speeds = argument_checks.speeds_of_ranks(speeds, replica_ranks)
        numbers_of_replica = {**numbers, "cores": numbers["cores"] / replicas}
        limits = Limits(memory_bytes, speeds=rank_speeds, dp=replicas, **numbers_of_replica)
        if counts := argument_checks.microbatch_counts(microbatches, batch, rows, replica_ranks, max_rows):
            tasks.append(ReplicaTask(profile, rows, counts, slice_counts, limits, teacher_profile))
    if not tasks:
        raise PenstockError(f"dp={dp} replicas have less rows each than the {microbatches} microbatches that are asked for")

    random = Random(seed)
    candidates = [candidate for task in tasks for candidate in _best_candidates(task, names, random, fewer)]
    candidates.sort(key=lambda candidate: candidate.sort_key)

    closest = candidates[0]
    if closest.best.excess_bytes:
        [task] = [task for task in tasks if task.limits.dp == closest.search.limits.dp]
        raise PenstockError(nothing_fits_message(closest.search, closest.best, _settings_that_would_fit(task)))

    if schedules is None:
        with suppress(KeyboardInterrupt):
            for search_effort, num_candidates in TABLE_SEARCHES[effort]:
                candidates = _with_searched_tables(candidates, search_effort, num_candidates, seed, random, progress)

    different: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        if not candidate.best.excess_bytes:
            table, limits = candidate.search.timer.schedule, candidate.search.limits
            different.setdefault((table.actions, candidate.best.starts, limits.dp), candidate)
    best_first = list(different.values())[:MAX_PLANS]
    return [_plan_from_candidate(candidate, batch) for candidate in best_first]


def _best_candidates(task: ReplicaTask, names: Sequence[str], random: Random, fewer: bool) -> list[Candidate]:
    """Return the best families, with the teacher if there is one, the best first."""
    if task.teacher is None:
        return _best_family_candidates(task, names, random, fewer)
    of_model = task._replace(limits=limits_beside_teacher(task.limits, task.teacher))
    candidates = _best_family_candidates(of_model, names, random, fewer)
    return _with_teacher(candidates, task, random)


# -- families -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _family_timer(name: str, num_ranks: int, microbatches: int, stages_per_rank: int, slices: int) -> ScheduleTimer:
    return ScheduleTimer(build(name, num_ranks, microbatches, stages_per_rank, slices=slices))


def family_timers(
    names: Sequence[str], num_ranks: int, microbatches: int, max_stages: int, slices: int = 1
) -> Iterator[ScheduleTimer]:
    """Yield the tables of these families that have at most `max_stages` stages and are not too large to search.

    For `slices` above 1 only families that cut tokens.
    """
    for name in names:
        family = FAMILIES[name]
        if slices > 1 and "slices" not in family.options:
            continue
        is_open = "stages_per_rank" in family.options
        for stages_per_rank in INTERLEAVED_STAGES_PER_RANK if is_open else (family.stages_per_rank,):
            num_stages = stages_per_rank * num_ranks
            is_small = stages_per_rank == 1 or 3 * num_stages * microbatches * slices <= MAX_INTERLEAVED_ACTIONS
            if num_stages <= max_stages and is_small:
                yield _family_timer(name, num_ranks, microbatches, stages_per_rank, slices)


def _best_family_candidates(
    task: ReplicaTask,
    names: Sequence[str],
    random: Random,
    fewer: bool = True,
    rounds: Sequence[tuple[int, int]] = IMPROVEMENT_ROUNDS,
) -> list[Candidate]:
    """Return the best families with improved partitions, the best first, for every number of ranks that may be the fastest.

    `fewer`: whether fewer ranks than there are may be used. `rounds`: as `IMPROVEMENT_ROUNDS`.
    """
    candidates: list[Candidate] = []
    chains = {count: task.layer_chain(count) for count in task.microbatch_counts}
    most_ranks = min(task.num_ranks, len(task.profile.layer_names))

    for num_ranks in range(most_ranks, 0, -max(1, most_ranks // 8)) if fewer else [task.num_ranks]:
        limits = task.limits.for_first_ranks(num_ranks)
        counts: Sequence[int] = list(chains)
        if num_ranks < most_ranks and candidates and not candidates[0].best.excess_bytes:
            counts = [candidates[0].search.timer.microbatches]  # the best so far

        for count, slices in product(counts, task.slice_counts):
            chain = chains[count]
            bound = min_step_seconds(chain.layers, num_ranks, count, limits.cores, limits.speeds, slices)
            if not candidates or candidates[0].best.excess_bytes or bound < candidates[0].best.seconds:
                cut = lru_cache(partial(_balanced_starts, chain, num_ranks, limits))
                candidates += [
                    _balanced_candidate(PartitionSearch(chain, timer, limits), cut)
                    for timer in family_timers(names, num_ranks, count, len(chain.layers), slices)
                ]
        candidates = sorted(candidates, key=lambda candidate: candidate.penalized_seconds)[: IMPROVEMENT_ROUNDS[0][0]]

    if not candidates:
        raise PenstockError(f"{', '.join(names)}: all have more stages than the {most_ranks} layers, or are too large")

    for number, action_budget in rounds:
        leaders = candidates[:number]
        candidates[:number] = [
            leader.with_best_partition_of(candidates[:number]).improve(action_budget, random) for leader in leaders
        ]
        candidates.sort(key=lambda candidate: candidate.penalized_seconds)
    return sorted(candidates, key=lambda candidate: candidate.sort_key)


def _balanced_candidate(search: PartitionSearch, balanced_cut: Callable[[int, float], StageStarts]) -> Candidate:
    """Return a table with a balanced partition: of seconds, or, if memory is short, of bytes or a mix of both.

    `balanced_cut`: of (number of stages, weight of memory).
    """
    num_stages = len(search.timer.placement)
    by_seconds = Candidate(search, search.evaluate(balanced_cut(num_stages, 0.0)))
    recomputes = any(policy.recompute is not None for policy in search.stage_policies(by_seconds.best.choices))
    if not by_seconds.best.excess_bytes and not recomputes:
        return by_seconds

    by_memory = (Candidate(search, search.evaluate(balanced_cut(num_stages, weight))) for weight in MEMORY_WEIGHTS)
    return min(by_seconds, *by_memory, key=lambda candidate: candidate.penalized_seconds)


def _balanced_starts(chain: LayerChain, num_ranks: int, limits: Limits, num_stages: int, memory_weight: float) -> StageStarts:
    """Return the partition whose costliest stage is the cheapest; bytes have `memory_weight`, seconds have the rest."""
    memory = [(2 + limits.optimizer) * layer.parameters + num_ranks * (layer.activation + layer.ends) for layer in chain.layers]
    all_seconds, all_memory = sum(chain.layer_seconds) or 1.0, sum(memory) or 1.0
    costs = [
        (1 - memory_weight) * seconds / all_seconds + memory_weight * size / all_memory
        for seconds, size in zip(chain.layer_seconds, memory, strict=True)
    ]
    return tuple(balanced_starts(costs, num_stages))


def _settings_that_would_fit(task: ReplicaTask) -> Iterator[str]:
    """Yield what would fit, each change alone: the next number of microbatches above those tried, the next number of ranks."""
    names, random, num_ranks = ("1f1b", "zb-h1", "v-min"), Random(0), task.num_ranks

    def fits(changed_task: ReplicaTask) -> bool:
        best = _best_family_candidates(changed_task, names, random, rounds=IMPROVEMENT_ROUNDS[:2])[0].best
        return not best.excess_bytes

    more_microbatches = range(max(task.microbatch_counts) + 1, task.rows + 1)
    for count in (count for count in more_microbatches if task.rows % count == 0):
        if fits(task._replace(microbatch_counts=[count])):
            yield f"{count} microbatches, of {task.rows // count} rows"
            break

    for more_ranks in range(num_ranks + 1, min(2 * num_ranks, len(task.profile.layer_names)) + 1):
        memory = task.limits.memory_bytes
        wider = memory + (max(memory),) * (more_ranks - num_ranks)
        if fits(task._replace(limits=task.limits._replace(memory_bytes=wider, speeds=()))):
            yield f"{more_ranks * task.limits.dp} ranks"
            break


# -- a teacher, tables made for a partition, and the result -------------------------------------------------------------


def _with_teacher(candidates: Sequence[Candidate], task: ReplicaTask, random: Random) -> list[Candidate]:
    """Return those candidates with a teacher that can be the fastest, the best first."""
    chains = {count: task.layer_chain_with_teacher(count) for count in task.microbatch_counts}

    def least(candidate: Candidate) -> tuple[float, float]:
        chain = chains[candidate.search.timer.microbatches]
        return candidate.best.excess_bytes, min_seconds_with_teacher(candidate, chain)

    found: list[Candidate] = []
    for candidate in sorted(candidates, key=least)[:MAX_WITH_TEACHER]:
        if found and not found[0].best.excess_bytes and found[0].best.seconds <= least(candidate)[1]:
            break
        chain = chains[candidate.search.timer.microbatches]
        limits = task.limits.for_first_ranks(len(candidate.best.choices))
        found.append(partition_with_teacher(candidate, chain, limits, random))
        found.sort(key=lambda candidate: candidate.sort_key)
    return found


def _with_searched_tables(
    candidates: Sequence[Candidate],
    effort: str,
    num_candidates: int,
    seed: int,
    random: Random,
    progress: Progress | None,
) -> list[Candidate]:
    """Return `candidates` and, for the best `num_candidates` of them, tables searched for on their partitions."""
    searched = []
    best = [candidate for candidate in candidates if len(candidate.best.choices) > 1 and not candidate.best.excess_bytes]
    best = best[:num_candidates]

    for number, (partition_search, partition) in enumerate(best, 1):
        timer, limits = partition_search.timer, partition_search.limits
        unsimulated = partition_search.static_and_transient_bytes(partition)
        activation_limits = [limit - size for limit, size in zip(limits.memory_bytes, unsimulated, strict=False)]
        report = progress and partial(progress, f"table {number} of {len(best)}, {effort}")

        result = search(
            partition_search.simulation_costs(partition),
            timer.placement,
            timer.microbatches,
            activation_limits,
            effort,
            seed,
            timer.schedule,
            report,
            timer.slices,
            timer.schedule.teacher,
        )
        new_search = PartitionSearch(partition_search.chain, ScheduleTimer(result.schedule), limits)
        new = Candidate(new_search, new_search.evaluate(partition.starts, partition.skipped_choices))
        searched.append(new.improve(IMPROVEMENT_ROUNDS[-1][1], random))
    return sorted([*searched, *candidates], key=lambda candidate: candidate.sort_key)


def _plan_from_candidate(candidate: Candidate, batch: int) -> Plan:
    partition_search, best = candidate
    table, limits, layers = partition_search.timer.schedule, partition_search.limits, partition_search.chain.layers
    policies, stages = partition_search.stage_policies(best.choices), partition_search.stage_costs(best.starts)
    num_stages, num_layers = table.num_trained_stages, partition_search.chain.num_model_layers  # of the model
    of_model, of_teacher = layers[:num_layers], layers[num_layers:]

    costs = partition_search.simulation_costs(best)
    timeline = simulate(table, costs)
    reduce_seconds = partition_search.max_gradient_reduce_seconds(stages)
    seconds = timeline.makespan + reduce_seconds if limits.cores >= table.ranks else best.seconds

    min_reduce_seconds = limits.gradient_reduce_seconds(sum(layer.parameters for layer in layers) / table.ranks)
    teacher_seconds = sum(layer.seconds for layer in of_teacher)
    sizes = table.ranks, table.microbatches, limits.cores, limits.speeds, table.slices
    bound = min_step_seconds(of_model, *sizes, teacher_seconds) + min_reduce_seconds

    unsimulated = partition_search.static_and_transient_bytes(best)
    peaks = [simulated + size for simulated, size in zip(timeline.peak_memory, unsimulated, strict=True)]
    recompute_seconds = table.microbatches * sum(policy.recompute_seconds for policy in policies)
    return Plan(
        table,
        cuts=tuple(layers[start].name for start in best.starts[1:num_stages]),
        recompute=tuple(policy.recompute for policy in policies[:num_stages]),
        microbatches=table.microbatches,
        seconds=seconds,
        bound=bound,
        peak_memory=tuple(peaks),
        why=bottleneck_sentence(layers, timeline, table.microbatches, recompute_seconds, reduce_seconds),
        costs=costs,
        batch=batch,
        dp=limits.dp,
        layers=tuple(layer.name for layer in of_model),
        teacher_cuts=tuple(layers[start].name for start in best.starts[num_stages + 1 :]),
        teacher_layers=tuple(layer.name for layer in of_teacher),
    )
