"""Tables with a second, frozen model, a teacher: its forwards are placed where the ranks of the first would be idle.

Each rank keeps the order of its own actions. A free rank runs a forward of the teacher if its next own action can wait that
long: until the latest time at which it may start for the whole step to end in time. Of two that cannot wait the more urgent
one goes first. The end that the ranks aim at is raised, from the least that the work allows, until they reach it. Of steps that
take as long the one is chosen in which fewer of the teacher's outputs wait for their losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, pairwise, product
from math import inf
from typing import Literal, NamedTuple

from penstock.errors import ScheduleError, is_whole_number
from penstock.schedule.memory import waiting_outputs
from penstock.schedule.proof import check_table
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Action, Cell, Kind, actions_of, dependencies, pause_garbage_collection
from penstock.timing.costs import UNIT_COSTS, Costs
from penstock.timing.simulate import simulate

MAX_PLACED_CELLS = 20_000  # of all tables that are tried
MIN_TARGETS = 4  # tried ends of the step
TARGET_RANGE = 1.5  # the last, in terms of the first
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
    default all equal. The actions of the model keep their order on each rank, so that its gradients keep their bits; the last
    microbatch's backwards are in halves if the step is then at least 1 % shorter.
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
    found = [*_fastest(table, cells, forwards, costs, max_added)]
    if ahead:  # an order in which the losses wait for the teacher is right too, and may be shorter
        waiting = _fastest(replace(table, ahead=False), cells, forwards, costs, max_added)
        found += [_Candidate.of(replace(candidate.table, ahead=True), costs) for candidate in waiting]
    in_halves = [list(_with_last_in_halves(row, table.microbatches)) for row in cells]  # nothing but backwards follows the last
    if in_halves != cells:
        longest = min([candidate.makespan for candidate in found], default=inf) * (1 - LEAST_GAIN_OF_HALVES)
        halved = _fastest(table, in_halves, forwards, costs, max_added)
        found += [candidate for candidate in halved if candidate.makespan <= longest]
    if not found:
        raise ScheduleError(f"no table of {name} was found for max_waiting_outputs={max_waiting_outputs}: give a higher one")
    return min(found, key=_Candidate.key).table


def _max_added(table: Schedule, max_waiting_outputs: int | None) -> float:
    """Return by how many the teacher's outputs that wait may exceed those at the start of the step."""
    at_start = 0 if table.chains.loss_waits else table.microbatches
    if max_waiting_outputs is None:
        return inf
    if not is_whole_number(max_waiting_outputs, max(1, at_start)):
        why = f", since all {at_start} outputs of a batch wait between two steps" if at_start else ""
        raise ScheduleError(f"max_waiting_outputs={max_waiting_outputs!r}: give {max(1, at_start)} or more{why}")
    return max_waiting_outputs - at_start


