"""The order of slices.

A microbatch of long sequences can pass the ranks in K slices of its tokens, one after the other: "2F3.1" is the forward of
stage 2 for slice 1 of microbatch 3, "2B3.1" its backward. A token attends to the tokens before it. So on every rank the forward
of a slice needs that of the previous slice, and its backward needs the backward of the next slice.

Write `row(rank, ranks, microbatches, slices)` for one stage on each rank. A slice takes a K-th of its microbatch's time (F = 1,
B = 2) and memory.

Target: 26.25 units of time (1F1B takes 33) and 1.75 microbatches in flight (1F1B has 4) at P = 4, M = 8, K = 4.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, build_table, check_targets, solution


@solution
def row(rank: int, ranks: int, microbatches: int, slices: int) -> Iterator[str]:
    """Yield the rank's actions, in order."""
    forwards = [f"{rank}F{m}.{k}" for m in range(microbatches) for k in range(slices)]
    backwards = [f"{rank}B{m}.{k}" for m in range(microbatches) for k in reversed(range(slices))]
    warmup = min(ranks - 1 - rank + slices - 1, len(forwards))
    yield from forwards[:warmup]
    for number, backward in enumerate(backwards):
        yield from forwards[warmup + number : warmup + number + 1]
        yield backward


HINTS = (
    "The first backward is that of the last slice. So the last rank runs K - 1 forwards ahead, where 1F1B has none.",
    "Each rank before it runs one more ahead. Then alternate one forward and one backward, as in 1F1B.",
)
EXPLANATION = """This is Seq1F1B (Sun et al. 2024): 1F1B over M x K slices, with the backwards of a microbatch from its last
slice to its first. The next rank begins after one slice, so the bubble is (P-1) / K forwards and backwards of a microbatch.
Rank r holds P-r+K-1 slices, which are (P-r+K-1) / K microbatches. Slices have costs: each sends its own message, the last
ones attend to the most tokens, and kernels on few tokens are inefficient."""


def check(answers: object) -> CheckPassed:
    """Check Seq1F1B's time and memory, for some P, M and K. Raises CheckFailed."""
    for ranks, microbatches, slices in ((4, 8, 4), (2, 2, 2), (1, 2, 3), (3, 4, 5), (8, 8, 2), (4, 1, 4)):
        schedule = build_table("row", answers.row, ranks, microbatches, None, slices)  # type: ignore[attr-defined]
        if schedule.slices != slices:
            raise CheckFailed(f"your table has {schedule.slices} slices of a microbatch, it should have {slices}")
        in_flight = min((ranks + slices - 1) / slices, microbatches)
        timeline = check_targets("your table", 3 * (microbatches + (ranks - 1) / slices), in_flight, schedule)
        if (ranks, microbatches) == (4, 8):
            shown_timeline = timeline
    return CheckPassed(
        "26.25 units of time and 1.75 in flight at P = 4, M = 8, K = 4, and as good for all others tried", shown_timeline
    )
