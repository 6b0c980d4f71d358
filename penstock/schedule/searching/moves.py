"""Rows with actions moved past others. What can only run in one order stays in it."""

from typing import NamedTuple

from penstock.schedule.searching.machine import Machine


class Moved(NamedTuple):
    """A new row, and the first and the last place where it differs from the old one: behind its end if nothing could move."""

    row: list[int]
    first: int
    last: int


def moved(machine: Machine, row: list[int], index: int, places: int, actions: int) -> Moved:
    """The action at `index` and those after it of its code, `actions` in all, up to `places` later, or -`places` earlier."""
    count, new, first, last = machine.microbatches, row[:], len(row), 0
    step, fixed = 1 if places > 0 else -1, machine.fixed
    code = row[index] // count
    for action in range(row[index], min(row[index] + actions, (code + 1) * count))[::-step]:
        here = at = new.index(action, index)
        furthest = max(0, min(here + places, len(new) - 1))
        while at != furthest and new[at + step] not in fixed[action]:
            at += step
        if at != here:
            new.insert(at, new.pop(here))
            first, last = min(first, here, at), max(last, here, at)
    return Moved(new, first, last)
