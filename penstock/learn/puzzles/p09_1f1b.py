"""1F1B as a table.

GPipe has all M microbatches in flight. 1F1B has the same bubble, and at most P in flight. Each rank first runs as many
forwards as there are ranks after it, then alternates one forward and one backward, then runs the remaining backwards.

Write `row(rank, ranks, microbatches)`: return or yield the rank's actions, in order. "2F3" is the forward of stage 2 for
microbatch 3, "2B3" its backward. Each rank has one stage, with the rank's number. Any number of microbatches must work.

Target: 33 units of time (F = 1, B = 2) and 4 microbatches in flight at P = 4, M = 8.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.check_helpers import CheckPassed, build_table, check_targets, solution


@solution
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the rank's actions, in order."""
    warmup = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warmup):
        yield f"{rank}F{microbatch}"
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield f"{rank}F{warmup + microbatch}"
        yield f"{rank}B{microbatch}"


HINTS = (
    "The last rank needs no forward ahead: it can run the backward of microbatch 0 right after its forward. The rank before"
    " it needs one.",
    "Then for each backward: first a forward, if one is left.",
)
EXPLANATION = """Rank r runs P-1-r forwards ahead. From then on every backward frees what a forward needs, so rank r never
holds more than P-r microbatches. The bubble is GPipe's, (P-1) of M+P-1: only the order has changed."""


def check(answers: object) -> CheckPassed:
    """Check GPipe's time, and min(P, M) in flight, on a grid of P and M. Raises CheckFailed."""
    for ranks in (4, 1, 2, 3, 5, 8):
        for microbatches in (8, 1, 2, 3, 4, 12):
            schedule = build_table("row", answers.row, ranks, microbatches)  # type: ignore[attr-defined]
            timeline = check_targets("1F1B", 3 * (microbatches + ranks - 1), min(ranks, microbatches), schedule)
            if (ranks, microbatches) == (4, 8):
                shown_timeline = timeline
    return CheckPassed(
        "33 units of time and 4 in flight at P = 4, M = 8, and as good for all other P and M tried", shown_timeline
    )
