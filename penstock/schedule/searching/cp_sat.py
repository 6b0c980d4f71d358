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

LARGEST = 2.0**40  # of the numbers that CP-SAT is given
EXACT = 1e-12  # relative: so far apart may be what is the same number
PATIENCE = 300.0  # CP-SAT's own measure of work, the same on any machine: about as many seconds


class Proof(NamedTuple):
    """The shortest table that CP-SAT knows of, and what none is shorter than."""

    schedule: Schedule
    bound: float


class _Run(NamedTuple):
    """An action as CP-SAT sees it: expressions over its variables."""

    start: Any
    length: Any
    end: Any


def check(costs: Costs) -> None:
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


def prove(machine: SearchProblem, found: Schedule, least: float, seed: int) -> Proof:
    """The shortest table for `machine`, `found` or a shorter one; no table is shorter than `least`.

    `machine`: with its backwards in halves; whole ones are tried wherever they may be worth it.
    """
    problem = _Problem(machine, found, least)
    solving = _solver().CpSolver()
    solving.parameters.max_deterministic_time = PATIENCE
    solving.parameters.random_seed = seed
    solving.parameters.num_workers = 8
    solving.parameters.interleave_search = True  # the same result on any number of cores
    if solving.status_name(solving.solve(problem.model)) not in ("OPTIMAL", "FEASIBLE"):
        return Proof(found, least)
    return Proof(problem.table(solving), max(least, solving.best_objective_bound * problem.unit))


