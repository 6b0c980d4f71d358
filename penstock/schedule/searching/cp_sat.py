"""Small pipelines to the end: OR-Tools' CP-SAT finds the shortest table, or by how much a table might still be shorter.

Every action has a start, a whole number of a unit of time. Times and memories are rounded down to units, so no table is lost:
what CP-SAT rules out is ruled out. Whole numbers, and those of up to three decimals, stay exact.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.searching import bounds
from penstock.schedule.searching.problem import TOLERANCE, SearchProblem
from penstock.schedule.table import Action, Kind
from penstock.schedule.timing.simulate import Costs, simulate

MAX_SOLVER_NUMBER = 2.0**40  # of the numbers that CP-SAT is given
RELATIVE_TOLERANCE = 1e-12  # relative: so far apart may be what is the same number
MAX_DETERMINISTIC_SECONDS = 300.0  # CP-SAT's own measure of work, the same on any machine: about as many seconds


class OptimalResult(NamedTuple):
    """The shortest table that CP-SAT knows of, and what none is shorter than."""

    schedule: Schedule
    bound: float


class _Interval(NamedTuple):
    """An action as CP-SAT sees it: expressions over its variables."""

    start: Any
    length: Any
    end: Any


def check_solvable(costs: Costs) -> None:
    """Raises ScheduleError where OR-Tools is not installed, and for what it is not told of."""
    if costs.overlap:
        raise ScheduleError(f"effort='optimal' knows no pairs that overlap: use 'long', or overlap=0 and not {costs.overlap}")
    _solver()


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        told = "effort='optimal' asks OR-Tools, which is not installed: pip install 'penstock[optimal]'"
        raise ScheduleError(told) from error
    return cp_model


def improve(problem: SearchProblem, found: Schedule, least: float, seed: int) -> OptimalResult:
    """The shortest table for `problem`, `found` or a shorter one; no table is shorter than `least`.

    `problem`: with its backwards in halves; whole ones are tried wherever they may be worth it.
    """
    model = _CpSatModel(problem, found, least)
    solver = _solver().CpSolver()
    solver.parameters.max_deterministic_time = MAX_DETERMINISTIC_SECONDS
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # the same result on any number of cores
    if solver.status_name(solver.solve(model.model)) not in ("OPTIMAL", "FEASIBLE"):
        return OptimalResult(found, least)
    return OptimalResult(model.schedule(solver), max(least, solver.best_objective_bound * model.unit))


class _CpSatModel:
    """The pipeline in variables and constraints; `unit` is the time that 1 stands for."""

    def __init__(self, problem: SearchProblem, found: Schedule, least: float) -> None:
        self.problem, self.cp_model = problem, _solver()
        self.model = self.cp_model.CpModel()
        times, stages = problem.times, problem.num_stages
        full = problem.costs.action_costs(stages)[Kind.B]
        self.may_be_whole = [  # whether a whole backward may be worth it: it takes less time or less memory than its halves
            whole < times[stages + stage] + times[2 * stages + stage] or size.keep > size.act
            for stage, (whole, size) in enumerate(zip(full, problem.sizes, strict=True))
        ]
        longest = simulate(found, problem.costs).makespan
        ways = sorted({time for sends in problem.sends for send in sends for time in send[2:]})
        every = [*times, *full, *ways]
        numbers, self.unit = _units(every, 2 * longest)
        self.time = dict(zip(every, numbers, strict=True))
        self.full = [self.time[each] for each in full]
        self.whole: dict[int, Any] = {}  # the number of an I -> whether it is a B
        self.horizon = math.floor(longest / self.unit * (1 + RELATIVE_TOLERANCE))
        self.runs = list[_Interval]()
        for action in range(len(problem.cost)):
            self.runs.append(self._add_action(action))
        self.end = self.model.new_int_var(math.ceil(least / self.unit * (1 - TOLERANCE)), self.horizon, "end")
        self.model.minimize(self.end)
        self._add_precedences()
        self._add_rank_capacities()
        self._add_memory_limits()
        self._add_hint(found)

    def _add_action(self, action: int) -> _Interval:
        """The variables of an action, its length among them where it is a backward that may be whole."""
        problem, stage = self.problem, action // self.problem.microbatches % self.problem.num_stages
        start, length = self.model.new_int_var(0, self.horizon, ""), self.time[problem.cost[action]]
        if action < problem.first_back or not self.may_be_whole[stage]:
            return _Interval(start, length, start + length)
        end = self.model.new_int_var(0, self.horizon, "")
        if action < problem.first_weight:
            whole = self.whole[action] = self.model.new_bool_var("")
            return _Interval(start, length + (self.full[stage] - length) * whole, end)
        whole = self.whole[action - problem.first_back]
        self.model.add(start == self.runs[action - problem.first_back].end).only_enforce_if(whole)
        return _Interval(start, length - length * whole, end)

    def _add_precedences(self) -> None:
        """Every action after those that it needs, and the microbatches of a code one after the other."""
        problem, count = self.problem, self.problem.microbatches
        transmissions: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for action, run in enumerate(self.runs):
            self.model.add(run.end <= self.end)
            if (action + 1) % count and not (
                action >= problem.first_weight and self.may_be_whole[action // count % problem.num_stages]
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
                self.model.add(self.runs[problem.taker[slot]].start >= leaves + self.time[latency])
        for each in transmissions.values():
            self.model.add_no_overlap(each)

    def _add_rank_capacities(self) -> None:
        """On a rank one action after the other; none begins sooner or ends later than the chain through it allows."""
        problem = self.problem
        mine: list[list[Any]] = [[] for _ in range(problem.ranks)]
        heads, tails = bounds.heads_and_tails(problem)
        for action, run in enumerate(self.runs):
            stage = action // problem.microbatches % problem.num_stages
            mine[problem.placement[stage]].append(self.model.new_interval_var(run.start, run.length, run.end, ""))
            if not self.may_be_whole[stage]:
                self.model.add(run.start >= math.floor(heads[action] / self.unit * (1 - TOLERANCE)))
                self.model.add(run.end + math.floor(tails[action] / self.unit * (1 - TOLERANCE)) <= self.end)
        for each in mine:
            self.model.add_no_overlap(each)

    def _add_memory_limits(self) -> None:
        """What a rank holds: all of a microbatch from its F to the end of its I, then what W needs."""
        problem, count = self.problem, self.problem.microbatches
        for rank, limit in enumerate(problem.limits):
            sizes = [problem.sizes[stage] for stage in problem.stages_of[rank]]
            if count * sum(max(size) for size in sizes) <= limit:
                continue
            held, unit = _units([each for size in sizes for each in size], limit)
            intervals, amounts = list[Any](), list[int]()
            for at, stage in enumerate(problem.stages_of[rank]):
                act, keep = held[2 * at : 2 * at + 2]
                for m in range(count):
                    forward, inputs, weights = (self.runs[(k * problem.num_stages + stage) * count + m] for k in range(3))
                    spans = [(forward, weights, act)] if act == keep else [(forward, inputs, act), (inputs, weights, keep)]
                    for first, last, amount in spans:
                        begins = first.end if first is inputs else first.start
                        length = self.model.new_int_var(0, self.horizon, "")
                        intervals.append(self.model.new_interval_var(begins, length, last.end, ""))
                        amounts.append(amount)
            self.model.add_cumulative(intervals, amounts, math.floor(limit / unit))

    def _add_hint(self, found: Schedule) -> None:
        """Begin with `found`: when the n-th action of each code starts there, and whether it is a whole backward."""
        problem, starts = self.problem, defaultdict[int, list[tuple[float, bool]]](list)
        for event in simulate(found, problem.costs).events:
            kind, stage, *_ = event.action
            place = {Kind.F: 0, Kind.W: 2}.get(kind, 1)
            starts[place * problem.num_stages + stage].append((event.start, kind is Kind.B))
        for code, each in starts.items():
            for action, (start, whole) in enumerate(sorted(each), code * problem.microbatches):
                self.model.add_hint(self.runs[action].start, math.floor(start / self.unit * (1 + RELATIVE_TOLERANCE)))
                if action in self.whole:
                    self.model.add_hint(self.whole[action], whole)

    def schedule(self, solver: Any) -> Schedule:
        """The actions of every rank in the order in which they start."""
        problem, count = self.problem, self.problem.microbatches
        placed: list[list[tuple[int, int, Action]]] = [[] for _ in range(problem.ranks)]
        for code in problem.codes_in_dependency_order():
            kind, stage = problem.kinds[code // problem.num_stages], code % problem.num_stages
            for m in range(count):
                action = code * count + m
                back = action - problem.first_back if kind is Kind.W else action
                whole = back in self.whole and solver.value(self.whole[back])
                if not (whole and kind is Kind.W):
                    run = self.runs[action]
                    what = Action(Kind.B if whole else kind, stage, m)
                    placed[problem.placement[stage]].append((solver.value(run.start), solver.value(run.end), what))
        rows = [[what for _, _, what in sorted(row, key=lambda each: each[:2])] for row in placed]
        return from_rows("searched", rows, problem.placement)


def _units(values: Sequence[float], largest: float) -> tuple[list[int], float]:
    """`values` as numbers of a unit, rounded down, and the unit; `largest` is the largest number that there will be."""
    decimals = [Fraction(value).limit_denominator(1000) for value in values]
    scale = float(math.lcm(*(each.denominator for each in decimals)))
    if scale * largest > MAX_SOLVER_NUMBER or any(
        abs(each - value) > RELATIVE_TOLERANCE * value for each, value in zip(decimals, values, strict=True)
    ):
        scale = 2.0 ** (math.frexp(MAX_SOLVER_NUMBER)[1] - math.frexp(largest)[1])
    numbers = [math.floor(value * scale * (1 + RELATIVE_TOLERANCE)) for value in values]
    common = math.gcd(*numbers) or 1
    return [number // common for number in numbers], common / scale
