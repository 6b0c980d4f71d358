"""Interleaved: smaller stages, a smaller bubble.

Give each rank two smaller stages instead of one: with P = 4, rank 0 has stages 0 and 4, rank 1 has 1 and 5, and so on. A
microbatch goes around twice, and filling the pipeline takes half as long. Microbatches pass in groups of P. The forwards of a
rank are microbatches 0 to P-1 on its first stage, the same on its second, then P to 2P-1 on its first, and so on. The
backwards are the same with the second stage first. A rank runs (V-1) P + 2 (P-1-r) forwards ahead, then alternates one
forward and one backward.

Write `row(rank, ranks, microbatches)` for V = 2 stages on each rank. Microbatches are a multiple of the ranks.

Target: 28.5 units of time (1F1B takes 33) and 5.5 microbatches in flight at P = 4, M = 8. F = 1 and B = 2 of a whole rank,
so a stage takes half of that.
"""

from collections.abc import Iterator

from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.puzzles.check_helpers import CheckPassed, build_table, check_targets, solution
from penstock.schedule import build


@solution
def row(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the rank's actions, in order. Its stages are `rank` and `ranks + rank`."""
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forwards = [f"{chunk * ranks + rank}F{m}" for group in groups for chunk in (0, 1) for m in group]
    backwards = [f"{chunk * ranks + rank}B{m}" for group in groups for chunk in (1, 0) for m in group]
    warmup = min(ranks + 2 * (ranks - 1 - rank), len(forwards))
    yield from forwards[:warmup]
    for number, backward in enumerate(backwards):
        yield from forwards[warmup + number : warmup + number + 1]
        yield backward


HINTS = (
    "First make two lists: all forwards of the rank in their order, and all backwards. Then take from them as in 1F1B.",
    "for group in groups: for chunk in (0, 1): for m in group: the stage is chunk * ranks + rank.",
)
EXPLANATION = """The bubble is (P-1) T / V: a rank waits P-1 times for one of its V stages, which takes T / V. The price is V
times the messages, and somewhat more microbatches in flight. Megatron calls this virtual pipeline stages."""


def check(answers: object) -> CheckPassed:
    """Check the time and memory of the catalog's interleaved-1f1b. Raises CheckFailed."""
    for ranks, microbatches in ((4, 8), (2, 2), (2, 6), (3, 9), (8, 16)):
        schedule = build_table("row", answers.row, ranks, microbatches, "loop")  # type: ignore[attr-defined]
        catalog_schedule = build("interleaved-1f1b", ranks=ranks, microbatches=microbatches, stages_per_rank=2)
        target = simulate_equal_stages(catalog_schedule)
        timeline = check_targets("interleaved", target.makespan, max(target.peak_memory), schedule)
        if (ranks, microbatches) == (4, 8):
            shown_timeline = timeline
    return CheckPassed("28.5 units of time at P = 4, M = 8", shown_timeline)