def _with_last_in_halves(row: Sequence[Cell], microbatches: int) -> Iterator[Cell]:
    """Yield the cells of a rank with the last microbatch's backward as I and W, so that the next rank waits for I alone."""
    for cell in row:
        if isinstance(cell, Action) and cell.kind is Kind.B and cell.microbatch == microbatches - 1 and cell.stage:
            yield from (cell._replace(kind=Kind.I), cell._replace(kind=Kind.W))
        else:
            yield cell


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
) -> list[_Candidate]:
    """Return the fastest table of those that the rules of `_Placing` make for several ends of the step; none if they fail.

    `max_added`: see `_Candidate`.
    """
    placing = _Placing(table, cells, forwards, costs, max_added)
    candidates = [_Candidate.of(placing.forwards_first, costs)]
    found = [candidate for candidate in candidates if candidate.added <= max_added]
    end, rules = placing.own_end, list(product((True, False), repeat=2))
    targets = max(MIN_TARGETS, MAX_PLACED_CELLS // (len(rules) * len(placing.tails)))
    next_ends = dict.fromkeys(rules, 0.0)  # a rule makes the same rows as before for each end before this one
    for _ in range(targets):
        for rule in [rule for rule in rules if next_ends[rule] <= end]:
            rows, next_ends[rule] = placing.rows(end, *rule)
            if sum(map(len, rows)) == sum(map(len, (*cells, *forwards))):  # else an action waits for what no rule lets run
                found = [min([*found, _Candidate.of(table.with_cells(rows), costs)], key=_Candidate.key)]
        if found and found[0].makespan <= max(placing.least_end, end) * (1 + ROUNDING):
            break
        end *= TARGET_RANGE ** (1 / targets)
    return found


def v_of_teacher(placement: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each stage of a teacher in a V: from the loss's rank against the model's way, and back.

    `placement`: the rank of each stage of the model.
    """
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


class _Placing:
    """What the ranks run, and how long each action leaves until the end of the step."""

    def __init__(
        self,
        table: Schedule,
        cells: Sequence[Sequence[Cell]],
        forwards: Sequence[Sequence[Action]],
        costs: Costs,
        max_added: float,
    ) -> None:
        self.table, self.cells, self.forwards, self.overlap = table, cells, forwards, costs.overlap
        self.max_added = max_added  # see `_Candidate`
        self.action_costs = costs.action_costs_by_microbatch(table.stages, table.microbatches)
        self.message_costs = costs.message_costs(table.stages)

        # 1. What each action waits for, and who waits for it.
        rows: list[list[Cell]] = [list(row) for row in (*cells, *forwards)]
        self.cell_of = {action: cell for row in rows for cell in row for action in actions_of(cell)}
        self.followers: dict[Cell, list[tuple[Cell, float]]] = {cell: [] for row in rows for cell in row}
        self.num_inputs = dict.fromkeys(self.followers, 0)
        for action, cell in self.cell_of.items():
            for options in dependencies(action, table.chains, costs.skips, table.slices):
                maker = next((self.cell_of[option] for option in options if option in self.cell_of), cell)
                if maker != cell:
                    self.followers[maker].append((cell, self._message_time(options[0], action)))
                    self.num_inputs[cell] += 1

        changes = {table.num_trained_stages - 1: -1, table.stages - 1: 1}
        self.added_by = {
            cell: sum(changes.get(action.stage, 0) for action in actions_of(cell) if action.kind is Kind.F)
            for cell in self.followers
        }

        # 2. The least time from the start of each to the end of the step. A cell waits for the one before it in its row.
        next_cells = {first: second for row in rows for first, second in pairwise(row)}
        self.tails: dict[Cell, float] = {}
        self.forwards_first = table.with_cells([*more, *row] for row, more in zip(cells, forwards, strict=True))
        timeline = simulate(self.forwards_first)  # every action takes 1: each starts before those that wait for it
        starts = {self.cell_of[event.action]: event.start for event in timeline.events}
        order = sorted(starts, key=starts.__getitem__)
        for cell in reversed(order):
            ways = [self.tails[follower] + message for follower, message in self.followers[cell]]
            ways += [self.tails[next_cells[cell]]] if cell in next_cells else []
            self.tails[cell] = self._time(cell) + max(ways, default=0.0)
        self.own_end = max(self.tails[cell] for row in cells for cell in row)
        heads = dict.fromkeys(order, 0.0)
        for cell in order:
            for follower, message in self.followers[cell]:
                heads[follower] = max(heads[follower], heads[cell] + self._time(cell) + message)

        # 3. The least end of the step: each rank waits for its first input, works, and others end after it.
        both = [[*row, *more] for row, more in zip(cells, forwards, strict=True)]
        self.least_end = max(
            min(map(heads.__getitem__, row))
            + sum(map(self._time, row))
            + min(self.tails[cell] - self._time(cell) for cell in row)
            for row in both
        )

    def _time(self, cell: Cell) -> float:
        times = [self.action_costs[kind][stage][microbatch] for kind, stage, microbatch, _ in actions_of(cell)]
        return (sum(times) - (self.overlap * min(times) if len(times) > 1 else 0.0)) / self.table.slices

    def _message_time(self, maker: Action, receiver: Action) -> float:
        low, high = sorted((maker.stage, receiver.stage))
        if self.table.placement[low] == self.table.placement[high]:
            return 0.0
        return sum(self.message_costs[low, high])

    def rows(self, end: float, is_eager: bool, urgent_first: bool) -> tuple[list[list[Cell]], float]:
        """Return the row of each rank, if the step is to end at `end`, and the next end for which they may be others.

        `is_eager`: a forward of the teacher may delay an action of the model that is ready, if that can wait.
        `urgent_first`: it may delay one that cannot, if itself it can wait less.
        """
        ranks = range(self.table.ranks)
        rows: list[list[Cell]] = [[] for _ in ranks]
        own: list[list[Cell]] = [list(reversed(row)) for row in self.cells]  # the next one last
        queues = [[own[rank], *self._queues_of_teacher(rank)] for rank in ranks]
        waits_for, ready_times, free = dict(self.num_inputs), dict.fromkeys(self.followers, 0.0), [0.0] * len(ranks)
        events, numbers, added = [(0.0, rank, rank) for rank in ranks], count(len(ranks)), 0
        least_lack = inf

        while events:
            now, _, rank = heappop(events)
            if free[rank] > now:
                continue
            candidates = [queue[-1] for queue in queues[rank] if queue]
            allowed = [cell for cell in candidates if added + self.added_by[cell] <= self.max_added]
            ready = [cell for cell in allowed if not waits_for[cell] and ready_times[cell] <= now]
            chosen, lack = self._choose(own[rank][-1:], ready, end - now, is_eager, urgent_first)
            least_lack = min(least_lack, lack)
            if chosen is None:
                continue
            next(queue for queue in queues[rank] if queue and queue[-1] == chosen).pop()
            rows[rank].append(chosen)
            added += self.added_by[chosen]
            free[rank] = now + self._time(chosen)
            heappush(events, (free[rank], next(numbers), rank))
            for follower, message in self.followers[chosen]:
                waits_for[follower] -= 1
                ready_times[follower] = max(ready_times[follower], free[rank] + message)
                home = self.table.placement[actions_of(follower)[0].stage]
                heappush(events, (ready_times[follower], next(numbers), home))
        return rows, (end + least_lack) * (1 - ROUNDING)

    def _queues_of_teacher(self, rank: int) -> list[list[Cell]]:
        """Return the forwards of each of the rank's stages of the teacher, the highest stage first, the next forward last."""
        stages = [stage for stage in self.table.stages_of(rank) if stage >= self.table.num_trained_stages]
        row = list(reversed(self.forwards[rank]))
        return [[action for action in row if action.stage == stage] for stage in reversed(stages)]

    def _choose(
        self, own: Sequence[Cell], ready: Sequence[Cell], left: float, is_eager: bool, urgent_first: bool
    ) -> tuple[Cell | None, float]:
        """Return what a rank runs next of the `ready` cells: its `own` next one or a forward of the teacher; None if it waits.

        `left`: the time to the end of the step. Returns too by how much less than needed for another choice it is.
        """
        forward = max((cell for cell in ready if cell not in own), key=self.tails.__getitem__, default=None)
        if not own:
            return forward, inf
        own_is_ready, lack = own[0] in ready, inf
        if forward is not None:
            needs_forward = not own_is_ready and self.tails[forward] >= self.tails[own[0]]  # it may wait for this one
            if needs_forward or (urgent_first and self.tails[forward] > self.tails[own[0]]):
                return forward, inf
            if is_eager or not own_is_ready:
                lack = self.tails[own[0]] * (1 - ROUNDING) - (left - self._time(forward))
                if lack <= 0:
                    return forward, inf
        return (own[0] if own_is_ready else None), lack
