"""Two microbatches of memory.

A device has memory for the activations of 2 microbatches. On P = 4 ranks 1F1B needs 4. Stages may lie in a V (stages r and 7-r
on rank r); each holds half a microbatch.

Write `row(rank, ranks, microbatches)`: a table with two stages on each rank, in a V, with at most 2 microbatches in flight.

Target: at most 2 in flight and at most 32 units of time at P = 4, M = 8, if F, I and W of a stage take half a unit each. (1F1B
takes 33, with 4 in flight.)
"""

from collections.abc import Iterator

from penstock.learn.puzzles.check_helpers import CheckPassed, build_table, check_targets, solution


@solution
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the rank's actions, in order. Its stages are `rank` and `2 * ranks - 1 - rank`."""
    down, up, delay = rank, 2 * ranks - 1 - rank, 0 if ranks % 3 else 2
    first_slots = {f"{down}F": down, f"{up}F": up, f"{up}I": 2 * ranks + delay + rank, f"{down}I": 4 * ranks + delay - 1 - rank}
    actions = {slot + 6 * m: f"{name}{m}" for name, slot in first_slots.items() for m in range(microbatches)}
    free = 0
    for slot in sorted(slot for slot, action in actions.items() if "I" in action):
        free = max(free, slot + 1)
        while free in actions:
            free += 1
        actions[free] = actions[slot].replace("I", "W")
    yield from (actions[slot] for slot in sorted(actions))


HINTS = (
    "Count in half units. Let every microbatch run the same pattern of 6 actions on each rank, 6 half units after the "
    "previous microbatch.",
    "If a microbatch is back after 12 half units, two are under way at any time. Run the forward down and back up without a"
    " pause, and the backward too.",
    "v-min's slots for P = 4: F of stage r at r, F of stage 7-r at 7-r, I of stage 7-r at 8+r, I of stage r at 15-r; each W"
    " in the next free slot.",
)
EXPLANATION = """This is V-Min (Qi et al. 2024): a periodic pattern in which a microbatch comes back as early as possible.
Its memory is floor((P+4)/3) microbatches. The beginning and end can be made shorter: the catalog's v-min takes 29.5 units,
and no table in a V with that memory takes fewer."""


def check(answers: object) -> CheckPassed:
    """Check memory and time. Raises CheckFailed."""
    schedule = build_table("row", answers.row, 4, 8, "V")  # type: ignore[attr-defined]
    return CheckPassed("2 microbatches in flight at P = 4, M = 8", check_targets("the table", 32, 2, schedule))
