"""The optimum of a small pipeline: OR-Tools' CP-SAT finds the shortest table, or a lower bound on it.

The start of every action is a whole number of time units. Times and memories are rounded down to units, so no table is lost:
what CP-SAT rules out is ruled out. Whole numbers, and those of up to three decimals, stay exact.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.plan.search import makespan_bounds
from penstock.plan.search.problem import TOLERANCE, SearchProblem
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Action, Kind
from penstock.timing.costs import Costs
from penstock.timing.simulate import simulate

MAX_SOLVER_NUMBER = 2.0**40  # the largest number that CP-SAT is given
RELATIVE_TOLERANCE = 1e-12  # numbers closer than this are equal
MAX_DETERMINISTIC_SECONDS = 300.0  # CP-SAT's own measure of work, the same on any machine; about one second each


class _Interval(NamedTuple):
    """The start, length and end of an action, as expressions over CP-SAT's variables."""

    start: Any
    length: Any
    end: Any


def check_solvable(costs: Costs, slices: int, teacher: int | None) -> None:
    """Raise ScheduleError if OR-Tools is not installed, or if its model does not have these costs, slices or a teacher."""
    if costs.overlap:
        raise ScheduleError(f"effort='optimal' knows no pairs that overlap: use 'long', or overlap=0 and not {costs.overlap}")
    if costs.is_ragged:
        raise ScheduleError("effort='optimal' knows no microbatches that cost unlike: use 'long'")
    if slices > 1:
        raise ScheduleError(f"effort='optimal' knows no slices: use 'long', or slices=1 and not {slices}")
    if teacher is not None:
        raise ScheduleError("effort='optimal' knows no teacher: use 'long'")
    _import_cp_model()


def _import_cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        problem = "effort='optimal' asks OR-Tools, which is not installed: pip install 'penstock-pipeline[optimal]'"
        raise ScheduleError(problem) from error
    return cp_model


def improve(problem: SearchProblem, initial: Schedule, lower_bound: float, seed: int) -> tuple[Schedule, float]:
    """Return the shortest table found for `problem`, which may be `initial`, and a lower bound of at least `lower_bound`.

    `problem`: with split backwards; full ones are tried wherever they may save time or memory.
    """
    model = _CpSatModel(problem, initial, lower_bound)
    solver = _import_cp_model().CpSolver()
    solver.parameters.max_deterministic_time = MAX_DETERMINISTIC_SECONDS
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # the same result on any number of cores
    if solver.status_name(solver.solve(model.model)) not in ("OPTIMAL", "FEASIBLE"):
        return initial, lower_bound
    return model.schedule(solver), max(lower_bound, solver.best_objective_bound * model.unit)


