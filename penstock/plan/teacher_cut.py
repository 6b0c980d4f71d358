"""A teacher beside a planned model: the ranks of its stages, and cuts of both models, by what each rank has idle.

An order of the actions is made for some cuts, then the cuts are changed layer by layer while the step of that order gets
shorter and fits the memory; and once more, with an order made for these cuts.
"""

from collections.abc import Iterator, Sequence
from random import Random

from penstock.errors import PenstockError
from penstock.partition.balance import balanced_starts
from penstock.plan.model_profile import ModelProfile
from penstock.plan.partition_search import Candidate, Limits, PartitionSearch, StageStarts
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import LayerChain
from penstock.schedule.schedule import Schedule
from penstock.timing.costs import UNIT_COSTS, Costs
from penstock.timing.teacher_stages import costs_with_teacher
from penstock.timing.teacher_tables import v_of_teacher, with_teacher

ROUNDS = 2  # of an order for some cuts, and cuts for this order
ACTION_BUDGET = 150_000  # that are timed to improve the cuts of an order


def limits_beside_teacher(limits: Limits, teacher: ModelProfile) -> Limits:
    """Return the limits of a model beside an even share of the teacher's parameters on each rank."""
    parameter_bytes = sum(layer.without_backward().frozen for layer in teacher.samples[0].layers)
    share = parameter_bytes / len(limits.memory_bytes)
    return limits._replace(memory_bytes=tuple(max(1.0, memory - share) for memory in limits.memory_bytes))


def min_seconds_with_teacher(candidate: Candidate, chain: LayerChain) -> float:
    """Return the seconds that a step of a model takes at least with the teacher of `chain`, if the model's cut stays."""
    search, best = candidate
    work = search.timer.microbatches * sum(chain.layer_seconds)
    return max(best.seconds, work / sum(search.limits.speeds or [1.0] * len(best.choices)))


def partition_with_teacher(candidate: Candidate, chain: LayerChain, limits: Limits, random: Random) -> Candidate:
    """Return the best table and cuts with a teacher that are found from a model's table and its best cut.

    `chain`: the layers of both. `limits`: of both.
    """
    table, best, found = candidate.search.timer.schedule, candidate.best, list[Candidate]()
    for placement in _placements(table, len(chain.layers) - chain.num_model_layers):
        starts, skipped = (*best.starts, *_even_starts(chain, len(placement))), best.skipped_choices
        costs = costs_with_teacher(UNIT_COSTS, table.stages, len(placement), _forward_ratio(chain))
        for _ in range(ROUNDS):
            evaluated = list[Candidate]()
            for with_forwards in _orders(table, placement, costs):
                both = PartitionSearch(chain, ScheduleTimer(with_forwards), limits)
                evaluated.append(Candidate(both, both.evaluate(starts, skipped)))
                if not evaluated[-1].best.excess_bytes:
                    break
            both, partition = min(evaluated, key=_sort_key).improve(ACTION_BUDGET, random)
            found.append(Candidate(both, partition))
            if _sort_key(found[-1]) > _sort_key(min(found, key=_sort_key)):
                break
            starts, skipped, costs = partition.starts, partition.skipped_choices, both.simulation_costs(partition)
    return min(found, key=_sort_key)


def _sort_key(candidate: Candidate) -> tuple[float, float]:
    return candidate.best.excess_bytes, candidate.best.seconds


def _placements(table: Schedule, num_layers: int) -> Iterator[Sequence[int]]:
    """Yield ranks of the stages of a teacher of `num_layers`: the model's, and a V if it has layers for that."""
    yield table.placement[-min(table.stages, num_layers) :]
    v = v_of_teacher(table.placement)
    if len(v) <= num_layers and v != table.placement:
        yield v


def _orders(table: Schedule, placement: Sequence[int], costs: Costs) -> Iterator[Schedule]:
    """Yield tables with the teacher's forwards for the next batch: the fastest, and one in which fewest outputs wait."""
    yield with_teacher(table, placement, costs=costs)
    yield with_teacher(table, placement, costs=costs, max_waiting_outputs=table.microbatches)


def _even_starts(chain: LayerChain, num_stages: int) -> StageStarts:
    first = chain.num_model_layers
    return tuple(first + start for start in balanced_starts(chain.layer_seconds[first:], num_stages))


def _forward_ratio(chain: LayerChain) -> float:
    """Return the time of the teacher's forward, in times the model's."""
    forwards = [layer.forward for layer in chain.layers]
    model_forward = sum(forwards[: chain.num_model_layers])
    return sum(forwards[chain.num_model_layers :]) / model_forward if model_forward else 1.0


def check_teacher_profile(teacher: ModelProfile, slice_counts: Sequence[int]) -> None:
    """Raise PenstockError for a teacher that takes no time, and for slices, in which none runs."""
    if not any(layer.forward for layer in teacher.samples[-1].layers):
        raise PenstockError("all layers of the teacher take 0 seconds: measure them, or say what they take")
    if max(slice_counts) > 1:
        raise PenstockError(f"slices={max(slice_counts)} with a teacher, whose tokens are not cut: use slices=1")
