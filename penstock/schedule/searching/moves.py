"""Rows with actions moved past others, and which to move where rows would stop. What can only run in one order stays in it."""

from typing import NamedTuple

from penstock.schedule.searching.machine import INFINITE, After, Machine, Rows, Slots


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


def soonest(machine: Machine, rows: Rows, put_off: Rows, nexts: list[int], lasts: list[After], there: Slots) -> tuple[int, int]:
    """Rank and place of what can begin first of what stands behind `nexts`, where no rank can go on; (-1, -1): nothing can.

    A rank cannot go on if its next F does not fit, or if ranks wait for each other in a circle. `lasts`: after what they ran.
    """
    count, change, best = machine.microbatches, machine.change, (INFINITE, False, -1, -1)
    for rank, (row, first, (time, held, _, done, made)) in enumerate(zip(rows, nexts, lasts, strict=True)):
        freed = sum(change[each] for each in put_off[rank][done:made])
        of_code = {action // count: index for index, action in reversed([*enumerate(row)][first:])}  # the first of each
        for code, index in of_code.items():
            action = row[index]
            when = there[action]
            if index == first or when < 0.0 or any(there[slot] < 0.0 for slot in machine.also_needs[action]):
                continue  # the first is what does not fit
            if action >= machine.first_weight and action - machine.first_back in row[first:index]:
                continue
            later = machine.later[code] if action < machine.first_back else 0.0
            if change[action] > 0.0 and held + freed + change[action] + later > machine.limits[rank]:
                continue
            best = min(best, (max(when, time), action < machine.first_back, rank, index))
    return best[2:]
