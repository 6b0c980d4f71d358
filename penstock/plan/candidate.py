"""One table and a cut of the layers for it, with the recomputation that makes it fit; and the way from there to better cuts."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random
from typing import NamedTuple

from penstock.plan.stages import ADAM, Held, Line, StageCost
from penstock.plan.timing import TimedTable
from penstock.schedule import Costs

Starts = tuple[int, ...]  # the first layer of every stage


class Terms(NamedTuple):
    """What a plan is made for, besides the layers."""

    limits: tuple[float, ...]  # bytes of every rank
    optimizer: float = ADAM  # bytes of its state for each byte of parameters
    send: float = 0.0  # seconds that a message takes
    bandwidth: float = float("inf")  # bytes a second over a border
    action: float = 0.0  # seconds of the engine for each action, besides its layers
    cores: float = float("inf")  # how many ranks can compute at once
    speeds: tuple[float, ...] = ()  # of every rank: 0.5 takes twice as long as the layers say; none: all take as long
    dp: int = 1  # replicas of the pipeline

    def reduced(self, parameters: float) -> float:
        """Seconds in which the replicas sum so many bytes of gradients, in a ring."""
        return 2 * (self.dp - 1) * (self.send + parameters / self.dp / self.bandwidth)

    def first(self, ranks: int) -> "Terms":
        """For so many of the ranks."""
        return self._replace(limits=self.limits[:ranks], speeds=self.speeds[:ranks])


class Choice(NamedTuple):
    """How one rank holds its stages' activations. The less the better: first the time, then the memory."""

    seconds: float  # more in the backwards, for one microbatch
    bytes: float  # at its fullest, all included
    over: float  # of them above the limit
    ways: tuple[Held, ...]  # of its stages


class Candidate(NamedTuple):
    """A cut of the layers for one table. The less the better: what is above the limits, the time, what is recomputed."""

    over: float  # bytes: the root of the squares' sum over the ranks, less where they are more even
    seconds: float
    starts: Starts
    passed: tuple[int, ...]  # of every rank, how many of the cheapest choices are passed over
    choices: tuple[Choice, ...]

    @property
    def again(self) -> float:
        """Seconds of recomputation, for one microbatch."""
        return sum([choice.seconds for choice in self.choices])


