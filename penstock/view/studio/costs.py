"""Costs as the page has them, as plain data, and when a table runs at them: set by hand, or those of a measured run.

    {"forward": 1, "backward_input": 1, "backward_weight": 1, "send": 0,   # of every stage, and of a message
     "stages": {"2": {"forward": 3}},                                     # of a stage that has its own
     "ranks": {"1": 1.5},                                                 # how many times as long that rank takes
     "microbatches": {"3": 4},                                            # how many times as large that microbatch is
    "share": 2,                                                          # the size of a stage, in the one that is priced
     "sizes": [[1000, 800]]}                      # bytes that a microbatch takes on every stage, and that W still needs of it

Those of a run are of its stages, in milliseconds, and have besides what `measured` says. A table with other stages takes
them by layers: each layer takes its part of what its stage took, and the step is predicted as the verdict on the run does.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.schedule import ActivationSize, Costs, Measurement, Schedule, ScheduleError, Timeline
from penstock.schedule.table import Kind, Table
from penstock.schedule.timing.simulate import simulate_until_deadlock
from penstock.schedule.transform import with_full_backwards
from penstock.view.data.timeline import Data
from penstock.view.studio import question

STAGE_COSTS = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W}
MILLI = 1e-3
MOST_STAGES = 1024


class Timed(NamedTuple):
    """A table as it is run, what its actions cost, and when they run, as far as they can."""

    table: Table
    costs: Costs
    timeline: Timeline


def timed(schedule: Schedule, answers: Mapping[str, object], unit: object) -> Timed:
    """`schedule` at the costs that the page `answers`. Raises PenstockError for costs that are none, or not of this table."""
    if unit not in ("", "ms"):
        raise PenstockError(f"unit is {question.shown(unit)}: use '' or 'ms'")
    slower, factors = _slower(schedule, answers), _factors(answers, "microbatch", schedule.microbatches)
    if not any(factor != 1 for factor in factors):
        factors = []  # which is the same, and said of microbatches that are alike
    if "measured" in answers:
        return _predicted(schedule, replace(_measurement(answers), microbatch_factors=tuple(factors)), slower)
    share = question.number(answers.get("share", 1), "share")
    scale = MILLI if unit == "ms" else 1.0
    stage_costs = _costs_by_stage(answers, schedule.num_stages)
    forward, inputs, weights = (
        [scale * share * time * factor for time, factor in zip(stage_costs[name], slower, strict=True)] for name in STAGE_COSTS
    )
    sizes = _sizes(answers, schedule.num_stages)
    act, keep = zip(*sizes, strict=True) if sizes else (share, None)
    costs = Costs(forward, inputs, weights, send=scale * _send(answers), act=act, keep=keep, microbatch_factors=factors)
    timeline = simulate_until_deadlock(schedule, costs)
    return Timed(schedule, costs, replace(timeline, memory_unit="" if keep is None else "bytes"))


def data_of(measured: Measurement) -> Data:
    """What a run's actions cost, as the page has it and asks with it."""
    stages = range(measured.schedule.num_stages)
    value = {name: [time / MILLI for time in measured.seconds[kind]] for name, kind in STAGE_COSTS.items()}
    usual = fmean(measured.message_seconds) if measured.message_seconds else 0.0
    halves = [value["backward_input"][stage] + value["backward_weight"][stage] for stage in stages]
    full = [
        full_backward / MILLI / half if half else 1.0
        for full_backward, half in zip(measured.seconds[Kind.B], halves, strict=True)
    ]
    return {
        **{name: fmean(times) for name, times in value.items()},
        "send": usual / MILLI,
        "stages": {str(stage): {name: times[stage] for name, times in value.items()} for stage in stages},
        "ranks": {},
        "microbatches": {str(number): factor for number, factor in enumerate(measured.microbatch_factors)},
        "sizes": [list(size) for size in measured.activation_sizes],
        "measured": {
            "placement": list(measured.schedule.placement),
            "layers": list(measured.layers) or [1.0] * len(stages),
            "full": full,  # what B took of what I and W take together
            "engine": [[measured.engine_seconds[kind][stage] / MILLI for kind in Kind] for stage in stages],
            "sends": [send / usual if usual else 1.0 for send in measured.message_seconds],  # of the usual message
        },
    }


# ---- by hand


def _costs_by_stage(answers: Mapping[str, object], stages: int) -> dict[str, list[float]]:
    """Return the costs of every stage: its own if it has any, else those of all."""
    costs_of_stages = question.mapping(answers.get("stages", {}), "the costs of single stages")

    def of(name: str, stage: int) -> float:
        stage_cost = question.mapping(costs_of_stages.get(str(stage), {}), f"the cost of stage {stage}")
        return question.number(stage_cost.get(name, answers.get(name, 1)), f"{name} of stage {stage}")

    times = {name: [of(name, stage) for stage in range(stages)] for name in STAGE_COSTS}
    for name in STAGE_COSTS:
        question.number(answers.get(name, 1), name)  # also where every stage has its own
    return times


