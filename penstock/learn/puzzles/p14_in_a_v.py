"""Down and back up: a V.

Give rank r the stages r and 2P-1-r: the last stage stands beside the first, so rank 0 has the loss, and its gradient at
once. Write a table for P = 2 ranks with M = 4 microbatches: stages 0 and 3 on rank 0, 1 and 2 on rank 1. Every stage takes
half of what a rank's whole did: F, I and W half a step each.

Write `row(rank, ranks, microbatches)` by hand, or by a rule; it is asked for 2 ranks and 4 microbatches only.

Target: at most 13 steps (1F1B takes 15), with no more than 2.5 microbatches in flight (a stage's activation is half of
one).
"""

from penstock.learn.puzzles.judge import Passed, meets, table, yours


@yours
def row(rank: int, ranks: int, microbatches: int) -> list[str]:
    """What the rank does, in order."""
    rows = (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    )
    return rows[rank].split()


HINTS = (
    "A microbatch goes 0F, 1F, 2F, 3F, 3I, 2I, 1I, 0I: rank 1 has two actions of it in a row, and rank 0 three.",
    "`penstock show zb-v --ranks 2 --microbatches 4` draws one that takes 12.5 steps.",
)
EXPLANATION = """This is zb-v, which takes 12.5. In a V the backward begins where the forward began, so activations live
shortest on the rank that has them longest, and every rank holds the same. zb-v needs P microbatches, v-half about half of
that and v-min about a third, where P is large."""


def check(answers: object) -> Passed:
    """Any table of the placement that meets the target."""
    schedule = table("row", answers.row, 2, 4, "V")  # type: ignore[attr-defined]
    return Passed("13 steps or fewer, in a V", meets("the V", 13, 2.5, schedule))
