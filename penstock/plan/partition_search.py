"""One table and a cut of the layers for it, with the recomputation that makes it fit; and the way from there to better cuts."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random
from typing import NamedTuple

from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import ADAM_STATE_RATIO, ActivationPolicy, LayerChain, StageCost
from penstock.schedule import Costs

StageStarts = tuple[int, ...]  # the first layer of every stage


class Limits(NamedTuple):
    """What a plan is made for, besides the layers."""

    memory_bytes: tuple[float, ...]  # bytes of every rank
    optimizer: float = ADAM_STATE_RATIO  # bytes of its state for each byte of parameters
    send: float = 0.0  # seconds that a message takes
    bandwidth: float = float("inf")  # bytes a second over a border
    action: float = 0.0  # seconds of the engine for each action, besides its layers
    cores: float = float("inf")  # how many ranks can compute at once
    speeds: tuple[float, ...] = ()  # of every rank: 0.5 takes twice as long as the layers say; none: all take as long
    dp: int = 1  # replicas of the pipeline

    def gradient_reduce_seconds(self, parameters: float) -> float:
        """Seconds in which the replicas sum so many bytes of gradients, in a ring."""
        return 2 * (self.dp - 1) * (self.send + parameters / self.dp / self.bandwidth)

    def for_first_ranks(self, ranks: int) -> "Limits":
        """For so many of the ranks."""
        return self._replace(memory_bytes=self.memory_bytes[:ranks], speeds=self.speeds[:ranks])


class RankChoice(NamedTuple):
    """How one rank holds its stages' activations. The less the better: first the time, then the memory."""

    recompute_seconds: float  # more in the backwards, for one microbatch
    peak_bytes: float  # at its fullest, all included
    excess_bytes: float  # of them above the limit
    policies: tuple[ActivationPolicy, ...]  # of its stages


class EvaluatedPartition(NamedTuple):
    """A cut of the layers for one table. The less the better: what is above the limits, the time, what is recomputed."""

    excess_bytes: float  # bytes: the root of the squares' sum over the ranks, less where they are more even
    seconds: float
    starts: StageStarts
    skipped_choices: tuple[int, ...]  # of every rank, how many of the cheapest choices are passed over
    choices: tuple[RankChoice, ...]

    @property
    def recompute_seconds(self) -> float:
        """Seconds of recomputation, for one microbatch."""
        return sum([choice.recompute_seconds for choice in self.choices])


def _sort_key(candidate: EvaluatedPartition) -> tuple[float, float, float]:
    return candidate.excess_bytes, candidate.seconds, candidate.recompute_seconds


RESTART_MOVES = 3  # steps, from which a descent begins again
EVALUATION_OVERHEAD_ACTIONS = 200  # actions: what a candidate costs besides, in the time of so many


