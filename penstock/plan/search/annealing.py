"""Annealing: random moves; the more a move lengthens the step and the later it comes, the more rarely it is accepted."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable

from penstock.plan.search.incremental_simulation import IncrementalSimulation, RowChange
from penstock.plan.search.problem import INFINITE, SearchProblem

MAX_SHIFT_PLACES = 6  # the most places that an action of one rank moves
MAX_SHIFT_IN_ACTION_TIMES = 3.0  # the most that actions of several stages move, in times of a typical action
SLACK_MOVE_SHARE = 0.03  # of all moves: those that change the slack of a rank
MULTI_STAGE_MOVE_SHARE = 0.4  # of all moves: those of actions on several stages
FORWARD_TO_BACKWARD_SHARE = 0.4  # of the moves on several stages: those that may go on from F to I
TEACHER_MOVE_SHARE = 0.3  # of the moves on several stages, if there is a teacher: those of its forwards
CRITICAL_MOVE_SHARE = 0.5  # of the moves on one rank: those on the critical chain; only they shorten the step
MOVES_PER_REPORT = 512
ReportProgress = Callable[[int, IncrementalSimulation], None]  # (work since the last report, the current simulation)


def anneal(
    simulation: IncrementalSimulation,
    rng: random.Random,
    steps: int,
    start_temperature: float,
    end_temperature: float,
    report: ReportProgress,
) -> None:
    """Try random moves for `steps` of work; leave `simulation` at the best rows found.

    `start_temperature`, `end_temperature`: a move that lengthens the step by this much is accepted with probability 1 / e,
    at the beginning and at the end.
    """
    begin = reported = simulation.work
    best, tries = simulation.snapshot(), 0
    while (work_done := simulation.work - begin) < steps:
        temperature = start_temperature * (end_temperature / start_temperature) ** (work_done / steps)
        if (
            _try_random_move(simulation, rng, simulation.makespan - temperature * math.log(1.0 - rng.random()))
            and simulation.makespan < best.makespan
        ):
            best = simulation.snapshot()
            report(simulation.work - reported, simulation)
            reported = simulation.work
        tries += 1
        if tries % MOVES_PER_REPORT == 0:
            report(simulation.work - reported, simulation)
            reported = simulation.work
    report(simulation.work - reported, simulation)
    simulation.restore_and_simulate(best)


def _try_random_move(simulation: IncrementalSimulation, rng: random.Random, max_makespan: float) -> bool:
    """Try a random move; keep it if the step then takes at most `max_makespan`. Return whether it was kept."""
    kind = rng.random()
    if simulation.slack and kind < SLACK_MOVE_SHARE:
        rank = int(rng.random() * simulation.problem.ranks)
        slack = simulation.slack[rank] + (rng.random() - 0.5) * simulation.problem.typical_time
        return simulation.try_slack(rank, max(0.0, slack), max_makespan)
    changes = (
        _random_move_on_stages(simulation, rng)
        if kind > 1.0 - MULTI_STAGE_MOVE_SHARE
        else _random_move_on_one_rank(simulation, rng)
    )
    if not changes or simulation.try_changes(changes, max_makespan) > max_makespan:
        return False
    simulation.accept_changes()
    return True


def _random_move_on_one_rank(simulation: IncrementalSimulation, rng: random.Random) -> dict[int, RowChange]:
    """Return a move on one rank: a random action, and some or all that follow it of its code, shifted along the row."""
    problem = simulation.problem
    if rng.random() < CRITICAL_MOVE_SHARE:
        chain = simulation.critical_actions()
        rank, index = chain[int(rng.random() * len(chain))]
    else:
        rank = int(rng.random() * problem.ranks)
        index = int(rng.random() * len(simulation.rows[rank]))
    row = simulation.rows[rank]
    places = 1 + int(rng.random() * MAX_SHIFT_PLACES)
    new = shift_actions(problem, row, index, places if rng.random() < 0.5 else -places, _random_action_count(problem, rng))
    return {rank: new} if new.first < len(row) else {}


def shift_actions(problem: SearchProblem, row: list[int], index: int, places: int, actions: int) -> RowChange:
    """Return `row` with `actions` actions of one code, from `index` on, up to `places` later, or -`places` earlier.

    Each stays in order with those of its code, and with those of its microbatch that it depends on, even through other ranks.
    """
    count, first_weight, apart = problem.passes, problem.first_weight, problem.first_back
    new, first, last = row[:], len(row), 0
    step = 1 if places > 0 else -1
    code = row[index] // count
    of_code = range(code * count, (code + 1) * count)
    of_teacher = range(problem.first_of_teacher * count, problem.first_back)
    for action in range(row[index], min(row[index] + actions, of_code.stop))[::-step]:
        chain = range(action % count, first_weight if action < first_weight else 0, count)
        is_of_teacher = action in of_teacher
        start = at = new.index(action, index)
        furthest = max(0, min(start + places, len(new) - 1))
        while at != furthest:
            neighbour = new[at + step]
            is_in_chain = neighbour in chain and (neighbour in of_teacher) == is_of_teacher
            if neighbour in of_code or is_in_chain or abs(neighbour - action) == apart:
                break
            at += step
        if at != start:
            new.insert(at, new.pop(start))
            first, last = min(first, start, at), max(last, start, at)
    return RowChange(new, first, last)


def _random_move_on_stages(simulation: IncrementalSimulation, rng: random.Random) -> dict[int, RowChange]:
    """Return a move of a part of a microbatch's path, and of some or all microbatches after it, by the same time."""
    problem, changes = simulation.problem, dict[int, RowChange]()
    way = problem.forward_codes + problem.backward_codes
    if problem.teacher_codes and rng.random() < TEACHER_MOVE_SHARE:
        way = problem.teacher_codes
    elif rng.random() >= FORWARD_TO_BACKWARD_SHARE:
        way = problem.forward_codes if rng.random() < 0.5 else problem.backward_codes
    begin, microbatch = int(rng.random() * len(way)), int(rng.random() * problem.passes)
    shift, actions = (
        (2 * rng.random() - 1) * MAX_SHIFT_IN_ACTION_TIMES * problem.typical_time,
        _random_action_count(problem, rng),
    )
    for code in way[begin : begin + 2 + int(rng.random() * (len(way) - 1))]:
        rank, action = problem.placement[code % problem.num_stages], code * problem.passes + microbatch
        trace, index = simulation.trace[rank], simulation.rows[rank].index(action)
        places = bisect_right(trace, (trace[index + 1][0] + shift, INFINITE)) - 2 - index
        row, first, last = changes.get(rank, RowChange(simulation.rows[rank], len(problem.cost), 0))
        new = shift_actions(problem, row, row.index(action), places, actions)
        if new.first < len(row):
            changes[rank] = RowChange(new.row, min(first, new.first), max(last, new.last))
    return changes


def _random_action_count(problem: SearchProblem, rng: random.Random) -> int:
    """Return how many actions of a code move: one, some, or all."""
    some = rng.random()
    return 1 if some < 0.6 else 2 + int(rng.random() * 7) if some < 0.85 else problem.passes
