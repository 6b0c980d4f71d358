"""Tables with a second, frozen model, a teacher: its forwards are placed where the ranks of the first would be idle.

Each rank keeps the order of its own actions. Backwards to the weights behind its last forward have no place of their own, since
nothing waits for them: each stage's stay in their order.

The places are found by justification (Valls, Ballestin and Quintanilla, "Justification and RCPSP", 2005): all actions move as
late as the end of the step permits, the last ones first, and then as early as possible in the order that results, each into
any gap of its rank. The step never gets longer by that, and often shorter. It is repeated with a little chance in the order,
the same on every machine, until no rank could end earlier in any order, or for as long as the table's size permits.
Of steps that take as long the one is chosen in which fewer of the teacher's outputs wait for their losses.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from random import Random
from typing import Literal, NamedTuple

from penstock.errors import ScheduleError, is_whole_number
from penstock.schedule.memory import waiting_outputs
from penstock.schedule.proof import check_table
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Action, Cell, Kind, actions_of, dependencies, pause_garbage_collection
from penstock.timing.costs import UNIT_COSTS, Costs
from penstock.timing.simulate import simulate

MAX_PLACED_CELLS = 10_000  # of all rounds of a placement
MIN_ROUNDS = 4
CHANCE = 2.0  # by how much the order varies, in times of an action
ROUNDS_WITHOUT_CHANCE = 4  # one of so many
LEAST_GAIN_OF_HALVES = 0.01  # of a step: a backward in halves is more work than a whole one
ROUNDING = 1e-9  # of a sum of times


@pause_garbage_collection()
def with_teacher(
    schedule: Schedule,
    stages: int | Sequence[int] | Literal["V"] | None = None,
    ahead: bool = True,
    costs: Costs = UNIT_COSTS,
    max_waiting_outputs: int | None = None,
) -> Schedule:
    """Return `schedule` with the forwards of a second, frozen model on the same ranks, a teacher's: stages that have F only.

    `stages`: of the teacher: their number T, placed as the last T of the model's; or the rank of each. By default as many as
    the model's, on the same ranks. "V": two on each rank, on the way from the loss's rank and back to it, which then works from
    the beginning. They are numbered after the model's. The last one is where the model's last is, since the loss takes the
    outputs of both.
    `ahead`: the forwards are of the next batch and run in this step's idle time; else they are of this batch, and the loss of
    each microbatch waits for the teacher's output.
    `costs`: of the actions and messages of all stages, the teacher's behind the model's, by which the forwards are placed; by
    default all equal. The actions of the model keep their order on each rank, so that its gradients keep their bits; the
    backwards behind a rank's last forward are in halves if the step is then at least 1 % shorter, and W fill waits.
    `max_waiting_outputs`: the most of the teacher's outputs that wait for their losses at once. If `ahead`, all outputs of a
    batch wait between two steps: give the number of microbatches or more.

    In the result `teacher` is the number of the teacher's first stage. `verify`, `simulate`, `to_csv` and `Schedule.from_csv`
    know such tables. A table of your own has a teacher too: from rows whose teacher's first stage has a mark, `4TEACHER` or
    `4TEACHER_AHEAD`, as `Table.csv_rows` writes it.

        table = with_teacher(build("1f1b", ranks=4, microbatches=8))
        table.teacher, table.stages  # 4, 8
        simulate(table).makespan  # 35.0, and 33.0 without a teacher

    A pipeline chooses between "V" and the model's ranks by simulation, if its table has no teacher.

    Raises ScheduleError for a table that is not complete, has a teacher already or slices, for stages that end elsewhere, and
    for a `max_waiting_outputs` with which no table is found.
    """
    if schedule.teacher is not None:
        raise ScheduleError(f"{schedule.name} has a teacher already, from stage {schedule.teacher} on: give the table without")
    placement = (*schedule.placement, *_teacher_placement(schedule, stages))
    name = f"{schedule.name} with a teacher" + (" ahead" if ahead else "")
    table = replace(schedule, name=name, placement=placement, teacher=schedule.stages, ahead=ahead)
    forwards = [
        [
            Action(Kind.F, stage, microbatch)
            for microbatch in range(table.microbatches)
            for stage in range(schedule.stages, table.stages)
            if placement[stage] == rank
        ]
        for rank in range(table.ranks)
    ]
    cells = [list(schedule.cells(rank)) for rank in range(table.ranks)]
    check_table(table.with_cells([*row, *more] for row, more in zip(cells, forwards, strict=True)))

    max_added = _max_added(table, max_waiting_outputs)
    whole = _fastest(table, cells, forwards, costs, max_added)
    in_halves = [list(_with_halves_behind_last_forward(row, schedule.forward_only)) for row in cells]
    if in_halves != cells:
        longest = inf if whole is None else whole.makespan * (1 - LEAST_GAIN_OF_HALVES)
        halved = _fastest(table, in_halves, forwards, costs, max_added)
        if halved is not None and halved.makespan <= longest:
            whole, cells = halved, in_halves
    if whole is None:
        if max_waiting_outputs is None:  # the model's own table deadlocks
            simulate(table.with_cells([*more, *row] for row, more in zip(cells, forwards, strict=True)))
        raise ScheduleError(f"no table of {name} was found for max_waiting_outputs={max_waiting_outputs}: give a higher one")
    return _with_fewest_waiting(whole, cells, forwards, costs).table


def _max_added(table: Schedule, max_waiting_outputs: int | None) -> float:
    """Return by how many the teacher's outputs that wait may exceed those at the start of the step."""
    at_start = 0 if table.chains.loss_waits else table.microbatches
    if max_waiting_outputs is None:
        return inf
    if not is_whole_number(max_waiting_outputs, max(1, at_start)):
        why = f", since all {at_start} outputs of a batch wait between two steps" if at_start else ""
        raise ScheduleError(f"max_waiting_outputs={max_waiting_outputs!r}: give {max(1, at_start)} or more{why}")
    return max_waiting_outputs - at_start


