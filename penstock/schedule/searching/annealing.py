"""Annealing: random moves; one that lengthens the step is taken the more seldom, the more it does and the later it comes."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable

from penstock.schedule.searching.incremental_simulation import IncrementalSimulation, RowChange
from penstock.schedule.searching.problem import INFINITE, SearchProblem

FAR, LONG = 6, 3.0  # places that an action moves at most; and how far several stages do, in times of a typical action
LOOSEN, ACROSS = 0.03, 0.4  # the share of moves of a rank's slack, and of those on several stages
TURN = 0.4  # the share of the latter that may go on from F to I
FOCUS = 0.5  # the share of moves, of the others, that begin on the critical chain: no step gets shorter without one
SOON = 512  # moves between two reports
Report = Callable[[int, IncrementalSimulation], None]  # steps since the last report, and where the annealing stands


def anneal(position: IncrementalSimulation, dice: random.Random, steps: int, hot: float, cold: float, report: Report) -> None:
    """Move `position` about for `steps`; it is left at the best that was found.

    `hot`, `cold`: by how much longer a step gets with a move that is taken with a probability of 1 / e, at the beginning and
    at the end.
    """
    begin = reported = position.work
    best, tries = position.snapshot(), 0
    while (used := position.work - begin) < steps:
        heat = hot * (cold / hot) ** (used / steps)
        if _try(position, dice, position.makespan - heat * math.log(1.0 - dice.random())) and position.makespan < best.makespan:
            best = position.snapshot()
            report(position.work - reported, position)
            reported = position.work
        tries += 1
        if tries % SOON == 0:
            report(position.work - reported, position)
            reported = position.work
    report(position.work - reported, position)
    position.restore(best)


def _try(position: IncrementalSimulation, dice: random.Random, most: float) -> bool:
    """Whether a random move makes a step of at most `most`; then it is taken."""
    kind = dice.random()
    if position.slack and kind < LOOSEN:
        rank = int(dice.random() * position.machine.ranks)
        slack = position.slack[rank] + (dice.random() - 0.5) * position.machine.typical
        return position.try_slack(rank, max(0.0, slack), most)
    changed = _on_stages(position, dice) if kind > 1.0 - ACROSS else _on_one_rank(position, dice)
    if not changed or position.try_changes(changed, most) > most:
        return False
    position.accept_changes()
    return True


def _on_one_rank(position: IncrementalSimulation, dice: random.Random) -> dict[int, RowChange]:
    """A random action, some or all that follow it, some places to one side."""
    machine = position.machine
    if dice.random() < FOCUS:
        chain = position.critical_actions()
        rank, index = chain[int(dice.random() * len(chain))]
    else:
        rank = int(dice.random() * machine.ranks)
        index = int(dice.random() * len(position.rows[rank]))
    row = position.rows[rank]
    places = 1 + int(dice.random() * FAR)
    new = shift_actions(machine, row, index, places if dice.random() < 0.5 else -places, _how_many(machine, dice))
    return {rank: new} if new.first < len(row) else {}


def shift_actions(machine: SearchProblem, row: list[int], index: int, places: int, actions: int) -> RowChange:
    """The action at `index` and those after it of its code, `actions` in all, up to `places` later, or -`places` earlier.

    It stays in order with those of its code, and with those of its microbatch that it needs, if only by other ranks.
    """
    count, first_weight, apart = machine.microbatches, machine.first_weight, machine.first_back
    new, first, last = row[:], len(row), 0
    step = 1 if places > 0 else -1
    code = row[index] // count
    of_code = range(code * count, (code + 1) * count)
    for action in range(row[index], min(row[index] + actions, of_code.stop))[::-step]:
        chain = range(action % count, first_weight if action < first_weight else 0, count)
        here = at = new.index(action, index)
        furthest = max(0, min(here + places, len(new) - 1))
        while at != furthest:
            other = new[at + step]
            if other in of_code or other in chain or abs(other - action) == apart:
                break
            at += step
        if at != here:
            new.insert(at, new.pop(here))
            first, last = min(first, here, at), max(last, here, at)
    return RowChange(new, first, last)


def _on_stages(position: IncrementalSimulation, dice: random.Random) -> dict[int, RowChange]:
    """A stretch of the way of a microbatch, and of some or all that follow it, all moved by the same time."""
    machine, changed = position.machine, dict[int, RowChange]()
    way = machine.order()[: 2 * machine.num_stages]
    if dice.random() >= TURN:
        way = way[: machine.num_stages] if dice.random() < 0.5 else way[machine.num_stages :]
    begin, microbatch = int(dice.random() * len(way)), int(dice.random() * machine.microbatches)
    shift, actions = (2 * dice.random() - 1) * LONG * machine.typical, _how_many(machine, dice)
    for code in way[begin : begin + 2 + int(dice.random() * (len(way) - 1))]:
        rank, action = machine.placement[code % machine.num_stages], code * machine.microbatches + microbatch
        trace, index = position.trace[rank], position.rows[rank].index(action)
        places = bisect_right(trace, (trace[index + 1][0] + shift, INFINITE)) - 2 - index
        row, first, last = changed.get(rank, RowChange(position.rows[rank], len(machine.cost), 0))
        new = shift_actions(machine, row, row.index(action), places, actions)
        if new.first < len(row):
            changed[rank] = RowChange(new.row, min(first, new.first), max(last, new.last))
    return changed


def _how_many(machine: SearchProblem, dice: random.Random) -> int:
    """How many actions of a code move: one, some, or all that there are."""
    some = dice.random()
    return 1 if some < 0.6 else 2 + int(dice.random() * 7) if some < 0.85 else machine.microbatches
