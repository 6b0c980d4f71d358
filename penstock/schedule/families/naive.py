"""The naive schedule: one microbatch at a time goes all the way down and all the way back."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind


def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Stop and wait: `for m: F m, B m`.

    Any P, any M. Bubble (P-1) M T, T = one rank's forward and backward of one microbatch: only one rank works at a time.
    One activation in flight. It is what a model cut by hand does without a schedule.

        rank 0 | F0 .. .. B0 F1 .. .. B1
        rank 1 | .. F0 B0 .. .. F1 B1 ..
    """
    for microbatch in range(microbatches):
        yield Action(Kind.F, rank, microbatch)
        yield Action(Kind.B, rank, microbatch)
