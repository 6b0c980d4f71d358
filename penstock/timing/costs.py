"""The costs of a step: of its actions, messages and activations, in any one unit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from penstock.errors import ScheduleError
from penstock.schedule.memory import ActivationSize
from penstock.schedule.program import check_skips
from penstock.schedule.table import Kind, Skip
from penstock.timing.events import MessageCost

Cost = float | Sequence[float]  # one number for all stages (or all borders between stages), or one for each
ActionCost = float | Sequence[float | Sequence[float]]  # the same; a stage may have a number for each microbatch


@dataclass(frozen=True)
class Costs:
    """The costs of actions, messages and activations: a number for all stages, or a sequence with one for each stage.

    Times are in any one unit. A full backward `B` costs `backward_input` + `backward_weight`, unless `backward` gives its
    cost. A pair of overlapping actions costs both less `overlap`, the share (0 to 1) of the shorter one that the longer hides.
    For `forward` and the three backwards, a stage may have a sequence with one cost for each microbatch.

    A message between two ranks occupies its channel for `size` / `bandwidth` and then travels for `send`. There is one
    channel for each ordered pair of ranks: first in, first out, in the order of the sender's table. These three are a number
    for all borders between stages, or a sequence with one for each; border s lies between stage s and s+1, and one inside a
    rank costs nothing. `size` is in bytes, `bandwidth` in bytes per unit of time. `skips` maps each skip connection (stage,
    later stage) to the bytes of its message, which has the latency and bandwidth of the border where it starts.

    An activation takes `act` from the start of its forward to the end of its backward, in bytes or any unit. Of a backward
    in halves, I frees all but `keep`, which W still needs (None: all of `act`). An output of a teacher takes `teacher_output`
    until the loss takes it; what the backward of the loss needs of it is a part of `act`.

    For microbatches of unequal shapes, `microbatch_factors` has a number for each: a multiplier of its actions, the bytes of
    its messages and its activations, but not of actions whose stage has a cost for each microbatch.
    All costs are of a whole microbatch: each of K slices costs 1/K of them.
    Later slices attend to more tokens: `slice_factors` has a number for each slice, a multiplier of that 1/K for its actions.
    """

    forward: ActionCost = 1
    backward_input: ActionCost = 1
    backward_weight: ActionCost = 1
    send: Cost = 0
    size: Cost = 0
    bandwidth: Cost = float("inf")
    act: Cost = 1
    keep: Cost | None = None
    overlap: float = 0
    skips: Mapping[Skip, float] = field(default_factory=dict)
    backward: ActionCost | None = None
    microbatch_factors: Sequence[float] = field(default_factory=list)
    slice_factors: Sequence[float] = field(default_factory=list)
    teacher_output: float = 0

    def factors_by_slice(self, slices: int) -> list[float]:
        """Return a multiplier of an equal share for the actions of each slice. Raises ScheduleError as for microbatches."""
        return _checked_costs("slice_factors", self.slice_factors or 1.0, slices, "slice", "a number")

    def factors_by_microbatch(self, microbatches: int) -> list[float]:
        """Return the cost multiplier of each microbatch. Raises ScheduleError unless there is one number for each."""
        return _checked_costs("microbatch_factors", self.microbatch_factors or 1.0, microbatches, "microbatch", "a number")

    @property
    def is_ragged(self) -> bool:
        """Return whether microbatches differ in cost."""
        costs = [self.forward, self.backward_input, self.backward_weight, self.backward]
        of_stages = [stage_cost for cost in costs if isinstance(cost, Iterable) for stage_cost in cost]
        by_microbatch = [self.microbatch_factors, *(cost for cost in of_stages if isinstance(cost, Iterable))]
        return any(len({*values}) > 1 for values in by_microbatch)

    def action_costs(self, stages: int) -> dict[Kind, list[float]]:
        """Return kind -> cost on every stage; the mean, if a stage has one for each microbatch.

        Raises ScheduleError if a sequence does not have one cost for each stage, a cost is negative or not finite, or
        `overlap` is not between 0 and 1.
        """
        return {
            kind: [fmean(cost) if isinstance(cost, list) else cost for cost in costs]
            for kind, costs in self._action_costs(stages).items()
        }

    def action_costs_by_microbatch(self, stages: int, microbatches: int) -> dict[Kind, list[list[float]]]:
        """Return kind -> stage -> cost of every microbatch. Raises as `action_costs` and `factors_by_microbatch`."""
        factors = self.factors_by_microbatch(microbatches)

        def by_microbatch(kind: Kind, stage: int, cost: float | list[float]) -> list[float]:
            """Return what the action costs for each microbatch."""
            if not isinstance(cost, list):
                return [cost * factor for factor in factors]
            if len(cost) != microbatches:
                raise ScheduleError(
                    f"{kind} of stage {stage} has {len(cost)} costs for {microbatches} microbatches: give one for each"
                )
            return cost

        return {
            kind: [by_microbatch(kind, stage, cost) for stage, cost in enumerate(costs)]
            for kind, costs in self._action_costs(stages).items()
        }

    def _action_costs(self, stages: int) -> dict[Kind, list[float | list[float]]]:
        """Return kind -> stage -> its cost, or one for each microbatch. Raises ScheduleError as `action_costs`."""
        if not 0 <= self.overlap <= 1:
            raise ScheduleError(f"overlap is {self.overlap}: give the share of the shorter action that is hidden, 0 to 1")
        forward = _checked_action_costs("forward", self.forward, stages)
        inputs = _checked_action_costs("backward_input", self.backward_input, stages)
        weights = _checked_action_costs("backward_weight", self.backward_weight, stages)
        if self.backward is None:
            full = [_add_costs(*halves) for halves in zip(inputs, weights, strict=True)]
        else:
            full = _checked_action_costs("backward", self.backward, stages)
        return {Kind.F: forward, Kind.B: full, Kind.I: inputs, Kind.W: weights}

    def message_costs(self, stages: int) -> dict[tuple[int, int], MessageCost]:
        """Return the cost of a message over each border, from stage s to s+1, and then of each skip.

        Raises ScheduleError for a cost or a skip that the table cannot have.
        """
        check_skips(self.skips, stages)
        borders = list(pairwise(range(stages)))
        sends = _checked_costs("send", self.send, len(borders), "border")
        bandwidths = _expand_cost("bandwidth", self.bandwidth, len(borders), "border")
        for bandwidth in bandwidths:
            if not bandwidth > 0:
                raise ScheduleError(f"bandwidth has {bandwidth}: give bytes per unit of time, more than 0")
        sizes = _checked_costs("size", self.size, len(borders), "border", "a number of bytes")
        sizes += _checked_costs("skips", list(self.skips.values()), len(self.skips), "skip", "a number of bytes")
        ways = zip([*borders, *self.skips], sizes, strict=True)
        return {(start, end): MessageCost(size / bandwidths[start], sends[start]) for (start, end), size in ways}

    def activation_sizes(self, stages: int) -> tuple[ActivationSize, ...]:
        """Return the size of an activation of every stage. Raises ScheduleError if a size is negative or one is missing."""
        acts = _checked_costs("act", self.act, stages, description="an amount of memory")
        keeps = acts if self.keep is None else _checked_costs("keep", self.keep, stages, description="an amount of memory")
        return tuple(map(ActivationSize, acts, keeps))


UNIT_COSTS = Costs()  # F, I and W take 1, messages nothing


def _checked_costs(name: str, cost: Cost, count: int, unit: str = "stage", description: str = "a time") -> list[float]:
    costs = _expand_cost(name, cost, count, unit)
    for value in costs:
        if not 0 <= value < float("inf"):
            raise ScheduleError(f"{name} has the cost {value}: a cost is {description}, 0 or more")
    return costs


def _checked_action_costs(name: str, cost: ActionCost, stages: int) -> list[float | list[float]]:
    by_stage: list[float | list[float]] = []
    for stage_cost in cost if isinstance(cost, Iterable) else [cost] * stages:
        if isinstance(stage_cost, Iterable):
            numbers = list(stage_cost)
            by_stage.append(_checked_costs(name, numbers, max(1, len(numbers)), "microbatch"))
        else:
            by_stage += _checked_costs(name, stage_cost, 1)
    if len(by_stage) != stages:
        raise ScheduleError(f"{name} has {len(by_stage)} costs for {stages} stages: give one number, or one for each stage")
    return by_stage


def _add_costs(first: float | list[float], second: float | list[float]) -> float | list[float]:
    """Return the sum of two costs, each of them a number, or one for each microbatch."""
    if not isinstance(first, list):
        return [first + cost for cost in second] if isinstance(second, list) else first + second
    if not isinstance(second, list):
        return [cost + second for cost in first]
    if len(first) != len(second):
        raise ScheduleError(f"backward_input has {len(first)} costs on a stage, backward_weight {len(second)}: give as many")
    return [cost + other for cost, other in zip(first, second, strict=True)]


def _expand_cost(name: str, cost: Cost, count: int, unit: str) -> list[float]:
    costs = [float(c) for c in cost] if isinstance(cost, Iterable) else [float(cost)] * count
    if len(costs) != count:
        raise ScheduleError(f"{name} has {len(costs)} costs for {count} {unit}s: give one number, or one for each {unit}")
    return costs
