"""Interleaved: smaller stages, a smaller bubble.

Give each rank two smaller stages instead of one: with P = 4, rank 0 has stages 0 and 4, rank 1 has 1 and 5, .. A microbatch
goes around twice, and filling the pipeline takes half as long. Microbatches pass in groups of P: the forwards of a rank are
microbatches 0 to P-1 on its first stage, then the same on its second, then P to 2P-1 on the first ..; the backwards are the
same with the second stage first. A rank runs (V-1) P + 2 (P-1-r) forwards ahead, then one forward and one backward in turn.

Write `row(rank, ranks, microbatches)` for V = 2 stages on each rank; microbatches are a multiple of the ranks.

Target: at P = 4, M = 8: 28.5 steps (1F1B takes 33), and 5.5 microbatches in flight.
"""

from collections.abc import Iterator

from penstock.learn.puzzles.judge import Passed, meets, table, timed, yours
from penstock.schedule import build


@yours
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """What the rank does, in order; its stages are `rank` and `ranks + rank`."""
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forwards = [f"{chunk * ranks + rank}F{m}" for group in groups for chunk in (0, 1) for m in group]
    backwards = [f"{chunk * ranks + rank}B{m}" for group in groups for chunk in (1, 0) for m in group]
    ahead = min(ranks + 2 * (ranks - 1 - rank), len(forwards))
    yield from forwards[:ahead]
    for number, backward in enumerate(backwards):
        yield from forwards[ahead + number : ahead + number + 1]
        yield backward


HINTS = (
    "Make two lists first: all forwards of the rank in their order, and all backwards. Then deal from them as in 1F1B.",
    "for group in groups: for chunk in (0, 1): for m in group: the stage is chunk * ranks + rank.",
)
EXPLANATION = """The bubble is (P-1) T / V: each of the P-1 steps that a rank waits is as long as one of its V stages. The
price is V times the messages, and somewhat more in flight. Megatron calls it virtual pipeline stages."""


def check(answers: object) -> Passed:
    """The catalogue's steps and memory."""
    for ranks, microbatches in ((4, 8), (2, 2), (2, 6), (3, 9), (8, 16)):
        schedule = table("row", answers.row, ranks, microbatches, "loop")  # type: ignore[attr-defined]
        best_schedule = build("interleaved-1f1b", ranks=ranks, microbatches=microbatches, stages_per_rank=2)
        best = timed(best_schedule)
        picture = meets("interleaved", best.makespan, max(best.peak_memory), schedule)
        if (ranks, microbatches) == (4, 8):
            timeline = picture
    return Passed("28.5 steps at P = 4, M = 8", timeline)
