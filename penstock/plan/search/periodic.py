"""Rows that repeat for every microbatch, one period after the microbatch before it.

This is modulo scheduling, which compilers use for loops: on every rank each code has a start offset within the period, and no
two overlap, modulo the period. A stage's activation is held from its F to its W. Codes are placed in the order of the chain,
each as soon as possible after its own wait. The waits are changed at random until the memory suffices;
then the period shrinks.
"""

import math
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.plan.search.problem import INFINITE, TOLERANCE, Rows, SearchProblem

FIRST_PERIOD_FACTOR = 2.0  # the first period, in those of the rank with most work if it never idles
NEXT_PERIOD_FACTOR = 0.985  # each further period, in those of the one before
MAX_SCHEDULES = 4  # returned: those of the shortest periods
AVERAGE_MEMORY_WEIGHT = 0.3  # of the average memory in the objective; memory above the limit has 1
TEMPERATURE = 0.03  # a change that raises the objective by this much is accepted with probability 1 / e

StartOffsets = list[float]  # code -> when it starts for microbatch 0, in periods


class _MemorySpan(NamedTuple):
    begin: float
    lasts: float
    amount: float


def find_modulo_schedules(problem: SearchProblem, rng: random.Random, tries: int) -> Iterator[StartOffsets]:
    """Yield the start offsets of the shortest periods found in `tries` random changes, the shortest period first."""
    min_period = max(problem.work) / problem.passes
    period = FIRST_PERIOD_FACTOR * min_period
    waits, needed, schedules = [0.0] * len(problem.times), INFINITE, list[StartOffsets]()
    for _ in range(tries if period else 0):
        new_waits = waits[:]
        code = int(rng.random() * 2 * problem.num_stages)
        new_waits[code] = 0.0 if rng.random() < 0.5 else rng.random() * rng.random() * period
        starts = _start_times(problem, period, new_waits)
        memory, fits = _memory_objective(problem, period, starts)
        if memory <= needed - TEMPERATURE * math.log(1.0 - rng.random()):
            waits, needed = new_waits, memory
        if fits:
            schedules.append([start / period for start in starts])
            period, needed = period * NEXT_PERIOD_FACTOR, INFINITE
            if period < min_period:
                break
    yield from reversed(schedules[-MAX_SCHEDULES:])


def _start_times(problem: SearchProblem, period: float, waits: list[float]) -> list[float]:
    """Return each code's start for microbatch 0: after its wait, with its rank free in every period; empty if none is."""
    count, arrival_times, starts = problem.passes, problem.initial_slot_times[:], [0.0] * len(problem.times)
    busy_times: list[list[tuple[float, float]]] = [[] for _ in range(problem.ranks)]
    for code in problem.codes:
        action, length = code * count, problem.times[code]
        ready_time = max([arrival_times[action], *(arrival_times[slot] for slot in problem.also_needs[action])])
        if action >= problem.first_weight:
            inputs = code - problem.num_stages
            ready_time = starts[inputs] + problem.times[inputs]
        busy = busy_times[problem.placement[code % problem.num_stages]]
        start = _first_free_time(busy, ready_time + waits[code], length, period)
        if start == INFINITE:
            return []
        starts[code] = start
        if length > TOLERANCE * period:
            busy.append((start, length))
        for slot, _, transmission, latency in problem.sends[action]:
            arrival_times[slot] = start + length + transmission + latency
    return starts


def _first_free_time(busy: list[tuple[float, float]], ready_time: float, length: float, period: float) -> float:
    """Return the first time from `ready_time` on when `length` fits between `busy` in every period; infinite if never."""
    start, moved, nearly = ready_time, True, TOLERANCE * period
    while moved:
        moved = False
        for begin, lasts in busy:
            since, until = (start - begin) % period, (begin - start) % period
            if since < lasts - nearly:
                start, moved = start + lasts - since, True
            elif until < length - nearly:
                start, moved = start + until + lasts, True
        if start > ready_time + period:
            return INFINITE
    return start


def _memory_objective(problem: SearchProblem, period: float, starts: list[float]) -> tuple[float, bool]:
    """Return the memory that the codes hold in a period, as a number to minimise, and whether it fits on every rank."""
    if not starts:
        return INFINITE, False
    measure, fits = 0.0, True
    for rank, limit in enumerate(problem.limits):
        spans = list(_memory_spans(problem, rank, starts))
        peak = max(_memory_at(spans, starts[stage], period) for stage in problem.stages_of[rank])
        area = sum(span.lasts * span.amount for span in spans) / period
        fits = fits and peak <= limit
        measure += (max(0.0, peak - limit) + AVERAGE_MEMORY_WEIGHT * area) / (limit or 1.0)
    return measure, fits


def _memory_spans(problem: SearchProblem, rank: int, starts: list[float]) -> Iterator[_MemorySpan]:
    """Yield what `rank` holds of a microbatch: all of a stage's activation until its I has ended, then what W needs."""
    stages = problem.num_stages
    for stage in problem.stages_of[rank]:
        begin, (act, keep) = starts[stage], problem.sizes[stage]
        inputs_end = starts[stages + stage] + problem.times[stages + stage]
        yield _MemorySpan(begin, inputs_end - begin, act)
        if not problem.full_backwards:
            yield _MemorySpan(inputs_end, starts[2 * stages + stage] + problem.times[2 * stages + stage] - inputs_end, keep)


def _memory_at(spans: Iterable[_MemorySpan], time: float, period: float) -> float:
    """Return the memory held at `time` if every span is repeated in every period."""
    return sum(amount * (lasts // period + ((time - begin) % period < lasts % period)) for begin, lasts, amount in spans)


def unroll_modulo_schedule(problem: SearchProblem, start_offsets: StartOffsets) -> Rows:
    """Return the F and I of every pass in the order of their starts: one period after the pass before.

    The first backward of a microbatch waits for the forwards of all its K slices, so backwards begin K - 1 periods later.
    """
    rows: Rows = []
    for rank in range(problem.ranks):
        starts = [
            (start_offsets[code] + n + (problem.slices - 1) * (code >= problem.num_stages), code * problem.passes + n)
            for code in problem.codes_of_rank(rank)
            for n in range(problem.passes)
        ]
        rows.append([action for _, action in sorted(starts)])
    return rows
