"""Turn the page's costs into `Costs`, and simulate a table at them. They are set by hand, or come from a measured run.

    {"forward": 1, "backward_input": 1, "backward_weight": 1, "send": 0,   # of every stage, and of a message
     "stages": {"2": {"forward": 3}},                                     # of single stages
     "ranks": {"1": 1.5},                                                 # factor on the times of a rank
     "microbatches": {"3": 4},                                            # factor on the size of a microbatch
     "share": 2,                                                          # factor on the times and activations of all stages
     "sizes": [[1000, 800]]}                      # for each stage: bytes a microbatch takes, and bytes that W still needs

Costs of a run are milliseconds for each of its stages, with a key "measured" for what else it says. A table with other stages
takes them by layers: each layer takes its share of its stage's time, and the step is predicted as in the verdict on the run.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.schedule import ActivationSize, Costs, Measurement, Schedule, ScheduleError, Timeline
from penstock.schedule.table import Kind, Table
from penstock.schedule.transform import with_full_backwards
from penstock.timing.simulate import simulate_until_deadlock
from penstock.view.data.timeline_data import Data
from penstock.view.studio import validation

STAGE_COSTS = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W}
MILLI = 1e-3
MAX_STAGES = 1024


class SimulatedTable(NamedTuple):
    """A table, its costs, and its timeline until a deadlock or the end."""

    table: Table
    costs: Costs
    timeline: Timeline


def simulate_at_page_costs(schedule: Schedule, page_costs: Mapping[str, object], unit: object) -> SimulatedTable:
    """Simulate `schedule` at the page's costs. Raises PenstockError for costs that are invalid or do not fit the table."""
    if unit not in ("", "ms"):
        raise PenstockError(f"unit is {validation.short_repr(unit)}: use '' or 'ms'")
    rank_factors, factors = (
        _rank_factors_by_stage(schedule, page_costs),
        _factors(page_costs, "microbatch", schedule.microbatches),
    )
    if not any(factor != 1 for factor in factors):
        factors = []  # all microbatches are equal
    if "measured" in page_costs:
        return _predict(schedule, replace(_measurement(page_costs), microbatch_factors=tuple(factors)), rank_factors)
    share = validation.number(page_costs.get("share", 1), "share")
    scale = MILLI if unit == "ms" else 1.0
    stage_costs = _costs_by_stage(page_costs, schedule.num_stages)
    forward, inputs, weights = (
        [scale * share * time * factor for time, factor in zip(stage_costs[name], rank_factors, strict=True)]
        for name in STAGE_COSTS
    )
    sizes = _activation_sizes(page_costs, schedule.num_stages)
    act, keep = zip(*sizes, strict=True) if sizes else (share, None)
    costs = Costs(forward, inputs, weights, send=scale * _send_cost(page_costs), act=act, keep=keep, microbatch_factors=factors)
    timeline = simulate_until_deadlock(schedule, costs)
    return SimulatedTable(schedule, costs, replace(timeline, memory_unit="" if keep is None else "bytes"))


def measured_costs_data(measured: Measurement) -> Data:
    """Return the costs of a run's actions in the page's form."""
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
            "full": full,  # time of B / time of I and W
            "engine": [[measured.engine_seconds[kind][stage] / MILLI for kind in Kind] for stage in stages],
            "sends": [send / usual if usual else 1.0 for send in measured.message_seconds],  # factors on the usual message
        },
    }


# ---- by hand


def _costs_by_stage(page_costs: Mapping[str, object], stages: int) -> dict[str, list[float]]:
    """Return cost name -> its value for each stage: the stage's own if set, else the common one."""
    costs_of_stages = validation.mapping(page_costs.get("stages", {}), "the costs of single stages")

    def cost(name: str, stage: int) -> float:
        stage_cost = validation.mapping(costs_of_stages.get(str(stage), {}), f"the cost of stage {stage}")
        return validation.number(stage_cost.get(name, page_costs.get(name, 1)), f"{name} of stage {stage}")

    times = {name: [cost(name, stage) for stage in range(stages)] for name in STAGE_COSTS}
    for name in STAGE_COSTS:
        validation.number(page_costs.get(name, 1), name)  # check it even if every stage has its own
    return times


def _rank_factors_by_stage(schedule: Schedule, page_costs: Mapping[str, object]) -> list[float]:
    """Return for each stage the factor of its rank on times."""
    factors = _factors(page_costs, "rank", schedule.ranks)
    return [factors[rank] for rank in schedule.placement]


