"""The search: find tables that fit the memory limit, anneal the best of them, and return the best with its lower bound."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from penstock.errors import ScheduleError, is_whole_number
from penstock.plan.search import cp_sat, initial_tables, periodic
from penstock.plan.search.annealing import ReportProgress, anneal
from penstock.plan.search.incremental_simulation import IncrementalSimulation, Snapshot
from penstock.plan.search.makespan_bounds import LowerBound, lower_bound
from penstock.plan.search.problem import INFINITE, TOLERANCE, Rows, SearchProblem
from penstock.schedule.proof import verify
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Chains, Kind, Table, check_is_table
from penstock.schedule.transform import with_full_backwards, with_overlapped_pairs
from penstock.timing.costs import Costs
from penstock.timing.simulate import simulate

EFFORTS = {"quick": 2_500_000, "normal": 15_000_000, "long": 90_000_000, "optimal": 15_000_000}  # work, in simulated actions
Progress = Callable[[float, float], object]  # (share of the work done, best makespan so far) -> true to stop


@dataclass(frozen=True)
class Found:
    """The result of a search: the best table, its lower bound, and the best published table."""

    schedule: Schedule  # verified
    makespan: float  # of `schedule`, from `simulate`
    bound: float  # no table within the limit is shorter
    bound_reason: str  # why no table is shorter than the bound
    family: str | None  # the best published table with these stages within the limit; None: there is none
    family_makespan: float | None

    @property
    def proven(self) -> bool:
        """Return whether no table within the limit is shorter."""
        return self.makespan <= self.bound * (1 + TOLERANCE)


class _SearchFinished(Exception):
    """The best table is proven optimal, or `progress` returned True."""


def search(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    limit: float | Sequence[float] | None = None,
    effort: str = "normal",
    seed: int = 0,
    start: Schedule | None = None,
    progress: Progress | None = None,
    slices: int = 1,
    teacher: int | None = None,
    ahead: bool = True,
) -> Found:
    """Search for the table with the shortest step, within a limit on memory, for these costs.

    `costs`: of the stages of `placement`, as for `simulate`. If pairs overlap, the best table gets some. Microbatches of
    unequal costs run in their order.
    `placement`: the rank of every stage.
    `microbatches`: M, the number of microbatches of a batch.
    `limit`: the most that the activations of a rank, and a teacher's outputs, may take at once (`Timeline.peak_memory`), in the
    unit of `costs.act` and `costs.teacher_output`: a number, or one for each rank. By default any amount.
    `effort`: `quick`, `normal` or `long`: about 1, 10 and 60 seconds. Work is counted, not time, so the same arguments give the
    same table on any machine. `optimal`, for small pipelines: `normal`, and then up to some minutes of OR-Tools
    (`pip install 'penstock-pipeline[optimal]'`), which proves that nothing is shorter, or finds it, or raises the bound.
    `start`: one more table to begin with, for example an earlier result.
    `progress`: called with the share of work done and the best makespan so far (infinite before there is one), about ten
    times a second. If it returns something true, the search ends with its best table, as it does on Ctrl-C.
    `slices`: K, the slices of a microbatch along its sequence. Costs are of whole microbatches.
    `teacher`, `ahead`: the first stage in `placement` of a second, frozen model, and whether its forwards are of the next
    batch, as in `with_teacher`, which adds them to the published tables. The order of both models is searched.

    The table found is never longer than the best published one within the limit. Raises ScheduleError for a limit that no table
    keeps, for invalid costs, placement or numbers, and for `optimal` without OR-Tools or with overlapping pairs.

        found = search(Costs(3, 4, 2), placement=(0, 1, 2, 2, 1, 0), microbatches=8, limit=4, effort="quick")
        found.makespan, found.bound, found.family_makespan
    """
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise ScheduleError(f"effort={effort!r}: use {', '.join(EFFORTS)}")
    if not isinstance(costs, Costs):
        raise ScheduleError(f"costs={costs!r} are none: Costs(forward=.., backward_input=.., backward_weight=..) makes some")
    microbatches, seed = as_integer("microbatches", microbatches, 1), as_integer("seed", seed, -INFINITE)
    slices = as_integer("slices", slices, 1)
    placement = as_placement(placement)
    chains = _chains(placement, teacher, ahead, slices)
    limits = memory_limits(limit, costs, placement, chains, microbatches)
    _check_start(start, placement, microbatches, slices, chains)
    if effort == "optimal":
        cp_sat.check_solvable(costs, slices, teacher)
    problems = [
        SearchProblem(costs, placement, microbatches, limits, full_backwards, slices, chains)
        for full_backwards in _full_backward_choices(costs, len(placement))
    ]
    best = _BestSchedule(problems[0], start, EFFORTS[effort], progress)
    rng = random.Random(seed)
    with suppress(KeyboardInterrupt, _SearchFinished):
        best.add_work_or_finish()
        for problem in problems:
            _search_backward_form(best, problem, best.work / len(problems), rng)
        if effort == "optimal":
            best.prove_optimal(seed)
    return best.found()


def _full_backward_choices(costs: Costs, stages: int) -> list[bool]:
    """Return the values of `full_backwards` to search with: both if a full backward costs or holds less than its halves."""
    times = costs.action_costs(stages)
    halves = zip(times[Kind.I], times[Kind.W], strict=True)
    cheaper = any(full < i + w for full, (i, w) in zip(times[Kind.B], halves, strict=True))
    return [False, True] if cheaper or any(keep > act for act, keep in costs.activation_sizes(stages)) else [False]


def _chains(placement: Sequence[int], teacher: int | None, ahead: bool, slices: int) -> Chains:
    """Return the chains of the stages. Raises ScheduleError for a teacher that cannot be."""
    count = len(placement)
    if teacher is None:
        return Chains(count)
    if not is_whole_number(teacher, 1) or teacher >= count:
        raise ScheduleError(f"teacher={teacher!r}: give the first stage of the teacher in the placement, 1 to {count - 1}")
    if placement[-1] != placement[teacher - 1]:
        raise ScheduleError(
            f"the teacher's last stage {count - 1} is on rank {placement[-1]}, but the loss, which takes its outputs, on rank "
            f"{placement[teacher - 1]}, with stage {teacher - 1}: place both on one rank"
        )
    if slices > 1:
        raise ScheduleError(f"slices={slices} with a teacher, whose tokens are not cut: use slices=1")
    return Chains(count, frozenset(range(teacher, count)), int(teacher), bool(ahead))


def _check_start(start: Schedule | None, placement: tuple[int, ...], microbatches: int, slices: int, chains: Chains) -> None:
    if start is not None:
        check_is_table(start)
        verify(start)
        if start.forward_only:
            raise ScheduleError(
                f"{start.name} is no start: it has frozen stages. Search a table of a model that is all trained"
            )
        if (start.teacher, start.ahead) != (chains.teacher, chains.ahead):
            of_start, of_search = (f"teacher={of.teacher}, ahead={of.ahead}" for of in (start, chains))
            raise ScheduleError(f"{start.name} is no start: it has {of_start}, not {of_search}")
        if start.slices != slices:
            raise ScheduleError(f"{start.name} is no start: it has slices={start.slices}, not {slices}")
        if (start.placement, start.microbatches) != (placement, microbatches):
            start_text = f"{start.microbatches} microbatches on {start.placement}"
            raise ScheduleError(f"{start.name} is no start: it has {start_text}, not {microbatches} on {placement}")


class _BestSchedule:
    """The best table found so far, the work done, and the callback that reports them."""

    def __init__(self, problem: SearchProblem, start: Schedule | None, work: int, progress: Progress | None) -> None:
        self.problem, self.work, self.progress, self.work_done = problem, work, progress, 0.0
        self.bound = lower_bound(problem)
        self.published = list(initial_tables.published_tables(problem))
        self.tables = [*self.published, *([start] if start else ())]
        self.time = lru_cache(self._makespan_within_limits)
        self.makespan = min(map(self.time, self.tables), default=INFINITE)
        self.searched: tuple[SearchProblem, Rows] | None = None  # None: the best is one of `tables`

    def _makespan_within_limits(self, table: Table) -> float:
        """Return the makespan of `table`; infinite if it exceeds a memory limit, or deadlocks."""
        try:
            timeline = simulate(table, self.problem.costs)
        except ScheduleError:  # pairs that wait for each other in a cycle
            return INFINITE
        fits = all(peak <= limit for peak, limit in zip(timeline.peak_memory, self.problem.limits, strict=True))
        return timeline.makespan if fits else INFINITE

    def add_work_and_keep_best(self, work: int, simulation: IncrementalSimulation) -> None:
        """Count `work` as done; keep the table of `simulation` if it is the best."""
        if simulation.makespan < self.makespan:
            self.makespan, self.searched = simulation.makespan, (simulation.problem, simulation.rows_with_weights())
        self.add_work_or_finish(work)

    def add_work_or_finish(self, work: float = 0) -> None:
        """Count `work` as done. Raises _SearchFinished if the best is optimal, or `progress` returned True."""
        self.work_done += work
        if self.makespan <= self.bound.time * (1 + TOLERANCE):
            raise _SearchFinished
        if self.progress and self.progress(min(1.0, self.work_done / self.work), self.makespan):
            raise _SearchFinished

    def prove_optimal(self, seed: int) -> None:
        """Add the table that OR-Tools finds, and raise the bound to what it proves."""
        table, lower_bound = cp_sat.improve(self.problem, self.found().schedule, self.bound.time, seed)
        self.tables.append(table)
        if lower_bound > self.bound.time:
            self.bound = LowerBound(lower_bound, "OR-Tools ruled out anything shorter")

    def found(self) -> Found:
        """Return the best table and its bound; the sequential table if the search was stopped before it had any."""
        problem = self.problem
        plain = SearchProblem(
            problem.costs, problem.placement, problem.microbatches, problem.limits, True, problem.slices, problem.chains
        )
        tables = [*self.tables, plain.schedule_from_rows(initial_tables.grouped_rows(plain, 1), "sequential")]
        if self.searched:
            searched_problem, rows = self.searched
            table = searched_problem.schedule_from_rows(rows)
            tables = [table, with_full_backwards(table), *tables]
        if problem.costs.overlap:
            tries = int(PAIRING_WORK_SHARE * self.work / len(problem.cost))
            best = tables[:2] if self.searched else [replace(min(tables, key=self.time), name="searched")]
            tables += [with_overlapped_pairs(schedule, self.time, tries) for schedule in best if not schedule.overlaps]
        table = min(tables, key=self.time)
        verify(table, skips=list(problem.costs.skips))
        time, published = self.time(table), [schedule for schedule in self.published if self.time(schedule) < INFINITE]
        family = min(published, key=self.time, default=None)
        name, of_family = (family.name, self.time(family)) if family else (None, None)
        return Found(table, time, min(self.bound.time, time), self.bound.reason, name, of_family)


ANNEALING_ROUNDS = (  # states to anneal, share of the work for all, their temperatures in turn, in typical times of an action
    (24, 0.3, (0.1, 0.3)),
    (8, 0.2, (0.3,)),
    (3, 0.2, (0.3,)),
    (1, 0.1, (0.2,)),
)
PERIODIC_WORK_SHARE = 0.08  # of the work: for periodic tables
PERIODIC_RUNS = 4  # independent searches for periodic tables
WORK_PER_CODE = 3  # work that placing one code in a period counts as
PAIRING_WORK_SHARE = 0.05  # of the work, in addition: actions timed to try pairs, if pairs overlap
FINAL_WORK_SHARE = 0.2  # of the work: to anneal the best rows, with every W in its place


def _search_backward_form(best: _BestSchedule, problem: SearchProblem, work: float, rng: random.Random) -> None:
    """Anneal all kinds of initial rows of `problem`: those of rules, periodic ones, and the tables to beat."""
    periodic_starts = list[periodic.StartOffsets]()
    for _ in range(PERIODIC_RUNS):
        periodic_starts += periodic.find_modulo_schedules(
            problem, rng, int(PERIODIC_WORK_SHARE / PERIODIC_RUNS * work / WORK_PER_CODE / len(problem.times))
        )
        best.add_work_or_finish(PERIODIC_WORK_SHARE / PERIODIC_RUNS * work)

    initial_rows = [
        *map(problem.rows_from_table, best.published),
        *initial_tables.initial_rows(problem),
        *(periodic.unroll_modulo_schedule(problem, offsets) for offsets in periodic_starts),
        *map(problem.rows_from_table, best.tables),
    ]
    _anneal_in_rounds(problem, initial_rows, work * (1 - PERIODIC_WORK_SHARE), rng, best.add_work_and_keep_best)


def _anneal_in_rounds(
    problem: SearchProblem, initial_rows: list[Rows], work: float, rng: random.Random, report: ReportProgress
) -> None:
    """Anneal many of `initial_rows` for a short time, the best results for longer, and the best of those for longest.

    Each result takes the place of its start: so those that go on differ, and an early good one does not crowd out the rest.
    Nothing happens if no start keeps the limit.
    """
    starting = dict[str, Snapshot]()
    for rows in initial_rows:
        simulation = IncrementalSimulation(problem, problem.without_weights(rows), [0.0] * problem.ranks)
        report(simulation.work, simulation)
        if simulation.makespan < INFINITE:
            starting.setdefault(str(simulation.rows), simulation.snapshot())  # equal rows only once
    if not starting:
        return
    states = list(starting.values())
    for num_states, share, hot in ANNEALING_ROUNDS:
        states = sorted(states, key=lambda state: state.makespan)[:num_states]
        for index in range(num_states):
            simulation.restore_and_simulate(states[index % len(states)])
            heat = hot[index % len(hot)] * problem.typical_time
            anneal(simulation, rng, int(work * share / num_states), heat, heat / 10, report)
            states[index % len(states)] = simulation.snapshot()
    simulation.restore_and_simulate(min(states, key=lambda state: state.makespan))
    simulation = IncrementalSimulation(problem, simulation.rows_with_weights())
    anneal(simulation, rng, int(work * FINAL_WORK_SHARE), problem.typical_time / 5, problem.typical_time / 20, report)


def as_integer(name: str, value: int, minimum: float) -> int:
    """Return `value`. Raises ScheduleError unless it is a whole number of `minimum` or more."""
    if not is_whole_number(value, minimum):
        bound = f" of {minimum:g} or more" if minimum > -INFINITE else ""
        raise ScheduleError(f"{name}={value!r}: use a whole number{bound}")
    return int(value)


def as_placement(placement: Sequence[int]) -> tuple[int, ...]:
    """Return `placement` as a tuple. Raises ScheduleError unless it has a stage for each rank."""
    homes = tuple(placement) if isinstance(placement, Iterable) else ()
    if not homes or not all(map(is_whole_number, homes)) or {*homes} != {*range(max(homes) + 1)}:
        raise ScheduleError(f"placement={placement!r} is none: give the rank of every stage, each rank from 0 on at least one")
    return tuple(map(int, homes))


def memory_limits(
    limit: float | Sequence[float] | None,
    costs: Costs,
    placement: tuple[int, ...],
    chains: Chains | None,
    microbatches: int,
) -> list[float]:
    """Return the limit of every rank. Raises ScheduleError if one is too low for one microbatch.

    With a teacher in `chains` its outputs count: one, or, between two steps with one that runs ahead, those of a batch.
    """
    ranks = max(placement) + 1
    limit_value: Any = INFINITE if limit is None else limit
    try:
        limits = [float(limit_value)] * ranks if isinstance(limit_value, Real) else [value + 0.0 for value in limit_value]
    except TypeError:
        raise ScheduleError(f"limit={limit!r}: give one number, or one for each rank") from None
    if len(limits) != ranks:
        raise ScheduleError(f"limit has {len(limits)} numbers for {ranks} ranks: give one number, or one for each rank")
    chains = chains or Chains(len(placement))
    min_memory, factor = [0.0] * ranks, max(costs.microbatch_factors or [1.0])
    sizes = costs.activation_sizes(len(placement))
    for stage, home in enumerate(placement):
        min_memory[home] += sizes[stage].act * factor * (stage not in chains.forward_only)
    if chains.teacher is not None:  # the last forward takes an output and keeps its own activation
        waiting = costs.teacher_output * (microbatches if chains.ahead else 1)
        min_memory[placement[-1]] += waiting - min(costs.teacher_output, sizes[chains.teacher - 1].act * factor)
    short = [rank for rank in range(ranks) if not min_memory[rank] <= limits[rank] * (1 + TOLERANCE)]
    if short:
        what = "the activations" if chains.teacher is None else "the teacher's outputs and the activations"
        rank_texts = ", ".join(f"rank {rank} {min_memory[rank]:g} (limit {limits[rank]:g})" for rank in short)
        raise ScheduleError(f"no table keeps the limit: {what} of one microbatch take on {rank_texts}")
    return limits