class _CpSatModel:
    """A pipeline as variables and constraints of CP-SAT; `unit` is the time that 1 stands for."""

    def __init__(self, problem: SearchProblem, initial: Schedule, lower_bound: float) -> None:
        self.problem, self.cp_model = problem, _import_cp_model()
        self.model = self.cp_model.CpModel()
        times, stages = problem.times, problem.num_stages
        full = problem.costs.action_costs(stages)[Kind.B]
        # By stage: whether a full backward may be worth it, because it takes less time or less memory than its halves.
        self.may_be_full_backward = [
            full_time < times[stages + stage] + times[2 * stages + stage] or size.keep > size.act
            for stage, (full_time, size) in enumerate(zip(full, problem.sizes, strict=True))
        ]
        initial_makespan = simulate(initial, problem.costs).makespan
        ways = sorted({time for sends in problem.sends for send in sends for time in send[2:]})
        every = [*times, *full, *ways]
        numbers, self.unit = _scale_to_integers(every, 2 * initial_makespan)
        self.time = dict(zip(every, numbers, strict=True))
        self.full = [self.time[stage_time] for stage_time in full]
        self.is_full_backward: dict[int, Any] = {}  # the number of an I -> whether it is a B
        self.horizon = math.floor(initial_makespan / self.unit * (1 + RELATIVE_TOLERANCE))
        self.runs = list[_Interval]()
        for action in range(len(problem.cost)):
            self.runs.append(self._add_action(action))
        self.end = self.model.new_int_var(math.ceil(lower_bound / self.unit * (1 - TOLERANCE)), self.horizon, "end")
        self.model.minimize(self.end)
        self._add_precedences()
        self._add_rank_capacities()
        self._add_memory_limits()
        self._add_hint(initial)

    def _add_action(self, action: int) -> _Interval:
        """Return the variables of an action; its length is one of them if it is a backward that may be full."""
        problem, stage = self.problem, action // self.problem.microbatches % self.problem.num_stages
        start, length = self.model.new_int_var(0, self.horizon, ""), self.time[problem.cost[action]]
        if action < problem.first_back or not self.may_be_full_backward[stage]:
            return _Interval(start, length, start + length)
        end = self.model.new_int_var(0, self.horizon, "")
        if action < problem.first_weight:
            is_full = self.is_full_backward[action] = self.model.new_bool_var("")
            return _Interval(start, length + (self.full[stage] - length) * is_full, end)
        is_full = self.is_full_backward[action - problem.first_back]
        self.model.add(start == self.runs[action - problem.first_back].end).only_enforce_if(is_full)
        return _Interval(start, length - length * is_full, end)

    def _add_precedences(self) -> None:
        """Add the constraints that an action starts after those that it needs, and that a code's microbatches run in order."""
        problem, count = self.problem, self.problem.microbatches
        transmissions: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for action, run in enumerate(self.runs):
            self.model.add(run.end <= self.end)
            if (action + 1) % count and not (
                action >= problem.first_weight and self.may_be_full_backward[action // count % problem.num_stages]
            ):
                self.model.add(self.runs[action + 1].start >= run.end)
            if problem.first_back <= action < problem.first_weight:
                self.model.add(self.runs[action + problem.first_back].start >= run.end)
            for slot, channel, transmission, latency in problem.sends[action]:
                leaves = run.end
                if channel and transmission:
                    way = self.time[transmission]
                    begins = self.model.new_int_var(0, self.horizon, "")
                    self.model.add(begins >= run.end)
                    transmissions[channel].append(self.model.new_fixed_size_interval_var(begins, way, ""))
                    leaves = begins + way
                self.model.add(self.runs[problem.receiver[slot]].start >= leaves + self.time[latency])
        for intervals in transmissions.values():
            self.model.add_no_overlap(intervals)

    def _add_rank_capacities(self) -> None:
        """Add the constraints that a rank runs one action at a time, and that the chain before and after an action has time."""
        problem = self.problem
        intervals_of_rank: list[list[Any]] = [[] for _ in range(problem.ranks)]
        relaxed_problem = makespan_bounds.relaxed_problem(problem)
        heads, tails = makespan_bounds.earliest_starts(relaxed_problem), relaxed_problem.tails
        for action, run in enumerate(self.runs):
            stage = action // problem.microbatches % problem.num_stages
            intervals_of_rank[problem.placement[stage]].append(self.model.new_interval_var(run.start, run.length, run.end, ""))
            if not self.may_be_full_backward[stage]:
                self.model.add(run.start >= math.floor(heads[action] / self.unit * (1 - TOLERANCE)))
                self.model.add(run.end + math.floor(tails[action] / self.unit * (1 - TOLERANCE)) <= self.end)
        for intervals in intervals_of_rank:
            self.model.add_no_overlap(intervals)

    def _add_memory_limits(self) -> None:
        """Add the limit on what a rank holds: all of an activation from its F to the end of its I, then what W needs."""
        problem, count = self.problem, self.problem.microbatches
        for rank, limit in enumerate(problem.limits):
            sizes = [problem.sizes[stage] for stage in problem.stages_of[rank]]
            if count * sum(max(size) for size in sizes) <= limit:
                continue
            units, unit = _scale_to_integers([amount for size in sizes for amount in size], limit)
            intervals, amounts = list[Any](), list[int]()
            for at, stage in enumerate(problem.stages_of[rank]):
                act, keep = units[2 * at : 2 * at + 2]
                for m in range(count):
                    forward, inputs, weights = (self.runs[(k * problem.num_stages + stage) * count + m] for k in range(3))
                    spans = [(forward, weights, act)] if act == keep else [(forward, inputs, act), (inputs, weights, keep)]
                    for first, last, amount in spans:
                        begins = first.end if first is inputs else first.start
                        length = self.model.new_int_var(0, self.horizon, "")
                        intervals.append(self.model.new_interval_var(begins, length, last.end, ""))
                        amounts.append(amount)
            self.model.add_cumulative(intervals, amounts, math.floor(limit / unit))

    def _add_hint(self, initial: Schedule) -> None:
        """Add `initial` as a hint: the start of the n-th action of each code, and whether it is a full backward."""
        problem, starts = self.problem, defaultdict[int, list[tuple[float, bool]]](list)
        for event in simulate(initial, problem.costs).events:
            kind, stage, *_ = event.action
            place = {Kind.F: 0, Kind.W: 2}.get(kind, 1)
            starts[place * problem.num_stages + stage].append((event.start, kind is Kind.B))
        for code, starts_of_code in starts.items():
            for action, (start, is_full) in enumerate(sorted(starts_of_code), code * problem.microbatches):
                self.model.add_hint(self.runs[action].start, math.floor(start / self.unit * (1 + RELATIVE_TOLERANCE)))
                if action in self.is_full_backward:
                    self.model.add_hint(self.is_full_backward[action], is_full)

    def schedule(self, solver: Any) -> Schedule:
        """Return the table of the solution: the actions of every rank in the order in which they start."""
        problem, count = self.problem, self.problem.microbatches
        placed: list[list[tuple[int, int, Action]]] = [[] for _ in range(problem.ranks)]
        for code in problem.codes:
            kind, stage = problem.kinds[code // problem.num_stages], code % problem.num_stages
            for m in range(count):
                action = code * count + m
                backward = action - problem.first_back if kind is Kind.W else action
                is_full = backward in self.is_full_backward and solver.value(self.is_full_backward[backward])
                if not (is_full and kind is Kind.W):
                    run = self.runs[action]
                    placed_action = Action(Kind.B if is_full else kind, stage, m)
                    placed[problem.placement[stage]].append((solver.value(run.start), solver.value(run.end), placed_action))
        rows = [[action for _, _, action in sorted(row, key=lambda timed_action: timed_action[:2])] for row in placed]
        return from_rows("searched", rows, problem.placement)


def _scale_to_integers(values: Sequence[float], largest: float) -> tuple[list[int], float]:
    """Return `values` in whole units, rounded down, and the unit. `largest`: the largest number to be represented."""
    decimals = [Fraction(value).limit_denominator(1000) for value in values]
    scale = float(math.lcm(*(decimal.denominator for decimal in decimals)))
    if scale * largest > MAX_SOLVER_NUMBER or any(
        abs(decimal - value) > RELATIVE_TOLERANCE * value for decimal, value in zip(decimals, values, strict=True)
    ):
        scale = 2.0 ** (math.frexp(MAX_SOLVER_NUMBER)[1] - math.frexp(largest)[1])
    numbers = [math.floor(value * scale * (1 + RELATIVE_TOLERANCE)) for value in values]
    common = math.gcd(*numbers) or 1
    return [number // common for number in numbers], common / scale
