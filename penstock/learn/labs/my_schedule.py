"""A schedule of your own: `python -m penstock.learn.labs.lab9_your_schedule my_schedule.py` proves, draws, scores and runs it.

`schedule` says what one rank does, action by action: `0F3` is stage 0's forward of microbatch 3, `0B3` its backward,
or in two `0I3` (to the input; the rank before waits for it) and, some time later, `0W3` (to the weights).
A stage lives on the rank that runs it; there may be several on each. All stages do the same work.
"""

from collections.abc import Iterator


def schedule(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """1F1B, almost: some forwards to warm up, then one forward, one backward."""
    warmup = rank
    for microbatch in range(min(warmup, microbatches)):
        yield f"{rank}F{microbatch}"
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield f"{rank}F{warmup + microbatch}"
        yield f"{rank}B{microbatch}"