def _factors(page_costs: Mapping[str, object], unit: str, count: int) -> list[float]:
    """Return the factor of each rank or microbatch, 1 by default."""
    name = f"{unit}s" if unit == "rank" else f"{unit}es"
    factors = validation.mapping(page_costs.get(name, {}), f"the factors of single {name}")
    return [validation.number(factors.get(str(number), 1), f"the factor of {unit} {number}") for number in range(count)]


def _send_cost(page_costs: Mapping[str, object]) -> float:
    return validation.number(page_costs.get("send", 0), "send")


def _activation_sizes(page_costs: Mapping[str, object], stages: int) -> list[list[float]]:
    """Return for each stage the bytes of a microbatch, and those that W needs; [] if given for another number of stages."""
    sizes = [
        [validation.number(size, "a size", 1e18) for size in validation.items(pair, "a size")]
        for pair in validation.items(page_costs.get("sizes", []), "sizes")
    ]
    if any(len(pair) != 2 for pair in sizes):
        raise PenstockError("sizes has other than two numbers for each stage: give what it takes, and what W still needs")
    return sizes if len(sizes) == stages else []


# ---- of a run


def _predict(schedule: Schedule, measured: Measurement, rank_factors: list[float]) -> SimulatedTable:
    """Predict the table on the run's ranks, its layers cut anew. I and W run as one B, and pairs one after the other."""
    recut = measured.recut(schedule.num_stages)
    seconds = {
        kind: tuple(time * factor for time, factor in zip(times, rank_factors, strict=True))
        for kind, times in recut.seconds.items()
    }
    table = replace(with_full_backwards(schedule), overlaps=frozenset())
    recut = replace(recut, schedule=table, seconds=seconds)
    costs = replace(recut.costs, microbatch_factors=recut.microbatch_factors)
    try:
        timeline = recut.predict(schedule)
    except ScheduleError:  # a deadlock: keep what runs before it
        partial_timeline = simulate_until_deadlock(table, costs)
        timeline = replace(partial_timeline, memory_unit="bytes" if recut.activation_sizes else "")
    return SimulatedTable(table, costs, replace(timeline, name=schedule.name))


def _measurement(page_costs: Mapping[str, object]) -> Measurement:
    run = validation.mapping(page_costs["measured"], "measured")
    placement = [
        int(validation.number(rank, "a rank", MAX_STAGES)) for rank in validation.items(run.get("placement"), "placement")
    ]
    if not 1 <= len(placement) <= MAX_STAGES:
        raise PenstockError(f"the run has {len(placement)} stages: the studio takes 1 to {MAX_STAGES}")
    stages, stage_costs = len(placement), _costs_by_stage(page_costs, len(placement))
    layers, full = _field_numbers(run, "layers", stages), _field_numbers(run, "full", stages)
    if not all(layers):
        raise PenstockError("layers has a 0: give every stage of the run a part of the model")
    engine = [_numbers(times, "engine", len(Kind)) for times in validation.items(run.get("engine"), "engine")]
    if len(engine) != stages:
        raise PenstockError(f"engine has {len(engine)} rows for {stages} stages")
    seconds = {kind: tuple(MILLI * time for time in stage_costs[name]) for name, kind in STAGE_COSTS.items()}
    halves = zip(full, seconds[Kind.I], seconds[Kind.W], strict=True)
    seconds[Kind.B] = tuple(factor * (inputs + weights) for factor, inputs, weights in halves)
    engine_seconds = {
        kind: tuple(MILLI * time for time in times) for kind, times in zip(Kind, zip(*engine, strict=True), strict=True)
    }
    sends = tuple(MILLI * _send_cost(page_costs) * factor for factor in _field_numbers(run, "sends", stages - 1))
    schedule = Schedule("run", tuple(placement), 0, ((),) * (1 + max(placement)), frozenset())
    sizes = tuple(ActivationSize(*size) for size in _activation_sizes(page_costs, stages))
    return Measurement(schedule, seconds, engine_seconds, sends, tuple(layers), sizes)


def _field_numbers(run: Mapping[str, object], name: str, count: int) -> list[float]:
    return _numbers(run.get(name), name, count)


def _numbers(value: object, name: str, count: int) -> list[float]:
    numbers = [validation.number(item, name) for item in validation.items(value, name)]
    if len(numbers) != count:
        raise PenstockError(f"{name} has {len(numbers)} numbers, not {count}: load the run again")
    return numbers
