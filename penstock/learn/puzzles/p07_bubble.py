"""The bubble's formula.

GPipe runs on P ranks with M microbatches. Every rank takes F for the forward and B for the backward of a microbatch. The step
takes (M + P - 1)(F + B), but each rank works only M (F + B). The rest is the bubble.

Write `bubble(ranks, microbatches)`: return the share of the step in which a rank is idle. Then write
`microbatches_for(ranks, most)`: return the smallest number of microbatches whose bubble is at most `most`.

Target: both are right on a grid of P and M. 4 ranks, 8 microbatches: 27.3 %. At most 10 % on 8 ranks: 63 microbatches.
"""

import math

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, solution
from penstock.schedule import build, simulate


@solution
def bubble(ranks: int, microbatches: int) -> float:
    """Return the idle share of a rank's step, 0 to 1."""
    return (ranks - 1) / (microbatches + ranks - 1)


@solution
def microbatches_for(ranks: int, most: float) -> int:
    """Return the smallest number of microbatches whose bubble is at most `most`, 0 to 1."""
    return max(1, math.ceil((ranks - 1) * (1 - most) / most - 1e-9))


HINTS = (
    "The step takes M + P - 1 times as long as a rank works on one microbatch. P - 1 of these times are idle.",
    "Solve (P-1) / (M+P-1) <= b for M, and round up.",
)
EXPLANATION = """bubble = (P-1) / (M+P-1). Some authors divide by the ideal time instead: (P-1) / M. To halve the bubble you
need about twice the microbatches, or stages of half the size (puzzle 11), or work to fill it with (puzzle 13)."""


def check(answers: object) -> CheckPassed:
    """Compare with the simulator, which uses no formula. Raises CheckFailed."""
    for ranks in range(1, 9):
        for microbatches in (1, 2, 3, 5, 8, 16, 33):
            expected = simulate(build("gpipe", ranks=ranks, microbatches=microbatches)).bubble
            call = f"bubble({ranks}, {microbatches})"
            answer = require_answer(answers.bubble(ranks, microbatches), call)  # type: ignore[attr-defined]
            if not math.isclose(answer, expected, abs_tol=1e-9):
                raise CheckFailed(f"{call} is {answer:.1%}, simulated it is {expected:.1%}")
    for ranks in range(2, 9):
        for max_bubble in (0.5, 0.27, 0.1, 0.02):
            call = f"microbatches_for({ranks}, {max_bubble})"
            answer = require_answer(answers.microbatches_for(ranks, max_bubble), call)  # type: ignore[attr-defined]
            if not isinstance(answer, int) or answer < 1:
                raise CheckFailed(f"{call} is {answer!r}: return an integer of 1 or more")
            answer_bubble = (ranks - 1) / (answer + ranks - 1)
            if answer_bubble > max_bubble + 1e-9:
                raise CheckFailed(f"{call} is {answer}: the bubble is then {answer_bubble:.1%}")
            if answer > 1 and (ranks - 1) / (answer + ranks - 2) <= max_bubble + 1e-9:
                raise CheckFailed(f"{call} is {answer}: {answer - 1} would do")
    return CheckPassed("the formulas agree with the simulator for every P and M tried")
