"""V-Half and V-Min: two stages on each rank, down and back up, for about a half or a third of 1F1B's memory where P is large.

Both are made alike (Qi et al. 2024, arXiv 2405.15362). First every microbatch gets the same pattern of unit slots, six
slots after the one before, in which no two actions collide; each W gets the first free slot after its I. That is the
steady state. Then the ends are tightened: the actions before the first microbatch returns, and those after the last one
enters, move to the earliest free slot that raises no memory. Finally every rank runs its forwards and backwards in
the order of the slots as soon as they can run, and a W whenever none can.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from penstock.schedule.memory import ActivationSize, peaks_in_flight
from penstock.schedule.table import Action, Kind, dependencies

SLOTS_PER_MICROBATCH = 6  # unit slots of a microbatch on a rank: F, I, W of two stages
UNIT_SIZE = ActivationSize()  # one activation, from F to W

Slots = dict[int, Action]  # slot -> action, of one rank
Rows = tuple[tuple[Action, ...], ...]  # rank -> its actions, in order


def v_half(rank: int, ranks: int, microbatches: int) -> Sequence[Action]:
    """About half of 1F1B's memory where P is large, and a bubble between ZB-V's and V-Min's (Qi et al. 2024, arXiv 2405.15362).

    Any P, any M; rank r has the stages r and 2P-1-r. Slots of the first microbatch's F0, F1, I1, I0 on rank r, with
    o = 3 for even P, else 0: 2r, 3P-2-r, 3P+o+2r-1, 6P+o-2-r. floor((P+2)/2) microbatches in flight: 3 of 1F1B's 4 for P = 4.
    Bubble at F = I = W, in actions: 5 for P = 4, 17 for P = 8 (1F1B: 18 and 42 of the same unit).
    """
    late = 0 if ranks % 2 else 3
    first_slots = [(2 * r, 3 * ranks - 2 - r, 3 * ranks + late + 2 * r - 1, 6 * ranks + late - 2 - r) for r in range(ranks)]
    return _rows_from_pattern(tuple(first_slots), microbatches)[rank]


def v_min(rank: int, ranks: int, microbatches: int) -> Sequence[Action]:
    """About a third of 1F1B's memory where P is large, the least of any V placement (Qi et al. 2024, arXiv 2405.15362).

    Any P, any M; rank r has the stages r and 2P-1-r. Slots of the first microbatch's F0, F1, I1, I0 on rank r, with
    o = 2 if 3 divides P, else 0: r, 2P-1-r, 2P+o+r, 4P+o-1-r. floor((P+4)/3) microbatches in flight: 2 of 1F1B's 4 for
    P = 4. Bubble at F = I = W, in actions: 11 for P = 4, 27 for P = 8; where F, I and W differ it grows with M.
    """
    late = 0 if ranks % 3 else 2
    first_slots = [(r, 2 * ranks - 1 - r, 2 * ranks + late + r, 4 * ranks + late - 1 - r) for r in range(ranks)]
    return _rows_from_pattern(tuple(first_slots), microbatches)[rank]


@lru_cache(maxsize=1)  # makes the rows of all ranks at once; the catalog asks for them rank by rank
def _rows_from_pattern(first_slots: tuple[tuple[int, int, int, int], ...], microbatches: int) -> Rows:
    slots = [_periodic_slots(rank, len(first_slots), offsets, microbatches) for rank, offsets in enumerate(first_slots)]
    bound = int(max(peaks_in_flight([_actions_by_slot(row) for row in slots])))
    steady = range(
        first_slots[0][3], SLOTS_PER_MICROBATCH * (microbatches - 1)
    )  # from the first microbatch's return to the last one's entry
    _move_to_earlier_slots(slots, steady, bound)
    return tuple(map(tuple, _run_in_order([_actions_by_slot(row) for row in slots], bound)))


def _run_in_order(rows: list[list[Action]], bound: int) -> list[list[Action]]:
    """Run the rows at F = I = W = 1 slot: F and I in order, as soon as they can run within `bound`; the oldest W otherwise.

    Returns the rows in the order in which they ran.
    """
    stages, end_slots = 2 * len(rows), dict[Action, int]()
    queues = [deque(action for action in row if action.kind is not Kind.W) for row in rows]
    weights = [deque[Action]() for _ in rows]  # the W of every I that ran
    in_flight = [0.0] * len(rows)
    ran: list[list[Action]] = [[] for _ in rows]

    slot = 0
    while any(queues):
        for rank, queue in enumerate(queues):
            fits = queue and in_flight[rank] + UNIT_SIZE.memory_change(queue[0].kind) <= bound
            if fits and _has_inputs(queue[0], end_slots, slot, stages):
                action = queue.popleft()
                end_slots[action] = slot + 1
            elif weights[rank]:
                action = weights[rank].popleft()
            else:
                continue
            if action.kind is Kind.I:
                weights[rank].append(action._replace(kind=Kind.W))
            in_flight[rank] += UNIT_SIZE.memory_change(action.kind)
            ran[rank].append(action)
        slot += 1
    return [[*row, *rest] for row, rest in zip(ran, weights, strict=True)]


def _has_inputs(action: Action, end_slots: dict[Action, int], slot: int, stages: int) -> bool:
    """Return whether everything that `action` waits for has ended when `slot` begins."""
    return all(any(end_slots.get(needed, slot + 1) <= slot for needed in options) for options in dependencies(action, stages))


def _periodic_slots(rank: int, ranks: int, offsets: tuple[int, int, int, int], microbatches: int) -> Slots:
    """Return the steady pattern of one rank: F0, F1, I1, I0 at `offsets`, the W of each I in the first free slot after it."""
    stages = rank, 2 * ranks - 1 - rank
    pattern = zip(offsets, (Kind.F, Kind.F, Kind.I, Kind.I), (stages[0], stages[1], stages[1], stages[0]), strict=True)
    slots = {at + SLOTS_PER_MICROBATCH * m: Action(kind, stage, m) for at, kind, stage in pattern for m in range(microbatches)}
    free = 0
    for at in sorted(at for at, action in slots.items() if action.kind is Kind.I):
        free = max(free, at + 1)
        while free in slots:
            free += 1
        slots[free] = slots[at]._replace(kind=Kind.W)
    return slots


def _actions_by_slot(slots: Slots) -> list[Action]:
    return [slots[at] for at in sorted(slots)]


def _move_to_earlier_slots(slots: list[Slots], steady: range, bound: int) -> None:
    """Move the actions outside `steady` to the earliest free slot that raises no rank's memory above `bound`."""
    at = {action: slot for row in slots for slot, action in row.items()}
    home = {action: rank for rank, row in enumerate(slots) for action in row.values()}
    stages = 2 * len(slots)
    in_flight = [0.0] * len(slots)  # activations on every rank before the current slot
    for action in sorted(at, key=lambda action: (at[action], home[action])):
        slot, rank = at[action], home[action]
        if slot not in steady:
            # Microbatches stay in order on a stage, because a buffer may carry state from one to the next.
            previous = action._replace(microbatch=action.microbatch - 1)
            needs = [
                at[needed] for options in [*dependencies(action, stages), (previous,)] for needed in options if needed in at
            ]
            target = _earliest_slot(slots[rank], action, max(needs, default=-1) + 1, slot, in_flight[rank], bound)
            slots[rank][target] = slots[rank].pop(slot)
            at[action] = target
        in_flight[rank] += UNIT_SIZE.memory_change(action.kind)


def _earliest_slot(row: Slots, action: Action, begin: int, slot: int, in_flight: float, bound: int) -> int:
    """Return the first free slot for `action` from `begin` on, else `slot`. `in_flight`: activations before `slot`."""
    if action.kind is not Kind.F:
        return next((target for target in range(begin, slot) if target not in row), slot)
    best = slot
    for target in range(slot - 1, begin - 1, -1):  # backwards: the forward is in flight from its new slot on
        if in_flight >= bound:
            break
        if target in row:
            in_flight -= UNIT_SIZE.memory_change(row[target].kind)
        else:
            best = target
    return best
