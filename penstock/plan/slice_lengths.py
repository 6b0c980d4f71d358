"""Plan the lengths of slices from a measured step: all slices take equally long, so that no rank waits for a longer one.

A slice of `length` tokens after `first` others takes a x length + b x length x (first + length / 2): each token's own work,
and attention to the tokens before it. So the tokens up to x take a x + b x^2 / 2, which is cut into equal parts.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from statistics import median

import numpy as np

from penstock.errors import MismatchError, is_whole_number
from penstock.timing.timeline import Timeline


def plan_slices(timeline: Timeline, lengths: Sequence[int]) -> list[int]:
    """Return lengths of slices, in tokens, that take equally long, so that the step is short.

        pipe.step(tokens, target=target)  # of Pipeline(.., slices=4), with sequences of 2,048 tokens
        lengths = ps.plan.plan_slices(pipe.timeline(), [512, 512, 512, 512])
        pipe = ps.Pipeline(.., slices=lengths)

    timeline
        Of a step that ran in slices: the second of its kind, or a later one.
    lengths
        The tokens of its slices.

    The later slices are shorter, since they attend to more tokens. The sum and the number of the lengths stay.

    Raises MismatchError unless there is a length for each of two slices or more.
    """
    if timeline.slices < 2 or len(lengths) != timeline.slices or not all(is_whole_number(length, 1) for length in lengths):
        raise MismatchError(
            f"the timeline has {timeline.slices} slices of a microbatch, the lengths are {list(lengths)}: run a step of "
            "Pipeline(.., slices=2) or more, and give the tokens of each of its slices"
        )
    per_token, per_pair = _fit_seconds_per_token(_seconds_by_slice(timeline), lengths)
    num_tokens, slices = sum(lengths), len(lengths)
    total = per_token * num_tokens + per_pair * num_tokens**2 / 2

    def tokens_in(seconds: float) -> float:
        return 2 * seconds / (per_token + sqrt(per_token**2 + 2 * per_pair * seconds))

    # Each slice has a token or more, also where rounding leaves none.
    borders = [0, *(round(tokens_in(total * number / slices)) for number in range(1, slices)), num_tokens]
    for number in range(1, slices):
        borders[number] = min(max(borders[number], borders[number - 1] + 1), num_tokens - (slices - number))
    return [last - first for first, last in pairwise(borders)]


def _seconds_by_slice(timeline: Timeline) -> list[float]:
    """Return the seconds of each slice's actions: the median over microbatches, summed over stages and kinds."""
    seconds = defaultdict(list)
    for event in timeline.events:
        kind, stage, _, slice_ = event.action
        seconds[slice_, kind, stage].append(event.end - event.start)
    sums = [0.0] * timeline.slices
    for (slice_, _, _), values in seconds.items():
        sums[slice_] += median(values)
    return sums


def _fit_seconds_per_token(seconds: Sequence[float], lengths: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of a token, and its seconds for each token before it: least squares, neither below 0."""
    firsts = [0, *accumulate(lengths)]
    columns = np.array([(length, length * (first + length / 2)) for first, length in zip(firsts, lengths, strict=False)])
    per_token, per_pair = map(float, np.linalg.lstsq(columns, np.array(seconds), rcond=None)[0])
    if per_pair <= 0:
        return 1.0, 0.0
    return max(per_token, 0.0), per_pair
