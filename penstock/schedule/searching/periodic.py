"""Rows that repeat themselves: every microbatch goes the same way, one period after the microbatch before it.

A wheel turns once in a period; on it every rank has a place for each of its codes, and no two overlap. What stays in memory is
how long the wheel turns from a stage's F to its W. Compilers find such an order for loops (modulo scheduling); here the wheel
is filled in the order of the chain, every code as soon as it can be after a wait of its own. The waits are changed at random
until the memory suffices; then the wheel is made smaller.
"""

import math
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.schedule.searching.problem import INFINITE, TOLERANCE, Rows, SearchProblem

LOOSE, SHRINK = 2.0, 0.985  # the first period, in those of a rank that never idles; each further one, in those before it
KEPT = 4  # of the shortest periods
AREA = 0.3  # what memory counts that is held without being too much
SHARP = 0.03  # by how much more a change may need that is taken with a probability of 1 / e

Turns = list[float]  # code -> when it begins for microbatch 0, in turns of the wheel


class _Span(NamedTuple):
    begin: float
    lasts: float
    amount: float


def find_modulo_schedules(machine: SearchProblem, dice: random.Random, tries: int) -> Iterator[Turns]:
    """Wheels of short periods for `machine`, found in `tries`, the shortest first."""
    least = max(machine.work) / machine.microbatches
    period = LOOSE * least
    waits, needed, found = [0.0] * len(machine.times), INFINITE, list[Turns]()
    for _ in range(tries if period else 0):
        tried = waits[:]
        code = int(dice.random() * 2 * machine.num_stages)
        tried[code] = 0.0 if dice.random() < 0.5 else dice.random() * dice.random() * period
        starts = _placed(machine, period, tried)
        memory, fits = _memory(machine, period, starts)
        if memory <= needed - SHARP * math.log(1.0 - dice.random()):
            waits, needed = tried, memory
        if fits:
            found.append([start / period for start in starts])
            period, needed = period * SHRINK, INFINITE
            if period < least:
                break
    yield from reversed(found[-KEPT:])


def _placed(machine: SearchProblem, period: float, waits: list[float]) -> list[float]:
    """When every code begins for microbatch 0: after its wait, where its rank is free in every period. Empty: it is not."""
    count, there, starts = machine.microbatches, machine.there[:], [0.0] * len(machine.times)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(machine.ranks)]
    for code in machine.order():
        action, length = code * count, machine.times[code]
        ready = max([there[action], *(there[slot] for slot in machine.also_needs[action])])
        if action >= machine.first_weight:
            inputs = code - machine.num_stages
            ready = starts[inputs] + machine.times[inputs]
        busy = taken[machine.placement[code % machine.num_stages]]
        start = _free(busy, ready + waits[code], length, period)
        if start == INFINITE:
            return []
        starts[code] = start
        if length > TOLERANCE * period:
            busy.append((start, length))
        for slot, _, transmission, latency in machine.sends[action]:
            there[slot] = start + length + transmission + latency
    return starts


def _free(busy: list[tuple[float, float]], ready: float, length: float, period: float) -> float:
    """The first time from `ready` on when none of `busy` runs for `length`, in any period; infinite if there is none."""
    start, moved, nearly = ready, True, TOLERANCE * period
    while moved:
        moved = False
        for begin, lasts in busy:
            since, until = (start - begin) % period, (begin - start) % period
            if since < lasts - nearly:
                start, moved = start + lasts - since, True
            elif until < length - nearly:
                start, moved = start + until + lasts, True
        if start > ready + period:
            return INFINITE
    return start


def _memory(machine: SearchProblem, period: float, starts: list[float]) -> tuple[float, bool]:
    """What the codes hold in a period, as a measure to make smaller, and whether every rank has room for it."""
    if not starts:
        return INFINITE, False
    measure, fits = 0.0, True
    for rank, limit in enumerate(machine.limits):
        spans = list(_spans(machine, rank, starts))
        peak = max(_held(spans, starts[stage], period) for stage in machine.stages_of[rank])
        area = sum(span.lasts * span.amount for span in spans) / period
        fits = fits and peak <= limit
        measure += (max(0.0, peak - limit) + AREA * area) / (limit or 1.0)
    return measure, fits


def _spans(machine: SearchProblem, rank: int, starts: list[float]) -> Iterator[_Span]:
    """What `rank` holds of a microbatch: all of a stage until its I has ended, then what W needs."""
    stages = machine.num_stages
    for stage in machine.stages_of[rank]:
        begin, (act, keep) = starts[stage], machine.sizes[stage]
        back = starts[stages + stage] + machine.times[stages + stage]
        yield _Span(begin, back - begin, act)
        if not machine.whole:
            yield _Span(back, starts[2 * stages + stage] + machine.times[2 * stages + stage] - back, keep)


def _held(spans: Iterable[_Span], time: float, period: float) -> float:
    """How much is held at `time` if every span is repeated in every period."""
    return sum(amount * (lasts // period + ((time - begin) % period < lasts % period)) for begin, lasts, amount in spans)


def unroll_modulo_schedule(machine: SearchProblem, turns: Turns) -> Rows:
    """The F and I of every microbatch in the order of their starts: `turns` of the wheel, and one more for each microbatch."""
    rows: Rows = []
    for stages in machine.stages_of:
        codes = [code for stage in stages for code in (stage, machine.num_stages + stage)]
        when = [(turns[code] + m, code * machine.microbatches + m) for code in codes for m in range(machine.microbatches)]
        rows.append([action for _, action in sorted(when)])
    return rows
