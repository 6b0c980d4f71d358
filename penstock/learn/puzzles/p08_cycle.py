"""Find the cycle.

This table has every action once, but it deadlocks: ranks wait for each other in a cycle.

    rank 0 | 0F0 0B0 0F1 0B1
    rank 1 | 1F1 1F0 1B0 1B1

Write down the actions of the cycle, in any order, and a repaired table: each rank's actions in an order that ends. Every
action of the cycle waits for the next one, or stands behind the next one in its row.

Target: the four actions, and a table that `verify` accepts.
"""

from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.puzzles.check_helpers import (
    CheckFailed,
    CheckPassed,
    build_table,
    require_answer,
    solution,
)
from penstock.schedule import build

CIRCLE = ["0B0", "1B0", "1F1", "0F1"]  # solution


@solution
def repaired(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the row of rank 0 or 1: the same actions in an order that ends."""
    return ["0F0", "0B0", "0F1", "0B1"] if rank == 0 else ["1F0", "1B0", "1F1", "1B1"]


HINTS = (
    "Take an action that waits. What does it wait for: an action before it in its row, or one on the other rank? Continue "
    "there.",
    "Rank 1 begins with 1F1, which needs 0F1. Rank 0 must run 0B0 before that.",
)
EXPLANATION = """1F1 waits for 0F1, 0F1 stands behind 0B0, 0B0 waits for 1B0, and 1B0 stands behind 1F1. `verify` finds such
cycles in any table before it runs, and names the actions rank by rank. If sends wait, messages are part of the cycles too."""


def check(answers: object) -> CheckPassed:
    """Check the cycle, then the repaired table. Raises CheckFailed."""
    cycle = {"0B0", "0F1", "1F1", "1B0"}
    answer = set(require_answer(answers.CIRCLE, "CIRCLE"))  # type: ignore[attr-defined]
    if extra := sorted(answer - cycle - {"1F0"}):  # allowed: it stands between two of them
        raise CheckFailed(f"{', '.join(extra)} is not in the cycle: nothing in the cycle waits for it")
    if num_missing := len(cycle - answer):
        raise CheckFailed(f"{num_missing} more {'actions are' if num_missing > 1 else 'action is'} in the cycle")
    repaired = build_table("repaired", answers.repaired, 2, 2)  # type: ignore[attr-defined]
    if sorted(map(str, repaired.actions[0])) != sorted(map(str, build("gpipe", ranks=2, microbatches=2).actions[0])):
        raise CheckFailed("rank 0 has other actions than in the given table")
    return CheckPassed("the cycle is found, and the repaired table ends", simulate_equal_stages(repaired))