def _slower(schedule: Schedule, answers: Mapping[str, object]) -> list[float]:
    """How many times as long every stage takes because of its rank."""
    factors = _factors(answers, "rank", schedule.ranks)
    return [factors[rank] for rank in schedule.placement]


def _factors(answers: Mapping[str, object], unit: str, count: int) -> list[float]:
    """Return the factor of each rank or microbatch; 1 where none is given."""
    name = f"{unit}s" if unit == "rank" else f"{unit}es"
    factors = question.mapping(answers.get(name, {}), f"the factors of single {name}")
    return [question.number(factors.get(str(number), 1), f"the factor of {unit} {number}") for number in range(count)]


def _send(answers: Mapping[str, object]) -> float:
    return question.number(answers.get("send", 0), "send")


def _sizes(answers: Mapping[str, object], stages: int) -> list[list[float]]:
    """Of every stage; none if they are of another number of stages."""
    sizes = [
        [question.number(size, "a size", 1e18) for size in question.items(pair, "a size")]
        for pair in question.items(answers.get("sizes", []), "sizes")
    ]
    if any(len(pair) != 2 for pair in sizes):
        raise PenstockError("sizes has other than two numbers for each stage: give what it takes, and what W still needs")
    return sizes if len(sizes) == stages else []


# ---- of a run


def _predicted(schedule: Schedule, measured: Measurement, slower: list[float]) -> Timed:
    """As on the run's ranks: its layers cut for this table; I and W run as one B, and pairs one after the other."""
    recut = measured.recut(schedule.num_stages)
    seconds = {
        kind: tuple(time * factor for time, factor in zip(times, slower, strict=True)) for kind, times in recut.seconds.items()
    }
    table = replace(with_full_backwards(schedule), overlaps=frozenset())
    recut = replace(recut, schedule=table, seconds=seconds)
    costs = replace(recut.costs, microbatch_factors=recut.microbatch_factors)
    try:
        timeline = recut.predict(schedule)
    except ScheduleError:  # it stops: as far as it comes
        partial_timeline = simulate_until_deadlock(table, costs)
        timeline = replace(partial_timeline, memory_unit="bytes" if recut.activation_sizes else "")
    return Timed(table, costs, replace(timeline, name=schedule.name))


def _measurement(answers: Mapping[str, object]) -> Measurement:
    run = question.mapping(answers["measured"], "measured")
    homes = [int(question.number(rank, "a rank", MOST_STAGES)) for rank in question.items(run.get("placement"), "placement")]
    if not 1 <= len(homes) <= MOST_STAGES:
        raise PenstockError(f"the run has {len(homes)} stages: the studio takes 1 to {MOST_STAGES}")
    stages, stage_costs = len(homes), _costs_by_stage(answers, len(homes))
    layers, full = _list(run, "layers", stages), _list(run, "full", stages)
    if not all(layers):
        raise PenstockError("layers has a 0: give every stage of the run a part of the model")
    engine = [_numbers(times, "engine", len(Kind)) for times in question.items(run.get("engine"), "engine")]
    if len(engine) != stages:
        raise PenstockError(f"engine has {len(engine)} rows for {stages} stages")
    seconds = {kind: tuple(MILLI * time for time in stage_costs[name]) for name, kind in STAGE_COSTS.items()}
    halves = zip(full, seconds[Kind.I], seconds[Kind.W], strict=True)
    seconds[Kind.B] = tuple(part * (inputs + weights) for part, inputs, weights in halves)
    between = {kind: tuple(MILLI * time for time in times) for kind, times in zip(Kind, zip(*engine, strict=True), strict=True)}
    sends = tuple(MILLI * _send(answers) * part for part in _list(run, "sends", stages - 1))
    schedule = Schedule("run", tuple(homes), 0, ((),) * (1 + max(homes)), frozenset())
    sizes = tuple(ActivationSize(*size) for size in _sizes(answers, stages))
    return Measurement(schedule, seconds, between, sends, 0.0, tuple(layers), sizes)


def _list(run: Mapping[str, object], name: str, count: int) -> list[float]:
    return _numbers(run.get(name), name, count)


def _numbers(value: object, name: str, count: int) -> list[float]:
    numbers = [question.number(item, name) for item in question.items(value, name)]
    if len(numbers) != count:
        raise PenstockError(f"{name} has {len(numbers)} numbers, not {count}: load the run again")
    return numbers
