"""GPipe: all forwards, then all backwards."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Any P, any M. Bubble (P-1) T, T = one rank's forward and backward of one microbatch. M activations in flight on every
    rank. The backwards run in ascending order, so that all schedules sum gradients alike.

        rank 0 | F0 F1 F2 .. .. B0 B1 B2
        rank 1 | .. F0 F1 F2 B0 B1 B2 ..
    """
    for microbatch in range(microbatches):
        yield Action(Kind.F, rank, microbatch)
    for microbatch in range(microbatches):
        yield Action(Kind.B, rank, microbatch)
