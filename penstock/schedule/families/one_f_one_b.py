"""1F1B: as soon as a microbatch can go back, it does."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One forward, one backward (PipeDream-Flush: arXiv 2006.09503; Megatron-LM: arXiv 2104.04473).

    Warm up with w = min(P-1-r, M) forwards; then, while backwards remain: the next forward if there is one, the next
    backward. Any P, any M, also M < P. Bubble (P-1) T as GPipe's, but only min(P-r, M) activations in flight on rank r.

        rank 0 | F0 F1 .. B0 F2 B1 .. B2
        rank 1 | .. F0 B0 F1 B1 F2 B2 ..
    """
    warmup = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warmup):
        yield Action(Kind.F, rank, microbatch)
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            yield Action(Kind.F, rank, warmup + microbatch)
        yield Action(Kind.B, rank, microbatch)