class _Problem:
    """The pipeline in variables and constraints; `unit` is the time that 1 stands for."""

    def __init__(self, machine: SearchProblem, found: Schedule, least: float) -> None:
        self.machine, self.cp_model = machine, _solver()
        self.model = self.cp_model.CpModel()
        times, stages = machine.times, machine.num_stages
        full = machine.costs.action_costs(stages)[Kind.B]
        self.either = [  # whether a whole backward may be worth it: it takes less time or less memory than its halves
            whole < times[stages + stage] + times[2 * stages + stage] or size.keep > size.act
            for stage, (whole, size) in enumerate(zip(full, machine.sizes, strict=True))
        ]
        longest = simulate(found, machine.costs).makespan
        ways = sorted({time for sends in machine.sends for send in sends for time in send[2:]})
        every = [*times, *full, *ways]
        numbers, self.unit = _units(every, 2 * longest)
        self.time = dict(zip(every, numbers, strict=True))
        self.full = [self.time[each] for each in full]
        self.whole: dict[int, Any] = {}  # the number of an I -> whether it is a B
        self.most = math.floor(longest / self.unit * (1 + EXACT))
        self.runs = list[_Run]()
        for action in range(len(machine.cost)):
            self.runs.append(self._run(action))
        self.end = self.model.new_int_var(math.ceil(least / self.unit * (1 - TOLERANCE)), self.most, "end")
        self.model.minimize(self.end)
        self._in_order()
        self._one_at_a_time()
        self._within_limits()
        self._hint(found)

    def _run(self, action: int) -> _Run:
        """The variables of an action, its length among them where it is a backward that may be whole."""
        machine, stage = self.machine, action // self.machine.microbatches % self.machine.num_stages
        start, length = self.model.new_int_var(0, self.most, ""), self.time[machine.cost[action]]
        if action < machine.first_back or not self.either[stage]:
            return _Run(start, length, start + length)
        end = self.model.new_int_var(0, self.most, "")
        if action < machine.first_weight:
            whole = self.whole[action] = self.model.new_bool_var("")
            return _Run(start, length + (self.full[stage] - length) * whole, end)
        whole = self.whole[action - machine.first_back]
        self.model.add(start == self.runs[action - machine.first_back].end).only_enforce_if(whole)
        return _Run(start, length - length * whole, end)

    def _in_order(self) -> None:
        """Every action after those that it needs, and the microbatches of a code one after the other."""
        machine, count = self.machine, self.machine.microbatches
        transmissions: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for action, run in enumerate(self.runs):
            self.model.add(run.end <= self.end)
            if (action + 1) % count and not (
                action >= machine.first_weight and self.either[action // count % machine.num_stages]
            ):
                self.model.add(self.runs[action + 1].start >= run.end)
            if machine.first_back <= action < machine.first_weight:
                self.model.add(self.runs[action + machine.first_back].start >= run.end)
            for slot, channel, transmission, latency in machine.sends[action]:
                leaves = run.end
                if channel and transmission:
                    way = self.time[transmission]
                    begins = self.model.new_int_var(0, self.most, "")
                    self.model.add(begins >= run.end)
                    transmissions[channel].append(self.model.new_fixed_size_interval_var(begins, way, ""))
                    leaves = begins + way
                self.model.add(self.runs[machine.taker[slot]].start >= leaves + self.time[latency])
        for each in transmissions.values():
            self.model.add_no_overlap(each)

    def _one_at_a_time(self) -> None:
        """On a rank one action after the other; none begins sooner or ends later than the chain through it allows."""
        machine = self.machine
        mine: list[list[Any]] = [[] for _ in range(machine.ranks)]
        heads, tails = bounds.heads_and_tails(machine)
        for action, run in enumerate(self.runs):
            stage = action // machine.microbatches % machine.num_stages
            mine[machine.placement[stage]].append(self.model.new_interval_var(run.start, run.length, run.end, ""))
            if not self.either[stage]:
                self.model.add(run.start >= math.floor(heads[action] / self.unit * (1 - TOLERANCE)))
                self.model.add(run.end + math.floor(tails[action] / self.unit * (1 - TOLERANCE)) <= self.end)
        for each in mine:
            self.model.add_no_overlap(each)

    def _within_limits(self) -> None:
        """What a rank holds: all of a microbatch from its F to the end of its I, then what W needs."""
        machine, count = self.machine, self.machine.microbatches
        for rank, limit in enumerate(machine.limits):
            sizes = [machine.sizes[stage] for stage in machine.stages_of[rank]]
            if count * sum(max(size) for size in sizes) <= limit:
                continue
            held, unit = _units([each for size in sizes for each in size], limit)
            intervals, amounts = list[Any](), list[int]()
            for at, stage in enumerate(machine.stages_of[rank]):
                act, keep = held[2 * at : 2 * at + 2]
                for m in range(count):
                    forward, inputs, weights = (self.runs[(k * machine.num_stages + stage) * count + m] for k in range(3))
                    spans = [(forward, weights, act)] if act == keep else [(forward, inputs, act), (inputs, weights, keep)]
                    for first, last, amount in spans:
                        begins = first.end if first is inputs else first.start
                        length = self.model.new_int_var(0, self.most, "")
                        intervals.append(self.model.new_interval_var(begins, length, last.end, ""))
                        amounts.append(amount)
            self.model.add_cumulative(intervals, amounts, math.floor(limit / unit))

    def _hint(self, found: Schedule) -> None:
        """Begin with `found`: when the n-th action of each code starts there, and whether it is a whole backward."""
        machine, starts = self.machine, defaultdict[int, list[tuple[float, bool]]](list)
        for event in simulate(found, machine.costs).events:
            kind, stage, _ = event.action
            place = {Kind.F: 0, Kind.W: 2}.get(kind, 1)
            starts[place * machine.num_stages + stage].append((event.start, kind is Kind.B))
        for code, each in starts.items():
            for action, (start, whole) in enumerate(sorted(each), code * machine.microbatches):
                self.model.add_hint(self.runs[action].start, math.floor(start / self.unit * (1 + EXACT)))
                if action in self.whole:
                    self.model.add_hint(self.whole[action], whole)

    def table(self, solving: Any) -> Schedule:
        """The actions of every rank in the order in which they start."""
        machine, count = self.machine, self.machine.microbatches
        placed: list[list[tuple[int, int, Action]]] = [[] for _ in range(machine.ranks)]
        for code in machine.order():
            kind, stage = machine.kinds[code // machine.num_stages], code % machine.num_stages
            for m in range(count):
                action = code * count + m
                back = action - machine.first_back if kind is Kind.W else action
                whole = back in self.whole and solving.value(self.whole[back])
                if not (whole and kind is Kind.W):
                    run = self.runs[action]
                    what = Action(Kind.B if whole else kind, stage, m)
                    placed[machine.placement[stage]].append((solving.value(run.start), solving.value(run.end), what))
        rows = [[what for _, _, what in sorted(row, key=lambda each: each[:2])] for row in placed]
        return from_rows("searched", rows, machine.placement)


def _units(values: Sequence[float], largest: float) -> tuple[list[int], float]:
    """`values` as numbers of a unit, rounded down, and the unit; `largest` is the largest number that there will be."""
    decimals = [Fraction(value).limit_denominator(1000) for value in values]
    scale = float(math.lcm(*(each.denominator for each in decimals)))
    if scale * largest > LARGEST or any(
        abs(each - value) > EXACT * value for each, value in zip(decimals, values, strict=True)
    ):
        scale = 2.0 ** (math.frexp(LARGEST)[1] - math.frexp(largest)[1])
    numbers = [math.floor(value * scale * (1 + EXACT)) for value in values]
    common = math.gcd(*numbers) or 1
    return [number // common for number in numbers], common / scale
