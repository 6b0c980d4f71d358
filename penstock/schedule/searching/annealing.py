"""Annealing: random moves; one that lengthens the step is taken the more seldom, the more it does and the later it comes."""

import math
import random
from collections.abc import Callable

from penstock.schedule.searching.moves import earlier, later
from penstock.schedule.searching.position import Position

FAR = 6  # places that an action moves at most
SOON = 512  # moves between two reports
Report = Callable[[int, Position], None]  # steps since the last report, and where the annealing stands


def anneal(position: Position, dice: random.Random, steps: int, hot: float, cold: float, report: Report) -> None:
    """Move `position` about for `steps`; it is left at the best that was found.

    `hot`, `cold`: by how much longer a step gets with a move that is taken with a probability of 1 / e, at the beginning and
    at the end.
    """
    begin = reported = position.steps
    best, tries = position.state(), 0
    while (used := position.steps - begin) < steps:
        heat = hot * (cold / hot) ** (used / steps)
        if _try(position, dice, position.makespan - heat * math.log(1.0 - dice.random())) and position.makespan < best.makespan:
            best = position.state()
            report(position.steps - reported, position)
            reported = position.steps
        tries += 1
        if tries % SOON == 0:
            report(position.steps - reported, position)
            reported = position.steps
    report(position.steps - reported, position)
    position.go_to(best)


def _try(position: Position, dice: random.Random, most: float) -> bool:
    """Whether a random move was found that makes a step of at most `most`, and taken."""
    machine, random = position.machine, dice.random
    rank = int(random() * machine.ranks)
    if position.slack and random() < 0.03:
        return position.loosen(rank, max(0.0, position.slack[rank] + (random() - 0.5) * machine.typical), most)
    row = position.rows[rank]
    kind = random()
    actions = 1 if kind < 0.6 else 2 + int(random() * 7) if kind < 0.85 else machine.microbatches
    move = earlier if random() < 0.5 else later
    new, first = move(machine, row, int(random() * len(row)), 1 + int(random() * FAR), actions)
    if first == len(row) or position.attempt(rank, new, first, most) > most:
        return False
    position.accept()
    return True
