"""Fill the bubble: zb-h1.

The backward has two halves: I gives the gradient that the rank before waits for, W the weights' own, which nobody waits
for. Put W off until the rank would be idle: "2I3", and some time later "2W3", stand where "2B3" stood.

Write `row(rank, ranks, microbatches)` for one stage on each rank.

Target: at P = 4, M = 8: 27 steps (1F1B takes 33), with no more than 4 microbatches in flight, which W holds too.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.judge import Passed, meets, table, yours


@yours
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """What the rank does, in order."""
    forwards = iter([f"{rank}F{m}" for m in range(microbatches)])
    weights = iter([f"{rank}W{m}" for m in range(microbatches)])
    for _ in range(min(ranks - rank, microbatches)):
        yield next(forwards)
    for m in range(microbatches):
        yield f"{rank}I{m}"
        if m >= rank:
            yield next(weights)
        yield from [value for value in [next(forwards, None)] if value]
    yield from weights


HINTS = (
    "Begin as 1F1B, with one forward more: P - r of them. Then I, perhaps a W, the next F, again and again.",
    "Rank r leaves out W in the first r turns: so every rank's last W fall where 1F1B would wait.",
)
EXPLANATION = """Rank r puts r of its W off to the end, where the gradients of the last microbatches come in one by one and
1F1B would wait. The bubble is (P-1)(F + I - W): 3 instead of 9. What W needs stays in memory until it has run, so putting
off more costs memory: zb-h2 does, for a bubble of none by a rank's own span (Qi et al. 2023)."""


def check(answers: object) -> Passed:
    """The catalogue's steps and memory, where there are microbatches enough."""
    for ranks, microbatches in ((4, 8), (2, 4), (3, 6), (4, 5), (8, 16)):
        schedule = table("row", answers.row, ranks, microbatches)  # type: ignore[attr-defined]
        picture = meets("zb-h1", 3 * microbatches + ranks - 1, ranks, schedule)
        if (ranks, microbatches) == (4, 8):
            timeline = picture
    return Passed("27 steps and 4 in flight at P = 4, M = 8", timeline)
