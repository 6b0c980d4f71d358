"""The order in which microbatches of unequal costs make a step short."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.schedule.table import Table
from penstock.schedule.timing.simulate import Costs, simulate

UNIT_COSTS = Costs()


def plan_order(costs: Sequence[float], schedule: Table, stage_costs: Costs = UNIT_COSTS) -> list[int]:
    """Return the order to run in: position in the step -> index of the microbatch.

    `costs`: of each microbatch, in any unit; every stage takes as many times longer for one that costs more. `stage_costs`:
    what stages take for a microbatch of cost 1.

    A pipeline is idle while it fills and drains. The first and last microbatches decide for how long: the cheapest go there.
    Of the given order, that one, and those of rising and falling costs, the simulator chooses the fastest, the given one first.
    """
    given = list(range(len(costs)))
    rising = sorted(given, key=lambda index: (costs[index], index))
    cheapest_outside = [*rising[::2], *reversed(rising[1::2])]
    if len(costs) > schedule.microbatches:  # a longer table of the same rule will run
        return cheapest_outside

    table = schedule.filter_actions(lambda action: action.microbatch < len(costs))
    unused = [0.0] * (schedule.microbatches - len(costs))

    def step_time(order: Sequence[int]) -> float:
        factors = [*(costs[index] for index in order), *unused]
        return simulate(table, replace(stage_costs, microbatch_factors=factors)).makespan

    return min((given, cheapest_outside, rising, rising[::-1]), key=step_time)
