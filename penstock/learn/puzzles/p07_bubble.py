"""The bubble's formula.

GPipe on P ranks, M microbatches, every rank taking F for a forward and B for a backward of one: the step takes (M + P -
1)(F + B), though each rank works M (F + B) only. The rest is the bubble.

Write `bubble(ranks, microbatches)`: the share of the step in which a rank is idle. Then `microbatches_for(ranks, most)`:
the smallest number of microbatches whose bubble is `most` at most.

Target: both right on a grid of P and M; 4 ranks, 8 microbatches: 27.3 %; at most 10 % on 8 ranks: 63 microbatches.
"""

import math

from penstock.learn.puzzles.judge import Missed, Passed, written, yours
from penstock.schedule import build, simulate


@yours
def bubble(ranks: int, microbatches: int) -> float:
    """The idle share of a rank's step, 0 to 1."""
    return (ranks - 1) / (microbatches + ranks - 1)


@yours
def microbatches_for(ranks: int, most: float) -> int:
    """The fewest microbatches whose bubble is at most `most`."""
    return max(1, math.ceil((ranks - 1) * (1 - most) / most - 1e-9))


HINTS = (
    "The step takes M + P - 1 times what a rank works for one microbatch; P - 1 of these are idle.",
    "Solve (P-1) / (M+P-1) <= b for M, and round up.",
)
EXPLANATION = """bubble = (P-1) / (M+P-1): some divide by the ideal time instead, and say (P-1) / M. To halve the bubble
one needs about twice the microbatches, or stages that are half as large (puzzle 11), or work to fill it with (puzzle 13)."""


def check(answers: object) -> Passed:
    """Against the simulator, which knows no formula."""
    for ranks in range(1, 9):
        for microbatches in (1, 2, 3, 5, 8, 16, 33):
            expected = simulate(build("gpipe", ranks=ranks, microbatches=microbatches)).bubble
            call = f"bubble({ranks}, {microbatches})"
            answer = written(answers.bubble(ranks, microbatches), call)  # type: ignore[attr-defined]
            if not math.isclose(answer, expected, abs_tol=1e-9):
                raise Missed(f"{call} is {answer:.1%}, simulated it is {expected:.1%}")
    for ranks in range(2, 9):
        for max_bubble in (0.5, 0.27, 0.1, 0.02):
            call = f"microbatches_for({ranks}, {max_bubble})"
            answer = written(answers.microbatches_for(ranks, max_bubble), call)  # type: ignore[attr-defined]
            if not isinstance(answer, int) or answer < 1:
                raise Missed(f"{call} is {answer!r}: give a whole number of 1 or more")
            with_it = (ranks - 1) / (answer + ranks - 1)
            if with_it > max_bubble + 1e-9:
                raise Missed(f"{call} is {answer}: the bubble is {with_it:.1%} then")
            if answer > 1 and (ranks - 1) / (answer + ranks - 2) <= max_bubble + 1e-9:
                raise Missed(f"{call} is {answer}: {answer - 1} would do")
    return Passed("the formula is the simulator's, on every P and M tried")