def _key(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.over, candidate.seconds, candidate.again


AWAY = 3  # steps, from which a descent begins again
OVERHEAD = 200  # actions: what a candidate costs besides, in the time of so many


class Cutting:
    """All cuts of one line of layers for one table."""

    def __init__(self, line: Line, table: TimedTable, terms: Terms) -> None:
        self.line, self.table, self.terms = line, table, terms
        self.spent = 0  # actions that were timed
        self._known: dict[tuple[int, ...], list[Choice]] = {}

    def at(self, starts: Starts, passed: tuple[int, ...] = (), worse: Candidate | None = None) -> Candidate:
        """The cut into stages that begin so. On every rank the cheapest choice that fits, after so many `passed` over.

        If it is no better than one that is `worse`, its seconds may be too few, but not fewer than that one's.
        """
        stages, ends = self.stages(starts), (*starts[1:], len(self.line.layers))
        passed = passed or (0,) * len(self.table.homes)
        choices = []
        for rank, home in enumerate(self.table.homes):
            key = rank, *(each for stage in home for each in (starts[stage], ends[stage]))
            if key not in self._known:
                self._known[key] = self._choices(rank, [stages[stage] for stage in home])
            choices.append(self._known[key][min(passed[rank], len(self._known[key]) - 1)])
        over = math.hypot(*(choice.over for choice in choices))
        costs = [cost for times in self._times(stages, choices) for cost in times]
        reduced = self.reduced(stages)
        candidate = Candidate(over, self.table.least(costs) + reduced, starts, passed, tuple(choices))
        self.spent += OVERHEAD
        if worse is not None and _key(candidate) >= _key(worse):
            return candidate
        self.spent += len(self.table.lines)
        return candidate._replace(seconds=self.table.seconds(costs, self._lags(stages), self.terms.cores) + reduced)

    def reduced(self, stages: Sequence[StageCost]) -> float:
        """Seconds in which the replicas sum their gradients, after the step."""
        parameters = (sum(stages[stage].parameters for stage in home) for home in self.table.homes)
        return self.terms.reduced(max(parameters))

    def stages(self, starts: Starts) -> list[StageCost]:
        """What the stages cost that begin so."""
        return [self.line.stage(start, end) for start, end in pairwise((*starts, len(self.line.layers)))]

    def _choices(self, rank: int, stages: Sequence[StageCost]) -> list[Choice]:
        """All ways that fit, the cheapest first; if none does, the one that takes the least memory."""
        always = sum(self.always(rank, stages))
        ways = [self._choice(rank, stages, ways, always) for ways in product(*(stage.ways for stage in stages))]
        return sorted((way for way in ways if not way.over), key=lambda way: way[:2]) or [min(ways, key=lambda way: way.over)]

    def _choice(self, rank: int, stages: Sequence[StageCost], ways: tuple[Held, ...], always: float) -> Choice:
        sizes = [size for stage, way in zip(stages, ways, strict=True) for size in (way.activation, stage.keep)]
        held = max(sum([size * count for size, count in zip(sizes, row, strict=True)]) for row in self.table.counts[rank])
        taken = always + held + max(way.reserve for way in ways)
        return Choice(sum(way.seconds for way in ways), taken, max(0.0, taken - self.terms.limits[rank]), ways)

    def always(self, rank: int, stages: Sequence[StageCost]) -> tuple[float, float]:
        """Bytes on `rank` all the time: parameters, gradients and optimizer state; buffers for what other ranks send."""
        around = (rank, *self.table.placement, rank)
        buffers = 0.0
        for stage, cost in zip(self.table.homes[rank], stages, strict=True):
            buffers += cost.input * (around[stage] != rank) + cost.output * (around[stage + 2] != rank)
        return (2 + self.terms.optimizer) * sum(cost.parameters for cost in stages), buffers

    def _times(self, stages: Sequence[StageCost], choices: Sequence[Choice]) -> tuple[list[float], ...]:
        """Of F, B, I and W, of every stage each."""
        action, times = self.terms.action, []
        speeds = self.terms.speeds or (1.0,) * len(choices)
        for stage, way, rank in zip(stages, self.ways(choices), self.table.placement, strict=True):
            inputs, weights = stage.backward_input + way.seconds, stage.backward_weight
            in_two = inputs + stage.split, weights
            times.append([(action + each) / speeds[rank] for each in (stage.forward, inputs + weights, *in_two)])
        return tuple(map(list, zip(*times, strict=True)))

    def _lags(self, stages: Sequence[StageCost]) -> list[float]:
        send, bandwidth = self.terms.send, self.terms.bandwidth
        crossed = [one != other for one, other in pairwise(self.table.placement)]
        return [*((send + stage.output / bandwidth) * apart for stage, apart in zip(stages, crossed, strict=False)), 0.0]

    def ways(self, choices: Sequence[Choice]) -> list[Held]:
        """Of every stage, how its activations are held."""
        found = {
            stage: way
            for home, each in zip(self.table.homes, choices, strict=True)
            for stage, way in zip(home, each.ways, strict=True)
        }
        return [found[stage] for stage in sorted(found)]

    def costs(self, candidate: Candidate) -> Costs:
        """What `simulate` is told of it, in seconds and bytes."""
        stages, ways = self.stages(candidate.starts), self.ways(candidate.choices)
        forward, full, inputs, weights = self._times(stages, candidate.choices)
        return Costs(
            forward,
            inputs,
            weights,
            backward=full,
            send=self.terms.send,
            size=[stage.output for stage in stages[:-1]],
            bandwidth=self.terms.bandwidth,
            act=[way.activation for way in ways],
            keep=[stage.keep for stage in stages],
        )

    def reserved(self, candidate: Candidate) -> list[float]:
        """Bytes of every rank beside what `simulate` counts: what is there always, and what recomputation brings back."""
        stages = self.stages(candidate.starts)
        return [
            sum(self.always(rank, [stages[stage] for stage in home])) + max(way.reserve for way in choice.ways)
            for rank, (home, choice) in enumerate(zip(self.table.homes, candidate.choices, strict=True))
        ]

    def descended(self, candidate: Candidate, actions: int, random: Random) -> Candidate:
        """The best that is found from `candidate` while so many actions are timed.

        Every step moves layers, or takes another choice. Where none is better it goes on from a few steps away, until that has
        been of no use several times.
        """
        best, useless, enough = candidate, 0, self.spent + actions
        while self.spent < enough and useless < len(best.starts):
            for starts, passed in self._moves(candidate, random):
                tried = self.at(starts, passed, candidate)
                if _key(tried) < _key(candidate) or self.spent >= enough:
                    candidate = min(candidate, tried, key=_key)  # the first of equals, which was timed
                    break
            else:
                useless = 0 if _key(candidate) < _key(best) else useless + 1
                best = candidate = min(best, candidate, key=_key)
                for _ in range(AWAY):
                    candidate = self.at(*next(self._moves(candidate, random)))
        return min(best, candidate, key=_key)

    def _moves(self, candidate: Candidate, random: Random) -> Iterator[tuple[Starts, tuple[int, ...]]]:
        """Neighbours: layers from one stage for another, those between moved along; another choice."""
        stages, starts = len(candidate.starts), candidate.starts
        moves = [(giver, taker) for giver in range(stages) for taker in range(stages) if giver != taker]
        moves += [(stages, rank) for rank in range(len(candidate.passed))] * 2
        random.shuffle(moves)
        for giver, taker in moves:
            if giver == stages:
                passed = list(candidate.passed)
                passed[taker] = random.choice([each for each in range(4) if each != passed[taker]])
                yield starts, tuple(passed)
                continue
            low, high, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
            step *= random.choice((1, 1, 1, 2, 3))
            moved = (*starts[: low + 1], *(start + step for start in starts[low + 1 : high + 1]), *starts[high + 1 :])
            if all(one < other for one, other in pairwise((*moved, len(self.line.layers)))):
                yield moved, candidate.passed
