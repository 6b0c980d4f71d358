"""Tables to begin a search with: published ones, microbatches in groups one after the other, and greedy dispatch."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product

from penstock.errors import ScheduleError
from penstock.plan.search.problem import INFINITE, Rows, SearchProblem, number_actions_in_order
from penstock.schedule.catalog import FAMILIES, build
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import PLACEMENTS, Kind, receiving_stages
from penstock.timing.teacher_tables import with_teacher

_NO_ACTION = (float("inf"), 0, 0, 0)
ROUND_TRIP_FACTORS = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


def published_tables(problem: SearchProblem) -> Iterator[Schedule]:
    """Yield the published tables of a problem, with its teacher; if memory is limited, also those whose outputs wait least."""
    teacher, ahead = problem.chains.teacher, problem.chains.ahead
    own = list(published_schedules(problem.placement[:teacher], problem.microbatches, problem.slices))
    if teacher is None:
        yield from own
        return
    is_limited = problem.costs.teacher_output and min(problem.limits) < INFINITE
    fewest = [problem.microbatches if ahead else 1] if is_limited else []
    for table, most in product(own, (None, *fewest)):
        with suppress(ScheduleError):  # losses in another order need more
            yield with_teacher(table, problem.placement[teacher:], ahead, problem.costs, most)


def published_schedules(placement: Sequence[int], microbatches: int, slices: int = 1) -> Iterator[Schedule]:
    """Yield the published tables with this placement; for several slices, of the families that support slices."""
    stages, ranks = len(placement), max(placement) + 1
    for name, family in FAMILIES.items():
        if stages % ranks or PLACEMENTS[family.placement](stages, ranks) != tuple(placement):
            continue
        try:
            yield build(name, ranks, microbatches, stages // ranks, slices=slices)
        except ScheduleError:  # the family cannot have this number of stages on a rank, or slices
            continue


def grouped_rows(problem: SearchProblem, size: int) -> Rows:
    """Return the F and I of groups of `size` microbatches that go through the pipeline and back, one group after the other."""
    rows, size = [], size * problem.slices
    for rank in range(problem.ranks):
        codes = list[int]()
        for first in range(0, problem.passes, size):
            group_size = min(size, problem.passes - first)
            for code in problem.codes_of_rank(rank):
                codes += [code] * group_size
        rows.append(number_actions_in_order(codes, problem.passes))
    return rows


class GreedyDispatch:
    """A simulation of ranks that always run the action that can begin first; on ties I before F, and later stages first.

    An F only begins if fewer than `depth` of its stage are in flight, and if memory is left for one microbatch's F on the later
    stages of its rank. Without that reserve a rank can fill up with microbatches that can never go on.
    """

    def __init__(self, problem: SearchProblem, depth: Sequence[float]) -> None:
        self.problem, self.depth = problem, depth
        self.free, self.memory = [0.0] * problem.ranks, [0.0] * problem.ranks
        self.slot_times, self.num_done = list(problem.initial_slot_times), [0] * (2 * problem.num_stages)
        self.deferred_weights = [deque[int]() for _ in range(problem.ranks)]  # the W that can run
        receivers = receiving_stages(problem.chains, list(problem.costs.skips))
        self.codes_of_rank = list(map(problem.codes_of_rank, range(problem.ranks)))
        self.affected_ranks = [  # stage -> the ranks that may get an input from it
            {problem.placement[affected] for affected in (stage, *receivers[Kind.F][stage], *receivers[Kind.B][stage])}
            for stage in range(problem.num_stages)
        ]

    def rows_without_weights(self) -> Rows:
        """Return the F and I of every rank; empty if at some time nothing can begin."""
        problem = self.problem
        rows: Rows = [[] for _ in range(problem.ranks)]
        firsts = [min(self._startable_actions(rank), default=_NO_ACTION) for rank in range(problem.ranks)]
        for _ in range(sum(map(len, self.codes_of_rank)) * problem.passes):
            earliest = min(firsts)
            if earliest is _NO_ACTION:
                return []
            _, _, action, rank = earliest
            self._run_action(rank, action)
            rows[rank].append(action)
            for affected_rank in self.affected_ranks[action // problem.passes % problem.num_stages]:
                firsts[affected_rank] = min(self._startable_actions(affected_rank), default=_NO_ACTION)
        return rows

    def _startable_actions(self, rank: int) -> Iterator[tuple[float, int, int, int]]:
        """Yield the next F and I of `rank` that can begin: start time, priority (the smaller the more urgent), number, rank."""
        problem = self.problem
        for code in self.codes_of_rank[rank]:
            stage = code % problem.num_stages
            in_flight = self.num_done[stage] - self.num_done[problem.num_stages + stage]
            if self.num_done[code] < problem.passes and (code > stage or in_flight < self.depth[stage]):
                action = code * problem.passes + self.num_done[code]
                ready_time, weights = self._ready_time(action), self._weights_to_free_memory(rank, action)
                if ready_time >= 0 and weights is not None:
                    free = self.free[rank] + sum(problem.cost[weight] for weight in weights)
                    yield max(ready_time, free), self._priority(code), action, rank

    def _priority(self, code: int) -> int:
        """Return the priority of a code: forwards of a teacher that runs ahead come last."""
        problem = self.problem
        if problem.chains.ahead and code in problem.teacher_codes:
            return problem.num_stages - code
        return -(code % problem.num_stages) - (problem.num_stages if code >= problem.num_stages else 0)

    def _ready_time(self, action: int) -> float:
        """Return when the inputs of `action` have arrived; negative if that is not known yet."""
        slots = [self.slot_times[action], *(self.slot_times[slot] for slot in self.problem.also_needs[action])]
        return max(slots) if min(slots) >= 0 else -1.0

    def _weights_to_free_memory(self, rank: int, action: int) -> list[int] | None:
        """Return the W that must run before `action` to free memory for it; None if they are not enough."""
        problem, weights, memory = self.problem, list[int](), self.memory[rank]
        reserved = problem.later_stages_memory[action // problem.passes] if action < problem.first_back else 0.0
        if problem.change[action] <= 0.0:
            return weights
        for weight in (*self.deferred_weights[rank], None):
            if memory + problem.change[action] + reserved <= problem.limits[rank]:
                return weights
            if weight is not None:
                weights.append(weight)
                memory += problem.change[weight]
        return None

    def _run_action(self, rank: int, action: int) -> None:
        """Run `action`, after the W that must free memory for it and those that end before it can begin."""
        problem, weights, ready_time = self.problem, self.deferred_weights[rank], self._ready_time(action)
        needed = len(self._weights_to_free_memory(rank, action) or ())
        while weights and (needed > 0 or self.free[rank] + problem.cost[weights[0]] <= ready_time):
            weight = weights.popleft()
            self.free[rank] += problem.cost[weight]
            self.memory[rank] += problem.change[weight]
            needed -= 1
        self.free[rank] = max(self.free[rank], ready_time) + problem.cost[action]
        self.memory[rank] += problem.change[action]
        self.num_done[action // problem.passes] += 1
        if action >= problem.first_back and not problem.full_backwards:
            weights.append(action + problem.first_back)
        for slot, _, transmission, latency in problem.sends[action]:
            self.slot_times[slot] = self.free[rank] + transmission + latency


def in_flight_limits(problem: SearchProblem) -> Iterator[list[float]]:
    """Yield limits of microbatches in flight for every stage: first none, then multiples of its round trip."""
    period = max(problem.work) / problem.passes
    yield [float("inf")] * problem.num_stages
    for factor in ROUND_TRIP_FACTORS:
        depth = [float("inf")] * problem.num_stages
        for stage in set(range(problem.num_stages)) - problem.chains.forward_only:
            later = range(stage, problem.first_of_teacher)
            trip = sum(problem.times[s] + problem.times[problem.num_stages + s] for s in later)
            depth[stage] = max(1.0, factor * trip / period)
        yield depth


def initial_rows(problem: SearchProblem) -> Iterator[Rows]:
    """Yield rows to begin a search with, besides published tables: groups of microbatches, and greedy dispatch."""
    yield from (grouped_rows(problem, size) for size in (1, 2, 3, 4) if size <= problem.microbatches)
    yield from (rows for depth in in_flight_limits(problem) if (rows := GreedyDispatch(problem, depth).rows_without_weights()))
