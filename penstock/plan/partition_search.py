"""Search for the partition of a model's layers into stages, and the recomputation, that make one table fast and fitting."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product
from random import Random
from typing import NamedTuple

from penstock.plan.model_profile import waiting_gradient_bytes
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import ADAM_STATE_RATIO, ActivationPolicy, LayerChain, StageCost
from penstock.timing.costs import Costs

StageStarts = tuple[int, ...]  # the first layer of every stage

RESTART_MOVES = 3  # random moves from a local optimum, before the descent begins again
EVALUATION_OVERHEAD_ACTIONS = 200  # the cost of an evaluation besides timing it, counted in actions


class Limits(NamedTuple):
    """The machine that a plan is made for: memory, links, cores. `plan` has the same arguments."""

    memory_bytes: tuple[float, ...]  # of every rank
    optimizer: float = ADAM_STATE_RATIO  # bytes of optimizer state for each byte of parameters
    send: float = 0.0  # seconds of a message, besides its bytes
    bandwidth: float = float("inf")  # bytes a second over a border between stages
    action: float = 0.0  # seconds of the engine for each action, besides its layers
    cores: float = float("inf")  # ranks that can compute at once
    speeds: tuple[float, ...] = ()  # of every rank: 0.5 takes twice as long as the layers say; empty: all are 1
    dp: int = 1  # replicas of the pipeline

    def gradient_reduce_seconds(self, parameter_bytes: float) -> float:
        """Return the seconds in which the replicas sum gradients of this size, in a ring."""
        return 2 * (self.dp - 1) * (self.send + parameter_bytes / self.dp / self.bandwidth)

    def for_first_ranks(self, num_ranks: int) -> "Limits":
        """Return the limits of the first `num_ranks` ranks."""
        return self._replace(memory_bytes=self.memory_bytes[:num_ranks], speeds=self.speeds[:num_ranks])


class RankChoice(NamedTuple):
    """An activation policy for each stage of a rank, and their cost. Sorted by time, then by memory."""

    recompute_seconds: float  # in the backwards, for one microbatch
    peak_bytes: float  # all memory of the rank
    excess_bytes: float  # of the peak above the limit
    policies: tuple[ActivationPolicy, ...]  # of its stages


class EvaluatedPartition(NamedTuple):
    """A partition into stages for one table, and its cost. Sorted by excess memory, then by time."""

    excess_bytes: float  # above the limits: the root of the sum of the ranks' squares, so less where ranks are more even
    seconds: float
    starts: StageStarts
    skipped_choices: tuple[int, ...]  # for every rank, how many of its cheapest choices are skipped
    choices: tuple[RankChoice, ...]

    @property
    def recompute_seconds(self) -> float:
        """Seconds of recomputation on all ranks, for one microbatch."""
        return sum([choice.recompute_seconds for choice in self.choices])


def _sort_key(partition: EvaluatedPartition) -> tuple[float, float, float]:
    return partition.excess_bytes, partition.seconds, partition.recompute_seconds


class PartitionSearch:
    """Evaluates partitions of one chain of layers for one table, and improves them."""

    def __init__(self, chain: LayerChain, timer: ScheduleTimer, limits: Limits) -> None:
        self.chain, self.timer, self.limits = chain, timer, limits
        self.actions_timed = 0
        self._choices_cache: dict[tuple[int, ...], list[RankChoice]] = {}

    def evaluate(
        self, starts: StageStarts, skipped_choices: tuple[int, ...] = (), baseline: EvaluatedPartition | None = None
    ) -> EvaluatedPartition:
        """Evaluate the partition `starts`, using on each rank the cheapest policies that fit after those skipped.

        If it cannot be better than `baseline`, its `seconds` may be a lower bound: then it is not timed.
        """
        stages = self.stage_costs(starts)
        skipped_choices = skipped_choices or (0,) * len(self.timer.stages_of_rank)

        choices = []
        for rank in range(len(self.timer.stages_of_rank)):
            possible = self._cached_rank_choices(rank, starts, stages)
            choices.append(possible[min(skipped_choices[rank], len(possible) - 1)])

        excess_bytes = math.hypot(*(choice.excess_bytes for choice in choices))
        costs = [seconds for kind in self._action_times(stages, choices) for seconds in kind]
        reduce_seconds = self.max_gradient_reduce_seconds(stages)

        lower_bound = self.timer.makespan_lower_bound(costs) + reduce_seconds
        partition = EvaluatedPartition(excess_bytes, lower_bound, starts, skipped_choices, tuple(choices))
        self.actions_timed += EVALUATION_OVERHEAD_ACTIONS
        if baseline is not None and _sort_key(partition) >= _sort_key(baseline):
            return partition

        self.actions_timed += len(self.timer.operations)
        makespan = self.timer.makespan(costs, self._message_delays(stages), self.limits.cores)
        return partition._replace(seconds=makespan + reduce_seconds)

    def stage_costs(self, starts: StageStarts) -> list[StageCost]:
        """Return the costs of the stages of a partition."""
        return [self.chain.stage_cost(start, end) for start, end in pairwise((*starts, len(self.chain.layers)))]

    def max_gradient_reduce_seconds(self, stages: Sequence[StageCost]) -> float:
        """Return the seconds after a step in which the replicas sum their gradients: those of the fullest rank."""
        parameter_bytes = (sum(stages[stage].parameters for stage in owned) for owned in self.timer.stages_of_rank)
        return self.limits.gradient_reduce_seconds(max(parameter_bytes))

    def simulation_costs(self, partition: EvaluatedPartition) -> Costs:
        """Return the costs of a partition for `simulate`, in seconds and bytes."""
        stages, policies = self.stage_costs(partition.starts), self.stage_policies(partition.choices)
        forward, full_backward, backward_input, backward_weight = self._action_times(stages, partition.choices)
        return Costs(
            forward,
            backward_input,
            backward_weight,
            backward=full_backward,
            send=self.limits.send,
            size=[stage.output for stage in stages[:-1]],
            bandwidth=self.limits.bandwidth,
            act=list(map(self._activation_bytes, stages, policies)),
            keep=[stage.keep for stage in stages],
            teacher_output=self.chain.teacher_output,
        )

    # -- activations and memory -------------------------------------------------------------------------------------------

    def stage_policies(self, choices: Sequence[RankChoice]) -> list[ActivationPolicy]:
        """Return the activation policy of every stage."""
        policy_of_stage = {
            stage: policy
            for owned, choice in zip(self.timer.stages_of_rank, choices, strict=True)
            for stage, policy in zip(owned, choice.policies, strict=True)
        }
        return [policy_of_stage[stage] for stage in sorted(policy_of_stage)]

    def static_bytes(self, rank: int, rank_stages: Sequence[StageCost]) -> tuple[float, float]:
        """Return the bytes that a rank always needs: (parameters, gradients and optimizer state; message buffers).

        Parameters that are not trained, as a teacher's, have neither gradients nor optimizer state.
        """
        rank_before_and_after = (rank, *self.timer.placement, rank)
        buffers = 0.0
        for stage, cost in zip(self.timer.stages_of_rank[rank], rank_stages, strict=True):
            buffers += cost.input * (rank_before_and_after[stage] != rank)
            buffers += cost.output * (rank_before_and_after[stage + 2] != rank)

        trained, frozen = (sum(getattr(cost, field) for cost in rank_stages) for field in ("parameters", "frozen"))
        return (2 + self.limits.optimizer) * trained + frozen, buffers

    def static_and_transient_bytes(self, partition: EvaluatedPartition) -> list[float]:
        """Return each rank's bytes that `simulate` does not count: static ones, and activations while they are recomputed."""
        stages = self.stage_costs(partition.starts)
        return [
            sum(self.static_bytes(rank, [stages[stage] for stage in owned]))
            + max(policy.transient_bytes for policy in choice.policies)
            for rank, (owned, choice) in enumerate(zip(self.timer.stages_of_rank, partition.choices, strict=True))
        ]

    def _cached_rank_choices(self, rank: int, starts: StageStarts, stages: Sequence[StageCost]) -> list[RankChoice]:
        owned, ends = self.timer.stages_of_rank[rank], (*starts[1:], len(self.chain.layers))
        key = rank, *(border for stage in owned for border in (starts[stage], ends[stage]))
        if key not in self._choices_cache:
            self._choices_cache[key] = self._rank_choices(rank, [stages[stage] for stage in owned])
        return self._choices_cache[key]

    def _rank_choices(self, rank: int, rank_stages: Sequence[StageCost]) -> list[RankChoice]:
        """Return all choices of policies that fit, the cheapest first; if none does, the one that takes the least memory."""
        static_bytes = sum(self.static_bytes(rank, rank_stages))
        choices = [
            self._evaluate_policies(rank, rank_stages, policies, static_bytes)
            for policies in product(*(stage.policies for stage in rank_stages))
        ]
        fitting = sorted((choice for choice in choices if not choice.excess_bytes), key=lambda choice: choice[:2])
        return fitting or [min(choices, key=lambda choice: choice.excess_bytes)]

    def _evaluate_policies(
        self, rank: int, rank_stages: Sequence[StageCost], policies: tuple[ActivationPolicy, ...], static_bytes: float
    ) -> RankChoice:
        sizes = [
            size
            for stage, policy in zip(rank_stages, policies, strict=True)
            for size in (self._activation_bytes(stage, policy), stage.keep)
        ] + [self.chain.teacher_output]
        activation_bytes = max(
            sum([size * count for size, count in zip(sizes, counts, strict=True)]) for counts in self.timer.peak_counts[rank]
        )
        peak_bytes = static_bytes + activation_bytes + max(policy.transient_bytes for policy in policies)

        excess_bytes = max(0.0, peak_bytes - self.limits.memory_bytes[rank])
        return RankChoice(sum(policy.recompute_seconds for policy in policies), peak_bytes, excess_bytes, policies)

    def _activation_bytes(self, stage: StageCost, policy: ActivationPolicy) -> float:
        """Return the bytes of a microbatch in flight, with the gradients that its last slice leaves to the earlier ones."""
        return policy.activation + waiting_gradient_bytes(stage.keys_and_values, self.timer.slices)

    # -- times ------------------------------------------------------------------------------------------------------------

    def _action_times(self, stages: Sequence[StageCost], choices: Sequence[RankChoice]) -> tuple[list[float], ...]:
        """Return the seconds of F, B, I and W, each a list by stage."""
        overhead, times = self.limits.action * self.timer.slices, []
        speeds = self.limits.speeds or (1.0,) * len(choices)
        for stage, policy, rank in zip(stages, self.stage_policies(choices), self.timer.placement, strict=True):
            backward_input = stage.backward_input + policy.recompute_seconds
            full_backward = backward_input + stage.backward_weight
            kinds = (stage.forward, full_backward, backward_input + stage.split, stage.backward_weight)
            times.append([(overhead + seconds) / speeds[rank] for seconds in kinds])
        return tuple(map(list, zip(*times, strict=True)))

    def _message_delays(self, stages: Sequence[StageCost]) -> list[float]:
        """Return the seconds of a message over each border between stages; and a 0, for no border."""
        send, bandwidth = self.limits.send, self.limits.bandwidth * self.timer.slices  # each slice sends its share of the bytes
        return [*(send + stage.output / bandwidth for stage in stages[:-1]), 0.0]

    # -- search -----------------------------------------------------------------------------------------------------------

    def improve(self, partition: EvaluatedPartition, action_budget: int, random: Random) -> EvaluatedPartition:
        """Return the best partition found from `partition` by local search, while `action_budget` actions are timed.

        Each move shifts layers between stages, or skips other choices of a rank. In a local optimum the search goes on from a
        few random moves away, until as many restarts as there are stages have found nothing better.
        """
        best, current = partition, partition
        useless_restarts, stop = 0, self.actions_timed + action_budget
        while self.actions_timed < stop and useless_restarts < len(best.starts):
            for starts, skipped_choices in self._neighbour_moves(current, random):
                neighbour = self.evaluate(starts, skipped_choices, current)
                if _sort_key(neighbour) < _sort_key(current) or self.actions_timed >= stop:
                    current = min(current, neighbour, key=_sort_key)  # the first of equals, which was timed
                    break
            else:  # no neighbour is better: a local optimum
                useless_restarts = 0 if _sort_key(current) < _sort_key(best) else useless_restarts + 1
                best = current = min(best, current, key=_sort_key)
                for _ in range(RESTART_MOVES):
                    current = self.evaluate(*next(self._neighbour_moves(current, random)))
        return min(best, current, key=_sort_key)

    def _neighbour_moves(self, partition: EvaluatedPartition, random: Random) -> Iterator[tuple[StageStarts, tuple[int, ...]]]:
        """Yield (starts, skipped choices) of the neighbours of `partition`, in random order.

        A move takes one to three layers from one stage and gives them to another, and shifts the stages between; or it changes
        how many of one rank's choices are skipped. Layers of a teacher stay behind the model's.
        """
        starts, num_model_stages = partition.starts, self.timer.schedule.num_trained_stages
        models = range(num_model_stages), range(num_model_stages, len(starts))
        layer_moves = [(giver, receiver) for stages in models for giver, receiver in permutations(stages, 2)]
        choice_moves = [(None, rank) for rank in range(len(partition.skipped_choices))] * 2
        moves: list[tuple[int | None, int]] = [*layer_moves, *choice_moves]
        random.shuffle(moves)

        for giver, receiver in moves:
            if giver is None:
                skipped = list(partition.skipped_choices)
                skipped[receiver] = random.choice([number for number in range(4) if number != skipped[receiver]])
                yield starts, tuple(skipped)
                continue

            low, high, shift = (giver, receiver, -1) if giver < receiver else (receiver, giver, 1)
            shift *= random.choice((1, 1, 1, 2, 3))
            shifted = (start + shift for start in starts[low + 1 : high + 1])
            moved = (*starts[: low + 1], *shifted, *starts[high + 1 :])
            if all(start < next_start for start, next_start in pairwise((*moved, len(self.chain.layers)))):
                yield moved, partition.skipped_choices


