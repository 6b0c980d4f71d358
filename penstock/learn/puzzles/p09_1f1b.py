"""1F1B as a table.

GPipe holds all M microbatches in flight. 1F1B has the same bubble and holds P at most: each rank runs as many forwards as
there are ranks behind it, then one forward and one backward in turn, then the backwards that are left.

Write `row(rank, ranks, microbatches)`: what the rank does, in order: "2F3" is the forward of stage 2 for microbatch 3,
"2B3" its backward. There is one stage on each rank, with the rank's number. Any number of microbatches must work.

Target: at P = 4, M = 8: 33 steps, and 4 microbatches in flight.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.judge import Passed, meets, table, yours


@yours
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """What the rank does, in order."""
    ahead = min(ranks - 1 - rank, microbatches)
    for microbatch in range(ahead):
        yield f"{rank}F{microbatch}"
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield f"{rank}F{ahead + microbatch}"
        yield f"{rank}B{microbatch}"


HINTS = (
    "The last rank needs no forward ahead: it can begin the backward of microbatch 0 right after its forward. The one"
    " before it needs one.",
    "Then for each backward: a forward first, if there is one left.",
)
EXPLANATION = """Rank r runs P-1-r forwards ahead. From then on every backward frees what a forward takes, so it holds P-r
microbatches and never more. The bubble is GPipe's, (P-1) of M+P-1: only the order has changed."""


def check(answers: object) -> Passed:
    """Every P and M of a grid; GPipe's time, and P - r in flight."""
    for ranks in (4, 1, 2, 3, 5, 8):
        for microbatches in (8, 1, 2, 3, 4, 12):
            schedule = table("row", answers.row, ranks, microbatches)  # type: ignore[attr-defined]
            picture = meets("1F1B", 3 * (microbatches + ranks - 1), min(ranks, microbatches), schedule)
            if (ranks, microbatches) == (4, 8):
                timeline = picture
    return Passed("33 steps and 4 in flight at P = 4, M = 8, and as good for all others tried", timeline)
