"""Two microbatches of memory.

A device holds the activations of 2 microbatches and no more. On P = 4 ranks 1F1B needs 4. Stages may lie in a V (stages r
and 7-r on rank r), which holds half a microbatch for each stage.

Write `row(rank, ranks, microbatches)`: a table with two stages on each rank in a V, that never has more than 2 in flight.

Target: P = 4, M = 8: at most 2 in flight, and at most 32 steps. (1F1B with 4 in flight takes 33.)
"""

from collections.abc import Iterator

from penstock.learn.puzzles.judge import Passed, meets, table, yours


@yours
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """What the rank does, in order; its stages are `rank` and `2 * ranks - 1 - rank`."""
    down, up, late = rank, 2 * ranks - 1 - rank, 0 if ranks % 3 else 2
    first_slots = {f"{down}F": down, f"{up}F": up, f"{up}I": 2 * ranks + late + rank, f"{down}I": 4 * ranks + late - 1 - rank}
    slots = {at + 6 * m: f"{action}{m}" for action, at in first_slots.items() for m in range(microbatches)}
    free = 0
    for at in sorted(at for at, action in slots.items() if "I" in action):
        free = max(free, at + 1)
        while free in slots:
            free += 1
        slots[free] = slots[at].replace("I", "W")
    yield from (slots[at] for at in sorted(slots))


HINTS = (
    "In half steps: let every microbatch run the same pattern of 6 actions on each rank, 6 half steps after the one before.",
    "If a microbatch is back after 12 half steps, there are two of them under way at any time. Forward r and 7-r: go "
    "down at once, back up at once; the backward the same way.",
    "v-min's slots for P = 4: F of stage r at r, of 7-r at 7-r, I of 7-r at 8+r, I of r at 15-r; each W in the first "
    "free slot after.",
)
EXPLANATION = """This is V-Min (Qi et al. 2024): a periodic pattern in which a microbatch comes back as soon as it can. Its
memory is floor((P+4)/3) microbatches. The ends can still be tightened: the catalogue's v-min takes 29.5 steps, and no table
in a V takes fewer with that memory."""


def check(answers: object) -> Passed:
    """The budget first, then the time."""
    schedule = table("row", answers.row, 4, 8, "V")  # type: ignore[attr-defined]
    return Passed("2 microbatches in flight at P = 4, M = 8", meets("the table", 32, 2, schedule))
