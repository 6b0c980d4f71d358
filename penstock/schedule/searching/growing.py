"""Tables for many microbatches from tables for few: a stretch of every rank's row is repeated.

A stretch that holds every code equally often adds as much memory as it lets go. So it can follow itself any number of times
within the same limit, and the two ends of the table, which take the most searching, stay as they were found.
"""

from collections import Counter
from collections.abc import Iterator

from penstock.schedule.searching.machine import Machine, Rows, in_order
from penstock.schedule.searching.position import Position

EXTRA = 4  # microbatches beyond the number of ranks: enough for both ends and something in between
GROWTH = 1.5  # from one table to the next larger one
CUTS = 40  # how many times to begin a stretch at are tried, at most twice as many

Window = tuple[float, int]  # when a stretch begins, and at which place of the row


def sizes(ranks: int, microbatches: int) -> list[int]:
    """For how many microbatches tables are searched for, one after the other, up to `microbatches`."""
    found, size = list[int](), ranks + EXTRA
    while size * 1.2 < microbatches:
        found.append(size)
        size = round(size * GROWTH / 4) * 4 if size >= 8 else size + 4
    return [*found, microbatches]


def grown(few: Position, machine: Machine) -> Iterator[Rows]:
    """Rows for `machine` from those of `few`, with every W in them, by stretches that begin at about the same time."""
    more = machine.microbatches - few.machine.microbatches
    for period in range(1, min(more, few.machine.microbatches) + 1):
        if more % period == 0:
            yield from _grown(few, machine, period)


def _grown(few: Position, machine: Machine, period: int) -> Iterator[Rows]:
    count = few.machine.microbatches
    copies = (machine.microbatches - count) // period
    codes = [[action // count for action in row] for row in few.rows]
    windows = [list(_windows(few, rank, row, period)) for rank, row in enumerate(codes)]
    if not all(windows):
        return
    seen, times = set[tuple[int, ...]](), sorted({time for each in windows for time, _ in each})
    for time in times[:: max(1, len(times) // CUTS)]:
        places = tuple(min(each, key=lambda window: abs(window[0] - time))[1] for each in windows)
        if places not in seen:
            seen.add(places)
            yield [_repeated(machine, row, at, period, copies) for row, at in zip(codes, places, strict=True)]


def _windows(few: Position, rank: int, codes: list[int], period: int) -> Iterator[Window]:
    """The stretches of a rank's row that hold each of its codes `period` times."""
    width = period * len(set(codes))
    for at in range(len(codes) - width + 1):
        if set(Counter(codes[at : at + width]).values()) == {period}:
            yield few.trace[rank][at + 1][0], at


def _repeated(machine: Machine, codes: list[int], at: int, period: int, copies: int) -> list[int]:
    end = at + period * len(set(codes))
    return in_order(codes[:end] + codes[at:end] * copies + codes[end:], machine.microbatches)
