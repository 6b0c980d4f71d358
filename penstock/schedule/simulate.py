"""The simulator: what every action costs -> when every action runs."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule, dependencies
from penstock.schedule.events import Event, Timeline

Cost = float | Sequence[float]  # one number for all stages, or one for each stage


@dataclass(frozen=True)
class Costs:
    """What an action costs, in any unit of time: a number for all stages, or a sequence with one for each stage.

    A full backward `B` costs `backward_input` + `backward_weight`. `send` is the cost of an edge between two ranks;
    an edge inside a rank costs nothing.
    """

    forward: Cost = 1
    backward_input: Cost = 1
    backward_weight: Cost = 1
    send: float = 0

    def table(self, stages: int) -> dict[Kind, list[float]]:
        """Kind -> cost of every stage.

        Raises ScheduleError if a sequence does not have one cost for each stage, or a cost is negative or no finite number.
        """
        _check_time("send", float(self.send))
        forward, inputs, weights = (
            _per_stage(name, getattr(self, name), stages) for name in ("forward", "backward_input", "backward_weight")
        )
        full = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {Kind.F: forward, Kind.B: full, Kind.I: inputs, Kind.W: weights}


def _per_stage(name: str, cost: Cost, stages: int) -> list[float]:
    costs = [float(c) for c in cost] if isinstance(cost, Iterable) else [float(cost)] * stages
    if len(costs) != stages:
        raise ScheduleError(f"{name} has {len(costs)} costs for {stages} stages: give one number, or one for each stage")
    for each in costs:
        _check_time(name, each)
    return costs


def _check_time(name: str, cost: float) -> None:
    if not 0 <= cost < float("inf"):
        raise ScheduleError(f"{name} has the cost {cost}: a cost is a time, 0 or more")


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Time `schedule`: an action starts when its rank is free and what it depends on has ended (and has arrived).

    Raises ScheduleError when actions wait for each other in a circle, or for an action that is not in the table.
    """
    stages, placement = schedule.stages, schedule.placement
    cost, send = costs.table(stages), float(costs.send)
    ends: dict[Action, float] = {}
    rows: list[list[Event]] = [[] for _ in schedule.actions]
    waiting: dict[Action, list[int]] = {}  # an action that has not run -> ranks that wait for it
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        row, actions = rows[rank], schedule.actions[rank]
        free = row[-1].end if row else 0.0
        for index in range(len(row), len(actions)):
            action = actions[index]
            start = free
            for alternatives in dependencies(action, stages):
                dependency = next((a for a in alternatives if a in ends), None)
                if dependency is None:
                    for alternative in alternatives:
                        waiting.setdefault(alternative, []).append(rank)
                    break
                arrival = ends[dependency]
                if placement[dependency.stage] != rank:
                    arrival += send
                start = max(start, arrival)
            else:
                free = ends[action] = start + cost[action.kind][action.stage]
                row.append(Event(rank, action, start, free))
                ready.extend(waiting.pop(action, ()))
                continue
            break
    for rank, (row, actions) in enumerate(zip(rows, schedule.actions, strict=True)):
        if len(row) < len(actions):
            raise ScheduleError(f"{schedule.name} stops: rank {rank} waits for ever before {actions[len(row)]} (see verify)")
    return Timeline(schedule.name, tuple(map(tuple, rows)), send)
