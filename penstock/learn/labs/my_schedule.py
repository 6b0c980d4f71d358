"""A schedule of your own: `python -m penstock.learn.labs.lab9_your_schedule my_schedule.py` proves, draws, scores and runs it.

`schedule` yields the actions of one rank in order. `0F3` is stage 0's forward of microbatch 3, and `0B3` its backward. A
backward can be split: `0I3` computes the input's gradient, for which the previous rank waits, and `0W3`, any time later, the
weights' gradients. A stage lives on the rank that runs it; a rank may run several. All stages do the same work.
"""

from collections.abc import Iterator


def schedule(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield almost 1F1B: some forwards to warm up, then one forward, one backward."""
    warmup = rank
    for microbatch in range(min(warmup, microbatches)):
        yield f"{rank}F{microbatch}"
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield f"{rank}F{warmup + microbatch}"
        yield f"{rank}B{microbatch}"
