"""Down and back up: a V.

Give rank r the stages r and 2P-1-r. Then rank 0 has both the first and the last stage, so it computes the loss and starts the
backward itself. Write a table for P = 2 ranks and M = 4 microbatches: stages 0 and 3 on rank 0, 1 and 2 on rank 1. A stage has
half of a rank's layers, so its F, I and W take half a unit of time each.

Write `row(rank, ranks, microbatches)` by hand, or by a rule. It is called for 2 ranks and 4 microbatches only.

Target: at most 13 units of time (1F1B takes 15), and at most 2.5 microbatches in flight. (The activations of a stage count
half.)
"""

from penstock.learn.puzzles.check_helpers import CheckPassed, build_table, check_targets, solution


@solution
def row(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the rank's actions, in order."""
    rows = (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    )
    return rows[rank].split()


HINTS = (
    "A microbatch runs 0F, 1F, 2F, 3F, 3I, 2I, 1I, 0I: rank 1 has two actions of it in a row, and rank 0 three (3F, 3I, 3W).",
    "`penstock show zb-v --ranks 2 --microbatches 4` draws one that takes 12.5 units of time.",
)
EXPLANATION = """This is zb-v, which takes 12.5. In a V the backward begins on rank 0, where the forward began. Rank 0 has
the first stage, which holds its activations longest, and the last, which holds them shortest; so all ranks hold the same.
zb-v needs P microbatches in flight; for large P, v-half needs about half of that and v-min about a third."""


def check(answers: object) -> CheckPassed:
    """Accept any table of the V placement that meets the target. Raises CheckFailed."""
    schedule = build_table("row", answers.row, 2, 4, "V")  # type: ignore[attr-defined]
    return CheckPassed("13 units of time or fewer, in a V", check_targets("the V", 13, 2.5, schedule))