def _with_halves_behind_last_forward(row: Sequence[Cell], forward_only: frozenset[int]) -> Iterator[Cell]:
    """Yield the cells of a rank with its last backwards as I and W, so that the next rank waits for I alone."""
    last_forward = _last_forward(row)
    for number, cell in enumerate(row):
        is_split = isinstance(cell, Action) and cell.kind is Kind.B and cell.stage and cell.stage - 1 not in forward_only
        if isinstance(cell, Action) and is_split and number > last_forward:
            yield from (cell._replace(kind=Kind.I), cell._replace(kind=Kind.W))
        else:
            yield cell


def _last_forward(row: Sequence[Cell]) -> int:
    """Return the number of the last cell that has a forward; -1 if there is none."""
    return max((number for number, cell in enumerate(row) if any(act.kind is Kind.F for act in actions_of(cell))), default=-1)


class _Candidate(NamedTuple):
    """A table with its time. `added`: by how many the teacher's outputs that wait exceed those at the start of the step."""

    makespan: float
    added: int
    table: Schedule

    @classmethod
    def of(cls, table: Schedule, costs: Costs) -> "_Candidate":
        """Return the candidate of a table."""
        added = waiting_outputs(table.actions[table.placement[-1]], table.chains._replace(ahead=False))
        return cls(simulate(table, costs).makespan, max(added), table)

    def key(self) -> tuple[float, int]:
        """Return what is least in the best one."""
        return self.makespan, self.added


