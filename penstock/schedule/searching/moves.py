"""Rows with actions moved past others; actions of one code, and those of one stage and microbatch, stay in order."""

from typing import NamedTuple

from penstock.schedule.searching.machine import Machine


class Moved(NamedTuple):
    """A new row, and where it first differs from the old one: at its end if nothing could move."""

    row: list[int]
    first: int


def earlier(machine: Machine, row: list[int], index: int, places: int, actions: int) -> Moved:
    """The action at `index` and those after it of its code, `actions` in all, each up to `places` earlier."""
    count, apart = machine.microbatches, machine.first_back
    new, first = row[:], len(row)
    code = row[index] // count
    for action in range(row[index], min(row[index] + actions, (code + 1) * count)):
        index = at = new.index(action, index)
        least, needed = max(0, index - places), action - apart
        while at > least and new[at - 1] != needed and new[at - 1] // count != code:
            at -= 1
        if at < index:
            del new[index]
            new.insert(at, action)
            first = min(first, at)
    return Moved(new, first)


def later(machine: Machine, row: list[int], index: int, places: int, actions: int) -> Moved:
    """The action at `index` and those after it of its code, `actions` in all, each up to `places` later."""
    count, apart = machine.microbatches, machine.first_back
    new, first = row[:], len(row)
    code = row[index] // count
    for action in reversed(range(row[index], min(row[index] + actions, (code + 1) * count))):
        here = at = new.index(action, index)
        most, needing = min(len(new) - 1, here + places), action + apart
        while at < most and new[at + 1] != needing and new[at + 1] // count != code:
            at += 1
        if at > here:
            del new[here]
            new.insert(at, action)
            first = here
    return Moved(new, first)
