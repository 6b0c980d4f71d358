"""The mean of means.

A batch is split into microbatches, and each gives the mean loss of what it counts: of its rows, or of its tokens that are
not padding. The batch's loss is the mean over all that is counted. It is not the mean of the microbatches' means.

Write `batch_loss(means, counts)`: the batch's loss from each microbatch's mean and from how much that counted. A microbatch
that counts nothing has the mean NaN, and must not matter.

Target: means 2 and 5 of 3 rows and 1 row: 2.75, not 3.5.
"""

import math

from penstock.learn.puzzles.judge import Missed, Passed, written, yours


@yours
def batch_loss(means: list[float], counts: list[int]) -> float:
    """The mean over all that is counted."""
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)


HINTS = (
    "A mean times its count is a sum again. Sums may be added.",
    "nan * 0 is nan: leave out what counts nothing.",
)
EXPLANATION = """Every microbatch weighs as much as it counts: `count / total`. The backward must use the same weights, and
begins before the last forward has run: so the counts must come from the targets alone. That is `Pipeline(..,
loss_weight=..)`. PyTorch's own pipelines take the mean of means: 21 % off for 5 rows in 2 microbatches."""


def check(answers: object) -> Passed:
    """Some batches."""
    cases = (([2.0, 5.0], [3, 1]), ([1.0, 1.0], [4, 4]), ([3.0, math.nan, 7.0], [2, 0, 6]), ([0.5, 2.5, 4.0], [7, 1, 2]))
    for means, counts in cases:
        expected = sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)
        answer = written(answers.batch_loss(means, counts), f"batch_loss({means}, {counts})")  # type: ignore[attr-defined]
        if math.isnan(answer):
            raise Missed(f"batch_loss({means}, {counts}) is nan: a microbatch that counts nothing must not matter")
        if not math.isclose(answer, expected):
            kind = " (the mean of means)" if math.isclose(answer, sum(means) / len(means)) else ""
            raise Missed(
                f"batch_loss({means}, {counts}) is {answer:g}{kind}, the mean over all that is counted is {expected:g}"
            )
    return Passed("every microbatch weighs as much as it counts")
