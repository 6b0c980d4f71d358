"""Where a step's time went, beyond what the schedule needs: each part a number that adds up to the whole."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import NamedTuple

from engines import EngineCase
from measure import Lap, RankMeasurements

from penstock.commands.machine.steps_benchmark import action_costs
from penstock.schedule import Costs, Kind, Measurement, Timeline, simulate


class Excess(NamedTuple):
    """What a step took beyond the bare ideal, in seconds, along the chain of actions that made it so long."""

    overshoot: float  # actions that took longer than nominal
    transport: float  # bare messages between two actions of the chain
    handing_over: float  # the engine, between the end of an action and the start of the next on another rank
    between: float  # the engine, between two actions of the same rank
    begin: float  # before the first action of any rank
    end: float  # after the last


def step_times(records: Sequence[RankMeasurements], engine: str) -> list[float]:
    """Seconds of each step of `engine`, from the first rank's start to the last one's end."""
    steps: list[tuple[Lap, ...]] = list(zip(*(record.laps[engine] for record in records), strict=True))
    return [max(lap.end for lap in step) - min(lap.start for lap in step) for step in steps]


def ideal(case: EngineCase) -> float:
    """Seconds `simulate` predicts if every action takes what is nominal and messages take nothing."""
    assert case.subject.nominal is not None
    return simulate(case.one_by_one(), Costs(*case.subject.nominal)).makespan


def fed(case: EngineCase, timeline: Timeline, send: float) -> float:
    """Seconds `simulate` predicts for this send cost and the times that one step's actions took."""
    return simulate(case.one_by_one(), action_costs(Measurement.from_timelines(timeline), send)).makespan


def times_of(timeline: Timeline, kind: Kind, stage: int) -> list[float]:
    """Seconds of every action of `kind` on `stage`."""
    return [end - start for _, action, start, end, _ in timeline.events if action[:2] == (kind, stage)]


def excess(case: EngineCase, timeline: Timeline, laps: Sequence[Lap], send: float) -> Excess:
    """The parts of one step's time beyond the ideal; `laps`: of all ranks."""
    path = timeline.critical_path
    work = sum(event.end - event.start for event in path)
    across = [later.start - event.end for event, later in pairwise(path) if later.rank != event.rank]
    within = [later.start - event.end for event, later in pairwise(path) if later.rank == event.rank]
    transport = min(len(across) * send, sum(across))
    return Excess(
        overshoot=work - ideal(case),
        transport=transport,
        handing_over=sum(across) - transport,
        between=sum(within),
        begin=timeline.start - min(lap.start for lap in laps),
        end=max(lap.end for lap in laps) - timeline.start - timeline.makespan,
    )


def typical_excess(case: EngineCase, records: Sequence[RankMeasurements]) -> Excess:
    """The mean of the parts over the middle half of our steps, by time."""
    times = step_times(records, "ours")
    order = sorted(range(len(times)), key=times.__getitem__)
    middle = order[len(order) // 4 : len(order) - len(order) // 4]
    parts = [
        excess(case, records[0].timelines[step], [record.laps["ours"][step] for record in records], records[0].send)
        for step in middle
    ]
    return Excess(*map(fmean, zip(*parts, strict=True)))


class Spread(NamedTuple):
    """A median with the quartiles around it."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f} {self.high:.3f}]"


def ratio(these: Sequence[float], those: Sequence[float]) -> Spread:
    """Those to these, each pair from the same turn."""
    pairs = [that / this for this, that in zip(these, those, strict=True)]
    low, _, high = quantiles(pairs, n=4, method="inclusive")
    return Spread(low, median(pairs), high)
