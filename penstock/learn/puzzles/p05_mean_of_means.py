"""The mean of means.

A batch is split into microbatches. Each returns the mean loss over what it counts: its rows, or its tokens that are not
padding. The batch's loss is the mean over everything counted, which is not the mean of the microbatches' means.

Write `batch_loss(means, counts)`: return the batch's loss from each microbatch's mean and count. A microbatch with count 0
has the mean NaN, and must be ignored.

Target: means 2 and 5 over 3 rows and 1 row: 2.75, not 3.5.
"""

import math

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, solution


@solution
def batch_loss(means: list[float], counts: list[int]) -> float:
    """Return the mean over everything counted."""
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)


HINTS = (
    "A mean times its count is a sum. Sums can be added.",
    "nan * 0 is nan: leave out microbatches whose count is 0.",
)
EXPLANATION = """A microbatch's weight is `count / total`. The backward must use the same weights, and begins before the last
forward has run, so the counts must come from the targets alone. `Pipeline(.., loss_weight=..)` does this. PyTorch's own
pipelines take the mean of means: 21 % off for 5 rows in 2 microbatches."""


def check(answers: object) -> CheckPassed:
    """Check some batches. Raises CheckFailed."""
    cases = (([2.0, 5.0], [3, 1]), ([1.0, 1.0], [4, 4]), ([3.0, math.nan, 7.0], [2, 0, 6]), ([0.5, 2.5, 4.0], [7, 1, 2]))
    for means, counts in cases:
        expected = sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)
        answer = require_answer(answers.batch_loss(means, counts), f"batch_loss({means}, {counts})")  # type: ignore[attr-defined]
        if math.isnan(answer):
            raise CheckFailed(f"batch_loss({means}, {counts}) is nan: ignore a microbatch whose count is 0")
        if not math.isclose(answer, expected):
            remark = " (the mean of means)" if math.isclose(answer, sum(means) / len(means)) else ""
            raise CheckFailed(
                f"batch_loss({means}, {counts}) is {answer:g}{remark}, the mean over everything counted is {expected:g}"
            )
    return CheckPassed("every microbatch is weighted by its count")
