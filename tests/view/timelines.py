"""Small exact timelines, and longer ones as they might have been measured."""

import random

from penstock.schedule import Costs, Event, Schedule, Timeline, build, simulate
from penstock.schedule.table import dependencies

COSTS = Costs(0.010, 0.010, 0.010, send=0.0004)  # seconds


def two_ranks() -> Timeline:
    """1f1b over two ranks, two microbatches, a message takes 1:

    rank 0 |F0F1......B0B0..B1B1
    rank 1 |....F0B0B0F1B1B1......
    """
    return simulate(build("1f1b", ranks=2, microbatches=2), Costs(send=1))


def measured(schedule: Schedule, seed: int, slow: int | None = None) -> Timeline:
    """A step of `schedule` with noise; every action of the rank `slow` takes 5 ms longer."""
    rng = random.Random(seed)
    plan = simulate(schedule, COSTS)
    took = {
        event.action: (event.end - event.start) * (1 + abs(rng.gauss(0, 0.1))) + 0.005 * (event.rank == slow)
        for event in plan.events
    }
    done: dict = {}
    rows: list[list[Event]] = [[] for _ in schedule.actions]
    for event in sorted(plan.events, key=lambda event: event.start):
        needs = [
            done[alternative]
            for alternatives in dependencies(event.action, schedule.stages)
            for alternative in alternatives
            if alternative in done
        ]
        free = rows[event.rank][-1].end if rows[event.rank] else 1000.0
        start = max([free + 1e-5, *(need.end + 4e-4 * (need.rank != event.rank) for need in needs)])
        done[event.action] = Event(event.rank, event.action, start, start + took[event.action])
        rows[event.rank].append(done[event.action])
    return Timeline(f"{schedule.name}, measured", tuple(map(tuple, rows)))
