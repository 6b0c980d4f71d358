"""Fill the bubble: zb-h1.

The backward has two halves: I computes the gradient that the previous rank waits for, W the gradients of the weights, which no
rank waits for. Defer W until the rank would be idle: "2I3" and, some time later, "2W3" replace "2B3".

Write `row(rank, ranks, microbatches)` for one stage on each rank.

Target: 27 units of time (F = I = W = 1; 1F1B takes 33) and at most 4 microbatches in flight, counted until their W, at P = 4,
M = 8.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.check_helpers import CheckPassed, build_table, check_targets, solution


@solution
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the rank's actions, in order."""
    forwards = iter([f"{rank}F{m}" for m in range(microbatches)])
    weights = iter([f"{rank}W{m}" for m in range(microbatches)])
    for _ in range(min(ranks - rank, microbatches)):
        yield next(forwards)
    for m in range(microbatches):
        yield f"{rank}I{m}"
        if m >= rank:
            yield next(weights)
        yield from [action for action in [next(forwards, None)] if action]
    yield from weights


HINTS = (
    "Begin as 1F1B, with one forward more: P - r of them. Then repeat: I, perhaps a W, the next F.",
    "Rank r leaves out the first r W: then every rank's last W run where 1F1B would wait.",
)
EXPLANATION = """Rank r runs r of its W at the end, where the gradients of the last microbatches arrive one by one and 1F1B
would wait. The bubble is (P-1)(F + I - W): 3 instead of 9. W's inputs stay in memory until it has run, so deferring more
costs memory. zb-h2 does that, and has no bubble by a rank's own span (Qi et al. 2023)."""


def check(answers: object) -> CheckPassed:
    """Check zb-h1's time and memory, for some P and M > P. Raises CheckFailed."""
    for ranks, microbatches in ((4, 8), (2, 4), (3, 6), (4, 5), (8, 16)):
        schedule = build_table("row", answers.row, ranks, microbatches)  # type: ignore[attr-defined]
        timeline = check_targets("zb-h1", 3 * microbatches + ranks - 1, ranks, schedule)
        if (ranks, microbatches) == (4, 8):
            shown_timeline = timeline
    return CheckPassed("27 units of time and 4 in flight at P = 4, M = 8", shown_timeline)
