"""Lower bounds on the makespan of any table: by the work of a rank, by the longest chain, by the memory of a rank."""

import heapq
from dataclasses import replace
from typing import NamedTuple

from penstock.plan.search.problem import INFINITE, TOLERANCE, SearchProblem
from penstock.schedule.table import Kind


class LowerBound(NamedTuple):
    """A time that no step is shorter than, and the reason for it."""

    time: float
    reason: str


def lower_bound(problem: SearchProblem) -> LowerBound:
    """Return the highest known lower bound for any table of `problem`'s actions, with full or split backwards."""
    problem = relaxed_problem(problem)
    heads, tails = earliest_starts(problem), problem.tails
    chain = max(head + problem.cost[action] + tails[action] for action, head in enumerate(heads))
    bounds = [LowerBound(chain, "the longest chain of actions that wait for each other")]
    for rank in range(problem.ranks):
        bounds.append(LowerBound(_work_bound(problem, rank, heads, tails), f"the work of rank {rank}, from its first input on"))
        bounds.append(LowerBound(_memory_bound(problem, rank, heads), f"the memory of rank {rank}"))
    return max(bounds)


def relaxed_problem(problem: SearchProblem) -> SearchProblem:
    """Return a problem on which no table takes longer: what halves and pairs may save is saved everywhere."""
    costs, stages = problem.costs, problem.num_stages
    times, sizes = costs.action_costs_by_microbatch(stages, problem.microbatches), costs.activation_sizes(stages)
    inputs = [list(map(min, *halves_and_full)) for halves_and_full in zip(times[Kind.I], times[Kind.B], strict=True)]
    lefts = zip(times[Kind.W], times[Kind.B], inputs, strict=True)
    cheaper = replace(
        costs,
        forward=[[time * (1 - costs.overlap) for time in row] for row in times[Kind.F]],
        backward_input=inputs,
        backward_weight=[[min(w, b - i) for w, b, i in zip(*rows, strict=True)] for rows in lefts],
        keep=[min(size) for size in sizes],
        backward=None,
    )
    limits, slices, chains = problem.limits, problem.slices, problem.chains
    return SearchProblem(cheaper, problem.placement, problem.microbatches, limits, slices=slices, chains=chains)


def earliest_starts(problem: SearchProblem) -> list[float]:
    """Return the earliest start of every action, given only its dependencies and the earlier microbatches."""
    heads = [0.0] * len(problem.cost)
    count, arrival_times = problem.passes, list(problem.initial_slot_times)
    for code in problem.codes:
        free = 0.0
        for action in range(code * count, (code + 1) * count):
            weight = action >= problem.first_weight
            inputs_action = action - problem.first_back  # W after its I
            when = (
                heads[inputs_action] + problem.cost[inputs_action]
                if weight
                else max([arrival_times[action], *(arrival_times[s] for s in problem.also_needs[action])])
            )
            heads[action] = max(free, when)
            free = heads[action] + problem.cost[action]
            for send in problem.sends[action]:
                arrival_times[send.slot] = free + send.transmission + send.latency
    return heads


def _work_bound(problem: SearchProblem, rank: int, heads: list[float], tails: list[float]) -> float:
    """Return the least makespan if only `rank` ran one action at a time, and could preempt it (Jackson's bound)."""
    count = problem.passes
    actions = [action for action in range(len(heads)) if problem.placement[action // count % problem.num_stages] == rank]
    actions.sort(key=heads.__getitem__)
    remaining = [problem.cost[action] for action in actions]
    time, end, index, urgent = 0.0, 0.0, 0, list[tuple[float, int]]()
    while urgent or index < len(actions):
        if not urgent:
            time = max(time, heads[actions[index]])
        while index < len(actions) and heads[actions[index]] <= time:
            heapq.heappush(urgent, (-tails[actions[index]], index))
            index += 1
        tail, most_urgent = urgent[0]
        finish, next_head = time + remaining[most_urgent], heads[actions[index]] if index < len(actions) else INFINITE
        if finish <= next_head:
            heapq.heappop(urgent)
            time, end = finish, max(end, finish - tail)
        else:
            remaining[most_urgent] -= next_head - time
            time = next_head
    return end


def _memory_bound(problem: SearchProblem, rank: int, earliest_starts: list[float]) -> float:
    """Return the least makespan for the memory limit of `rank`: the least memory x time of its activations, over the limit.

    0 where microbatches are unequal, or cut into slices: the least time for which later ones are held is not known.
    """
    if problem.costs.is_ragged or problem.slices > 1:
        return 0.0
    count, stages, area = problem.passes, problem.num_stages, 0.0
    for stage in problem.stages_of[rank]:
        weight = 2 * stages + stage
        min_held_time = (
            earliest_starts[(stages + stage) * count] + problem.times[stages + stage] - earliest_starts[stage * count]
        )
        area += count * problem.sizes[stage].act * min_held_time
        if weight < len(problem.times):
            area += count * problem.sizes[stage].keep * problem.times[weight]
    limit = problem.limits[rank] / (1 + TOLERANCE)  # as given: the tolerance would make the bound too low
    begin = min([earliest_starts[stage * count] for stage in problem.stages_of[rank] if problem.sizes[stage].act], default=0.0)
    return begin + area / limit if 0 < limit < INFINITE else 0.0