class Candidate(NamedTuple):
    """A table with its best known partition."""

    search: PartitionSearch
    best: EvaluatedPartition

    @property
    def penalized_seconds(self) -> float:
        """Seconds of a step, plus a penalty if memory does not fit, since the search may still make the candidate fit."""
        return self.best.seconds * (1 + 4 * self.best.excess_bytes / sum(self.search.limits.memory_bytes))

    @property
    def sort_key(self) -> tuple[float, ...]:
        """The sort key of plans: those that fit, then by time, recomputation, number of stages and memory."""
        best, memory = self.best, sum(choice.peak_bytes for choice in self.best.choices)
        return best.excess_bytes, float(f"{best.seconds:.6g}"), best.recompute_seconds, len(best.starts), memory

    def improve(self, action_budget: int, random: Random) -> "Candidate":
        """Return the candidate with a better partition, if one is found while `action_budget` actions are timed."""
        return self._replace(best=self.search.improve(self.best, action_budget, random))

    def with_best_partition_of(self, candidates: Sequence["Candidate"]) -> "Candidate":
        """Return this candidate with the partition of another table of as many stages, if that is better."""
        own_starts = self.best.starts
        partitions = {candidate.best.starts for candidate in candidates if len(candidate.best.starts) == len(own_starts)}
        evaluated = [self.best, *map(self.search.evaluate, partitions - {own_starts})]
        return self._replace(best=min(evaluated, key=lambda partition: (partition.excess_bytes, partition.seconds)))
