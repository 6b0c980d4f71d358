"""Rows with actions moved past others. What can only run in one order stays in it."""

from typing import NamedTuple

from penstock.schedule.searching.machine import Machine


class Moved(NamedTuple):
    """A new row, and where it first differs from the old one: at its end if nothing could move."""

    row: list[int]
    first: int


def moved(machine: Machine, row: list[int], index: int, places: int, actions: int) -> Moved:
    """The action at `index` and those after it of its code, `actions` in all, up to `places` later, or -`places` earlier."""
    count, new, first = machine.microbatches, row[:], len(row)
    step = 1 if places > 0 else -1
    code = row[index] // count
    for action in range(row[index], min(row[index] + actions, (code + 1) * count))[::-step]:
        here = at = new.index(action, index)
        last = max(0, min(here + places, len(new) - 1))
        while at != last and not _in_order(machine, new[at + step], action):
            at += step
        if at != here:
            new.insert(at, new.pop(here))
            first = min(first, here, at)
    return Moved(new, first)


def _in_order(machine: Machine, one: int, other: int) -> bool:
    """Whether two actions of a rank are of one code, or of one microbatch and need each other, if only by other ranks."""
    count, first_weight = machine.microbatches, machine.first_weight
    if (one - other) % count:
        return one // count == other // count
    return (one < first_weight and other < first_weight) or abs(one - other) == machine.first_back
