"""Rows with actions moved past others. What can only run in one order stays in it."""

from typing import NamedTuple

from penstock.schedule.searching.machine import Machine


class Moved(NamedTuple):
    """A new row, and the first and the last place where it differs from the old one: behind its end if nothing could move."""

    row: list[int]
    first: int
    last: int


def moved(machine: Machine, row: list[int], index: int, places: int, actions: int) -> Moved:
    """The action at `index` and those after it of its code, `actions` in all, up to `places` later, or -`places` earlier.

    It stays in order with those of its code, and with those of its microbatch that it needs, if only by other ranks.
    """
    count, first_weight, apart = machine.microbatches, machine.first_weight, machine.first_back
    new, first, last = row[:], len(row), 0
    step = 1 if places > 0 else -1
    code = row[index] // count
    of_code = range(code * count, (code + 1) * count)
    for action in range(row[index], min(row[index] + actions, of_code.stop))[::-step]:
        chain = range(action % count, first_weight if action < first_weight else 0, count)
        here = at = new.index(action, index)
        furthest = max(0, min(here + places, len(new) - 1))
        while at != furthest:
            other = new[at + step]
            if other in of_code or other in chain or abs(other - action) == apart:
                break
            at += step
        if at != here:
            new.insert(at, new.pop(here))
            first, last = min(first, here, at), max(last, here, at)
    return Moved(new, first, last)