def _fastest(
    table: Schedule,
    cells: Sequence[Sequence[Cell]],
    forwards: Sequence[Sequence[Action]],
    costs: Costs,
    max_added: float,
    goal: float = 0.0,
) -> _Candidate | None:
    """Return the fastest table that is found; None if there is none. `max_added`: see `_Candidate`. `goal`: that is enough."""
    graph = _Graph(table, cells, forwards, costs, max_added)
    if (order := graph.topological_order(dict.fromkeys(graph.seconds, 0.0))) is None:
        return None
    tails = graph.longest_paths(reversed(order), graph.followers)
    heads = graph.longest_paths(order, graph.inputs)
    goal = max(goal, graph.least_end(heads, tails)) * (1 + ROUNDING)

    starts = graph.place({cell: -tail for cell, tail in tails.items()})
    best = _Candidate.of(graph.table_at(starts), costs)
    random, mean_seconds = Random(0), sum(graph.seconds.values()) / max(1, len(graph.seconds))
    for number in range(max(MIN_ROUNDS, MAX_PLACED_CELLS // max(1, len(graph.seconds)))):
        if best.makespan <= goal:
            break
        chance = CHANCE * mean_seconds if number % ROUNDS_WITHOUT_CHANCE else 0.0
        candidate_starts = graph.justify(starts, chance, random)
        if graph.end(candidate_starts) <= graph.end(starts) * (1 + ROUNDING):
            starts = candidate_starts
            candidate = _Candidate.of(graph.table_at(starts), costs)
            best = min(best, candidate, key=_Candidate.key)
    return best


def _with_fewest_waiting(
    best: _Candidate, cells: Sequence[Sequence[Cell]], forwards: Sequence[Sequence[Action]], costs: Costs
) -> _Candidate:
    """Return a table that takes as long as the `best`, in which as few of the teacher's outputs wait as is found."""
    low = 1 if best.table.chains.loss_waits else 0
    while low < best.added:
        middle = (low + best.added - 1) // 2
        fewer = _fastest(best.table, cells, forwards, costs, middle, best.makespan)
        if fewer is not None and fewer.makespan <= best.makespan * (1 + ROUNDING):
            best = fewer
        else:
            low = middle + 1
    return best


def v_of_teacher(placement: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each stage of a teacher, two on each rank, that begins where a rank waits longest for its first input.

    `placement`: the rank of each stage of the model. The teacher goes through the ranks against the model's way, and ends on
    the rank of the loss: it comes back, in a V, or goes the same way again, if the loss is on the model's first rank.
    """
    ranks = tuple(reversed(dict.fromkeys(placement)))
    if ranks[-1] == placement[-1] != ranks[0]:
        return (*ranks, *ranks)
    ranks = tuple(dict.fromkeys(reversed(placement)))
    return (*ranks, *reversed(ranks))


def _teacher_placement(schedule: Schedule, stages: int | Sequence[int] | str | None) -> Sequence[int]:
    """Return the rank of each stage of the teacher."""
    if stages is None:
        return schedule.placement
    if stages == "V":
        return v_of_teacher(schedule.placement)
    if not is_whole_number(stages):
        return tuple(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else ()
    if not 1 <= int(stages) <= schedule.stages:
        raise ScheduleError(
            f"{schedule.name} with stages={stages} of a teacher: give 1 to {schedule.stages}, or a list with the rank of each"
        )
    return schedule.placement[-int(stages) :]


Edges = Mapping[Cell, Sequence[tuple[Cell, float]]]  # cell -> others, each with the time of the message between
Starts = dict[Cell, float]


class _Graph:
    """What the cells of both models wait for, and how long each takes."""

    def __init__(
        self,
        table: Schedule,
        cells: Sequence[Sequence[Cell]],
        forwards: Sequence[Sequence[Action]],
        costs: Costs,
        max_added: float,
    ) -> None:
        self.table = table
        self._action_costs = costs.action_costs_by_microbatch(table.stages, table.microbatches)
        self._message_costs, self._overlap = costs.message_costs(table.stages), costs.overlap
        rows: list[list[Cell]] = [[*row, *more] for row, more in zip(cells, forwards, strict=True)]
        self.seconds = {cell: self._time(cell) for row in rows for cell in row}
        self.rank_of = {cell: rank for rank, row in enumerate(rows) for cell in row}
        self.inputs: dict[Cell, list[tuple[Cell, float]]] = {cell: [] for cell in self.seconds}

        # 1. Other actions.
        cell_of = {action: cell for cell in self.seconds for action in actions_of(cell)}
        for action, cell in cell_of.items():
            for options in dependencies(action, table.chains, costs.skips, table.slices):
                maker = next((cell_of[option] for option in options if option in cell_of), cell)
                if maker != cell:
                    self.inputs[cell].append((maker, self._message_time(options[0], action)))

        # 2. The rank's own order, and that of each stage of the teacher.
        chains = [chain for row in cells for chain in _chains_of_row(row)]
        chains += [[act for act in row if act.stage == stage] for row in forwards for stage in {act.stage for act in row}]
        before = [pair for chain in chains for pair in pairwise(chain)]

        # 3. The losses that free the outputs in whose place others wait.
        if max_added < inf:
            row = rows[table.placement[-1]]
            losses, outputs = (
                [cell for cell in row if any(act.kind is Kind.F and act.stage == stage for act in actions_of(cell))]
                for stage in (table.num_trained_stages - 1, table.stages - 1)
            )
            before += zip(losses, outputs[int(max_added) :], strict=False)
        for first, second in before:
            self.inputs[second].append((first, 0.0))

        self.followers: dict[Cell, list[tuple[Cell, float]]] = {cell: [] for cell in self.seconds}
        for cell, edges in self.inputs.items():
            for maker, message in edges:
                self.followers[maker].append((cell, message))

    def _time(self, cell: Cell) -> float:
        times = [self._action_costs[kind][stage][microbatch] for kind, stage, microbatch, _ in actions_of(cell)]
        return (sum(times) - (self._overlap * min(times) if len(times) > 1 else 0.0)) / self.table.slices

    def _message_time(self, maker: Action, receiver: Action) -> float:
        low, high = sorted((maker.stage, receiver.stage))
        if self.table.placement[low] == self.table.placement[high]:
            return 0.0
        return sum(self._message_costs[low, high])

    def longest_paths(self, order: Iterable[Cell], inputs: Edges) -> dict[Cell, float]:
        """Return the time of the longest path to each cell, its own included. `order`: cells, each behind its `inputs`."""
        longest: dict[Cell, float] = {}
        for cell in order:
            before = max((longest[other] + message for other, message in inputs[cell]), default=0.0)
            longest[cell] = self.seconds[cell] + before
        return longest

    def least_end(self, heads: Mapping[Cell, float], tails: Mapping[Cell, float]) -> float:
        """Return the least end of the step: each rank waits for its first input, works, and others end after it."""
        rows = defaultdict[int, list[Cell]](list)
        for cell, rank in self.rank_of.items():
            rows[rank].append(cell)
        return max(
            min(heads[cell] - self.seconds[cell] for cell in row)
            + sum(self.seconds[cell] for cell in row)
            + min(tails[cell] - self.seconds[cell] for cell in row)
            for row in rows.values()
        )

    def end(self, starts: Starts) -> float:
        """Return when the last cell ends."""
        return max((start + self.seconds[cell] for cell, start in starts.items()), default=0.0)

    def topological_order(
        self, priorities: Mapping[Cell, float], inputs: Edges | None = None, followers: Edges | None = None
    ) -> list[Cell] | None:
        """Return the cells, each behind its inputs, else those of a lower priority first; None if they wait for each other.

        `inputs`, `followers`: those to sort by, by default the graph's.
        """
        inputs, followers = inputs or self.inputs, followers or self.followers
        waits_for = {cell: len(others) for cell, others in inputs.items()}
        numbers = {cell: number for number, cell in enumerate(waits_for)}
        ready = [(priorities[cell], numbers[cell], cell) for cell, count in waits_for.items() if not count]
        heapify(ready)
        order = list[Cell]()
        while ready:
            _, _, cell = heappop(ready)
            order.append(cell)
            for follower, _ in followers[cell]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heappush(ready, (priorities[follower], numbers[follower], follower))
        return order if len(order) == len(waits_for) else None

    def place(self, priorities: Mapping[Cell, float], inputs: Edges | None = None, followers: Edges | None = None) -> Starts:
        """Return the start of each cell, placed in topological order: as early as its inputs and a gap of its rank permit."""
        inputs, starts = inputs or self.inputs, Starts()
        rows: list[list[tuple[float, float]]] = [[] for _ in range(self.table.ranks)]  # (start, end), ascending
        for cell in self.topological_order(priorities, inputs, followers) or ():
            seconds, row = self.seconds[cell], rows[self.rank_of[cell]]
            start = max((starts[other] + self.seconds[other] + message for other, message in inputs[cell]), default=0.0)
            at = bisect(row, (start, inf))
            start = max(start, row[at - 1][1]) if at else start
            while at < len(row) and row[at][0] < start + seconds * (1 - ROUNDING):
                start, at = max(start, row[at][1]), at + 1
            row.insert(at, (start, start + seconds))
            starts[cell] = start
        return starts

    def justify(self, starts: Starts, chance: float, random: Random) -> Starts:
        """Return starts after all cells moved as late as possible, then as early. `chance`: by how much the order varies."""
        priorities = {cell: random.uniform(-chance, chance) - start - self.seconds[cell] for cell, start in starts.items()}
        from_end = self.place(priorities, self.followers, self.inputs)
        return self.place({cell: -start - self.seconds[cell] for cell, start in from_end.items()})

    def table_at(self, starts: Starts) -> Schedule:
        """Return the table with the cells in the order of their starts."""
        order = {cell: number for number, cell in enumerate(starts)}  # behind their inputs
        cells = sorted(starts, key=lambda cell: (starts[cell], order[cell]))
        return self.table.with_cells([cell for cell in cells if self.rank_of[cell] == rank] for rank in range(self.table.ranks))


def _chains_of_row(row: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Yield cells of a rank of which each waits for the one before: all but W behind the last forward, and those of a stage.

    The gradients of a stage's weights are summed in the order of its B and W.
    """
    last_forward = _last_forward(row)
    free = {cell for cell in row[last_forward + 1 :] if isinstance(cell, Action) and cell.kind is Kind.W}
    yield [cell for cell in row if cell not in free]
    if free:
        sums = [(action, cell) for cell in row for action in actions_of(cell) if action.kind in (Kind.B, Kind.W)]
        for stage in {action.stage for action, _ in sums}:
            yield [cell for action, cell in sums if action.stage == stage]