class PartitionSearch:
    """All cuts of one line of layers for one table."""

    def __init__(self, line: LayerChain, table: ScheduleTimer, terms: Limits) -> None:
        self.chain, self.timer, self.limits = line, table, terms
        self.actions_timed = 0  # actions that were timed
        self._choices_cache: dict[tuple[int, ...], list[RankChoice]] = {}

    def evaluate(
        self, starts: StageStarts, passed: tuple[int, ...] = (), worse: EvaluatedPartition | None = None
    ) -> EvaluatedPartition:
        """The cut into stages that begin so. On every rank the cheapest choice that fits, after so many `passed` over.

        If it is no better than one that is `worse`, its seconds may be too few, but not fewer than that one's.
        """
        stages, ends = self.stage_costs(starts), (*starts[1:], len(self.chain.layers))
        passed = passed or (0,) * len(self.timer.stages_of_rank)
        choices = []
        for rank, home in enumerate(self.timer.stages_of_rank):
            key = rank, *(each for stage in home for each in (starts[stage], ends[stage]))
            if key not in self._choices_cache:
                self._choices_cache[key] = self._rank_choices(rank, [stages[stage] for stage in home])
            choices.append(self._choices_cache[key][min(passed[rank], len(self._choices_cache[key]) - 1)])
        over = math.hypot(*(choice.excess_bytes for choice in choices))
        costs = [cost for times in self._action_times(stages, choices) for cost in times]
        reduced = self.gradient_reduce_seconds(stages)
        candidate = EvaluatedPartition(over, self.timer.makespan_lower_bound(costs) + reduced, starts, passed, tuple(choices))
        self.actions_timed += EVALUATION_OVERHEAD_ACTIONS
        if worse is not None and _sort_key(candidate) >= _sort_key(worse):
            return candidate
        self.actions_timed += len(self.timer.operations)
        return candidate._replace(seconds=self.timer.makespan(costs, self._message_delays(stages), self.limits.cores) + reduced)

    def gradient_reduce_seconds(self, stages: Sequence[StageCost]) -> float:
        """Seconds in which the replicas sum their gradients, after the step."""
        parameters = (sum(stages[stage].parameters for stage in home) for home in self.timer.stages_of_rank)
        return self.limits.gradient_reduce_seconds(max(parameters))

    def stage_costs(self, starts: StageStarts) -> list[StageCost]:
        """What the stages cost that begin so."""
        return [self.chain.stage_cost(start, end) for start, end in pairwise((*starts, len(self.chain.layers)))]

    def _rank_choices(self, rank: int, stages: Sequence[StageCost]) -> list[RankChoice]:
        """All ways that fit, the cheapest first; if none does, the one that takes the least memory."""
        always = sum(self.static_bytes(rank, stages))
        ways = [self._rank_choice(rank, stages, ways, always) for ways in product(*(stage.policies for stage in stages))]
        return sorted((way for way in ways if not way.excess_bytes), key=lambda way: way[:2]) or [
            min(ways, key=lambda way: way.excess_bytes)
        ]

    def _rank_choice(
        self, rank: int, stages: Sequence[StageCost], ways: tuple[ActivationPolicy, ...], always: float
    ) -> RankChoice:
        sizes = [size for stage, way in zip(stages, ways, strict=True) for size in (way.activation, stage.keep)]
        held = max(sum([size * count for size, count in zip(sizes, row, strict=True)]) for row in self.timer.peak_counts[rank])
        taken = always + held + max(way.transient_bytes for way in ways)
        return RankChoice(
            sum(way.recompute_seconds for way in ways), taken, max(0.0, taken - self.limits.memory_bytes[rank]), ways
        )

    def static_bytes(self, rank: int, stages: Sequence[StageCost]) -> tuple[float, float]:
        """Bytes on `rank` all the time: parameters, gradients and optimizer state; buffers for what other ranks send."""
        around = (rank, *self.timer.placement, rank)
        buffers = 0.0
        for stage, cost in zip(self.timer.stages_of_rank[rank], stages, strict=True):
            buffers += cost.input * (around[stage] != rank) + cost.output * (around[stage + 2] != rank)
        return (2 + self.limits.optimizer) * sum(cost.parameters for cost in stages), buffers

    def _action_times(self, stages: Sequence[StageCost], choices: Sequence[RankChoice]) -> tuple[list[float], ...]:
        """Of F, B, I and W, of every stage each."""
        action, times = self.limits.action, []
        speeds = self.limits.speeds or (1.0,) * len(choices)
        for stage, way, rank in zip(stages, self.stage_policies(choices), self.timer.placement, strict=True):
            inputs, weights = stage.backward_input + way.recompute_seconds, stage.backward_weight
            in_two = inputs + stage.split, weights
            times.append([(action + each) / speeds[rank] for each in (stage.forward, inputs + weights, *in_two)])
        return tuple(map(list, zip(*times, strict=True)))

    def _message_delays(self, stages: Sequence[StageCost]) -> list[float]:
        send, bandwidth = self.limits.send, self.limits.bandwidth
        crossed = [one != other for one, other in pairwise(self.timer.placement)]
        return [*((send + stage.output / bandwidth) * apart for stage, apart in zip(stages, crossed, strict=False)), 0.0]

    def stage_policies(self, choices: Sequence[RankChoice]) -> list[ActivationPolicy]:
        """Of every stage, how its activations are held."""
        found = {
            stage: way
            for home, each in zip(self.timer.stages_of_rank, choices, strict=True)
            for stage, way in zip(home, each.policies, strict=True)
        }
        return [found[stage] for stage in sorted(found)]

    def simulation_costs(self, candidate: EvaluatedPartition) -> Costs:
        """What `simulate` is told of it, in seconds and bytes."""
        stages, ways = self.stage_costs(candidate.starts), self.stage_policies(candidate.choices)
        forward, full, inputs, weights = self._action_times(stages, candidate.choices)
        return Costs(
            forward,
            inputs,
            weights,
            backward=full,
            send=self.limits.send,
            size=[stage.output for stage in stages[:-1]],
            bandwidth=self.limits.bandwidth,
            act=[way.activation for way in ways],
            keep=[stage.keep for stage in stages],
        )

    def unsimulated_bytes(self, candidate: EvaluatedPartition) -> list[float]:
        """Bytes of every rank beside what `simulate` counts: what is there always, and what recomputation brings back."""
        stages = self.stage_costs(candidate.starts)
        return [
            sum(self.static_bytes(rank, [stages[stage] for stage in home]))
            + max(way.transient_bytes for way in choice.policies)
            for rank, (home, choice) in enumerate(zip(self.timer.stages_of_rank, candidate.choices, strict=True))
        ]

    def improve(self, candidate: EvaluatedPartition, actions: int, random: Random) -> EvaluatedPartition:
        """The best that is found from `candidate` while so many actions are timed.

        Every step moves layers, or takes another choice. Where none is better it goes on from a few steps away, until that has
        been of no use several times.
        """
        best, useless, enough = candidate, 0, self.actions_timed + actions
        while self.actions_timed < enough and useless < len(best.starts):
            for starts, passed in self._neighbour_moves(candidate, random):
                tried = self.evaluate(starts, passed, candidate)
                if _sort_key(tried) < _sort_key(candidate) or self.actions_timed >= enough:
                    candidate = min(candidate, tried, key=_sort_key)  # the first of equals, which was timed
                    break
            else:
                useless = 0 if _sort_key(candidate) < _sort_key(best) else useless + 1
                best = candidate = min(best, candidate, key=_sort_key)
                for _ in range(RESTART_MOVES):
                    candidate = self.evaluate(*next(self._neighbour_moves(candidate, random)))
        return min(best, candidate, key=_sort_key)

    def _neighbour_moves(self, candidate: EvaluatedPartition, random: Random) -> Iterator[tuple[StageStarts, tuple[int, ...]]]:
        """Neighbours: layers from one stage for another, those between moved along; another choice."""
        stages, starts = len(candidate.starts), candidate.starts
        moves = [(giver, taker) for giver in range(stages) for taker in range(stages) if giver != taker]
        moves += [(stages, rank) for rank in range(len(candidate.skipped_choices))] * 2
        random.shuffle(moves)
        for giver, taker in moves:
            if giver == stages:
                passed = list(candidate.skipped_choices)
                passed[taker] = random.choice([each for each in range(4) if each != passed[taker]])
                yield starts, tuple(passed)
                continue
            low, high, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
            step *= random.choice((1, 1, 1, 2, 3))
            moved = (*starts[: low + 1], *(start + step for start in starts[low + 1 : high + 1]), *starts[high + 1 :])
            if all(one < other for one, other in pairwise((*moved, len(self.chain.layers)))):
                yield moved, candidate.skipped_choices
