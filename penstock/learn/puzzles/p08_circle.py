"""Find the circle.

This table is complete, but it does not end: somewhere ranks wait for each other in a circle.

    rank 0 | 0F0 0B0 0F1 0B1
    rank 1 | 1F1 1F0 1B0 1B1

Write down the actions of the circle, in any order, and a repaired table: the same actions in rows that end. An action is in
the circle if it waits for the next of it, or stands behind the next of it in its row.

Target: the four actions, and a table that is proved.
"""

from penstock.learn.puzzles.judge import Missed, Passed, table, timed, written, yours
from penstock.schedule import build

CIRCLE = ["0B0", "1B0", "1F1", "0F1"]  # yours


@yours
def repaired(rank: int, ranks: int, microbatches: int) -> list[str]:
    """The row of rank 0 or 1, with the same actions in an order that ends."""
    return ["0F0", "0B0", "0F1", "0B1"] if rank == 0 else ["1F0", "1B0", "1F1", "1B1"]


HINTS = (
    "Begin with an action that waits, and ask for what: for an action before it in its row, or for one on the other "
    "rank. Go on.",
    "Rank 1 begins with 1F1, which needs 0F1. Before that rank 0 wants to run 0B0.",
)
EXPLANATION = """1F1 waits for 0F1, 0F1 stands behind 0B0, 0B0 waits for 1B0, and 1B0 stands behind 1F1. `verify` finds
such circles in any table, before it runs, and names them rank by rank; with sends that wait, messages are part of them too."""


def check(answers: object) -> Passed:
    """The circle, then the repaired table."""
    circle = {"0B0", "0F1", "1F1", "1B0"}
    answer = set(written(answers.CIRCLE, "CIRCLE"))  # type: ignore[attr-defined]
    if extra := sorted(answer - circle - {"1F0"}):  # which stands between two of them
        raise Missed(f"{', '.join(extra)} is not in the circle: nothing in the circle waits for it")
    if num_missing := len(circle - answer):
        raise Missed(f"{num_missing} more {'actions are' if num_missing > 1 else 'action is'} in the circle")
    repaired = table("repaired", answers.repaired, 2, 2)  # type: ignore[attr-defined]
    if sorted(map(str, repaired.actions[0])) != sorted(map(str, build("gpipe", ranks=2, microbatches=2).actions[0])):
        raise Missed("rank 0 has other actions than before")
    return Passed("the circle is found, and the repaired table ends", timed(repaired))
