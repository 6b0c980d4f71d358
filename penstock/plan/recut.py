"""The costs of a model's layers in the steps that ran, and a faster cut at these costs: `pipe.rebuild(cuts="measured")`.

A step shows what each stage takes, not which of its layers takes it, nor whether layers are heavy or a rank is slow:

    seconds of a layer on a rank = cost of the layer / speed of the rank

If the layers were measured one by one, their costs are in proportion to that, and a rank is slow if its stages take more than
their layers' share. Otherwise all ranks count as equally fast, and a stage's layers share its time as they share its
parameters. Either way the cut that ran takes what was measured, so a second call corrects what the first assumed wrongly.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean, median
from typing import NamedTuple, cast

from penstock.batch.agreement import Agreed
from penstock.comms.control_group import ControlGroup
from penstock.engine.clock import ActionClock, measure_own_clock_skew
from penstock.engine.observers import ObservedStep, Observer
from penstock.engine.step import Engine
from penstock.errors import MismatchError, PenstockError
from penstock.partition import CuttableModel
from penstock.partition.balance import SECONDS, Balance, balanced_starts
from penstock.plan.model_profile import TIMES, LayerCost, ModelProfile
from penstock.plan.partition_search import Limits, PartitionSearch
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import LayerChain
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Kind, Table
from penstock.timing.causes import NOTABLE_SHARE
from penstock.timing.events import Event
from penstock.timing.measurement import Measurement
from penstock.timing.timeline import Timeline

MEASURED = "measured"  # the cuts that are chosen by the times of the last steps
RECUT_CALL = f'pipe.rebuild(cuts="{MEASURED}")'
NOT_CUT = "cuts= are for a model that was cut, but this pipeline was given its stages"
MAX_STEPS, MAX_ACTIONS = 5, 2000  # of a rank, the newest, that are measured
SEARCHED_ACTIONS = 400_000  # that are timed to improve a cut

# -- the steps that ran ----------------------------------------------------------------------------------------------------


class StepTimes(NamedTuple):
    """When each action of one rank ran in one step."""

    events: Sequence[Event]
    microbatch_sizes: Sequence[int]


class RecentSteps(Observer):
    """Keeps this rank's last training steps. The first of a kind, which is slower, does not count.

    `num_stages`: of the model. Actions of a teacher, which come behind, are left out.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._steps = deque[tuple[Agreed, ActionClock]](maxlen=MAX_STEPS)

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Keep what all ranks know of the step, and its clock."""
        if step.agreed.has_backward and not step.agreed.is_new_kind:
            self._steps.append((step.agreed, step.clock))

    def times(self, rank: int, clock_offset: float) -> list[StepTimes]:
        """Return the last steps with the same actions as the last one. `clock_offset`: from here to rank 0."""
        times = list[StepTimes]()
        last_actions = self._steps[-1][0].program.actions if self._steps else []
        for agreed, clock in reversed(self._steps):
            actions = agreed.program.actions
            if actions != last_actions or (times and (1 + len(times)) * len(actions) > MAX_ACTIONS):
                break
            clock.offset = clock_offset
            intervals = zip(actions, clock.intervals(), strict=True)
            events = [Event(rank, action, *interval) for action, interval in intervals if action.stage < self._num_stages]
            times.append(StepTimes(events, agreed.microbatch_sizes))
        return times[::-1]


def measurement_of_steps(
    steps_of_ranks: Sequence[Sequence[StepTimes]], pipelines: Sequence[Sequence[int]], table: Table
) -> Measurement:
    """Return the costs of the last steps: of each stage in the pipeline where it takes longest.

    `steps_of_ranks`: `RecentSteps.times` of every rank. `pipelines`: the ranks of each. `table`: what ran. Raises PenstockError
    without a step.
    """
    num_steps = min(map(len, steps_of_ranks))
    if not num_steps:
        raise PenstockError(
            'cuts="measured" has no step to measure yet: run two steps first (the first of a kind, which is slower, does not '
            "count)"
        )
    measurements = []
    for ranks in pipelines:
        timelines = [
            Timeline(
                f"{table.name}, measured",
                tuple(tuple(steps_of_ranks[rank][-number].events) for rank in ranks),
                microbatch_sizes=tuple(steps_of_ranks[ranks[0]][-number].microbatch_sizes),
                chains=table.chains if table.chains.forward_only else None,
            )
            for number in range(num_steps, 0, -1)
        ]
        measurements.append(Measurement.from_timelines(*timelines))
    seconds = {kind: tuple(map(max, zip(*(value.seconds[kind] for value in measurements), strict=True))) for kind in Kind}
    return replace(measurements[0], seconds=seconds)


# -- costs of layers, speeds of ranks --------------------------------------------------------------------------------------


def profile_of_run(measured: Measurement, balance: Balance, parameters: Sequence[float], rows: int) -> ModelProfile:
    """Return what the layers of `balance` took in steps with microbatches of `rows` rows. `parameters`: bytes of each layer's.

    The engine's time for an action is in its layers'; what messages took is not: that is `measured.send`.
    """
    layers = []
    times = measured.costs.action_costs(measured.schedule.num_stages)
    sizes = measured.activation_sizes or ((0.0, 0.0),) * measured.schedule.num_stages
    for stage, (start, end) in enumerate(balance.ranges()):
        for place in range(start, end):
            share = balance.costs[place] / balance.stage_costs[stage] if balance.stage_costs[stage] else 1 / (end - start)
            forward, full, inputs, weights = (share * times[kind][stage] for kind in Kind)
            extra = max(0.0, inputs + weights - full)  # that I and W take over B; each was measured in other actions
            weights = min(weights, full)
            activation, keep = (share * size for size in sizes[stage])
            layer = LayerCost(balance.names[place], forward, full - weights, weights, activation, keep, parameters[place])
            layers.append(layer._replace(split=extra))
    return ModelProfile.from_layers(layers, rows)


def rank_speeds(measured: Measurement, balance: Balance) -> tuple[float, ...]:
    """Return the speed of every rank: the cost of its layers by the time that they took, 1 for the median rank.

    All are 1 if the layers of `balance` were not measured one by one.
    """
    table = measured.schedule
    if balance.cost_kind != SECONDS:
        return (1.0,) * table.ranks
    speeds = []
    for rank in range(table.ranks):
        stages = table.stages_of(rank)
        seconds = sum(measured.seconds[kind][stage] for kind in (Kind.F, Kind.B) for stage in stages)
        speeds.append(sum(balance.stage_costs[stage] for stage in stages) / seconds if seconds else 1.0)
    usual = median(speeds)
    return tuple(speed / usual if speed else 1.0 for speed in speeds)


# -- the cut ---------------------------------------------------------------------------------------------------------------


class FastestCut(NamedTuple):
    """The fastest cut found at the costs of the last steps; its `str` is a line to paste."""

    cuts: tuple[str, ...]  # the layer that each stage but the first begins with
    predicted_seconds: float  # of a step
    predicted_seconds_now: float  # of a step with the cut that ran; infinite for another number of stages

    @property
    def gain(self) -> float:
        """The share of the step that would be saved."""
        return 1 - self.predicted_seconds / self.predicted_seconds_now if self.predicted_seconds_now else 0.0

    @property
    def is_notable(self) -> bool:
        """Whether the gain is large enough to be worth a rebuild."""
        return self.gain >= NOTABLE_SHARE

    def __str__(self) -> str:
        """Return the call that makes the cut, with what it gains; or that no cut gains enough."""
        if not self.is_notable:
            return f"no other cut would make the step {NOTABLE_SHARE:.0%} shorter, the best {max(0.0, self.gain):.1%}"
        names = ", ".join(f'"{name}"' for name in self.cuts)
        return f"pipe.rebuild(cuts=[{names}]): {1e3 * self.predicted_seconds:.4g} ms, {self.gain:.1%} less"


def choose_fastest_cut(
    control: ControlGroup,
    engine: Engine,
    recent_steps: RecentSteps,
    cuttable: CuttableModel | None,
    cuts: Sequence[str],
    table: Schedule,
) -> FastestCut:
    """Return the cut for `table` that rank 0 finds, from the last steps of all ranks, which all call it. `cuts`: that ran.

    Raises MismatchError for stages that were given, PenstockError as `measurement_of_steps`.
    """
    if cuttable is None:
        raise MismatchError(NOT_CUT)
    position, offset = engine.position, measure_own_clock_skew(control, engine.clock_ids).offset
    times = recent_steps.times(position.pipeline.rank, offset)
    steps_of_ranks = control.all_gather_value(times, "to measure their steps")

    cut = None
    if position.world.rank == 0:
        pipelines = [ranks for shards in position.pipelines for ranks in shards]
        measured = measurement_of_steps(steps_of_ranks, pipelines, engine.schedule)
        costs, cost_kind = cuttable.unit_costs(engine.device)
        names = cuttable.unit_order
        balance = Balance(tuple(names), tuple(costs), (0, *map(names.index, cuts)), cost_kind)
        cut = fastest_cut(measured, balance, table)
    return cast(FastestCut, control.all_gather_value(cut, "to choose the cut")[0])


def fastest_cut(measured: Measurement, balance: Balance, table: Schedule | None = None) -> FastestCut:
    """Return the fastest cut found for `table`, by default the one that ran. Memory is not limited.

    `balance`: the layers with their costs, and the cut that ran. Raises MismatchError for more stages than layers.
    """
    table = table or measured.schedule
    speeds, slices = rank_speeds(measured, balance), table.slices
    without_engine = dict.fromkeys(Kind, (0.0,) * measured.schedule.num_stages)
    [sample] = profile_of_run(replace(measured, engine_seconds=without_engine), balance, [0.0] * len(balance.costs), 1).samples

    speed_of_layer = [
        speeds[measured.schedule.placement[stage]]
        for stage, (start, end) in enumerate(balance.ranges())
        for _ in range(start, end)
    ]
    layers = [
        layer._replace(**{name: slices * speed * getattr(layer, name) for name in TIMES})
        for layer, speed in zip(sample.layers, speed_of_layer, strict=True)
    ]

    limits = Limits(
        (math.inf,) * table.ranks,
        send=fmean(measured.message_seconds or (0.0,)),
        action=fmean(measured.engine_seconds[Kind.F] + measured.engine_seconds[Kind.B]),
        speeds=speeds,
    )
    search = PartitionSearch(LayerChain(layers), ScheduleTimer(table), limits)
    found = [search.evaluate(tuple(balanced_starts([layer.seconds for layer in layers], table.num_stages)))]
    predicted_seconds_now = math.inf
    if table.num_stages == len(balance.starts):
        found.append(search.evaluate(balance.starts))
        predicted_seconds_now = found[-1].seconds
    best = min((search.improve(partition, SEARCHED_ACTIONS, Random(0)) for partition in found), key=lambda cut: cut.seconds)
    return FastestCut(tuple(balance.names[start] for start in best.starts[1:]), best.seconds, predicted_seconds_now)
