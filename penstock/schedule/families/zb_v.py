"""ZB-V: two stages on each rank, down and back up, and no bubble."""

from collections.abc import Iterator

from penstock.schedule.families.two_chunks import TwoChunks
from penstock.schedule.table import Cell


def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Cell]:
    """Zero bubble in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

    Rank r has the stages r (chunk 0) and 2P-1-r (chunk 1), so the last stage stands beside the first and the backward starts
    at once. With n = max(M, 2P-1), microbatches from M on left out at the end:

        F0 x (2(P-r)-1); (F1 F0) x r; (F1 I1 W1) x (P-r)
        while F1 < F0 or F0 < n: [F0 if F0 < n] I0 W0 F1 I1 W1
        (I0 I1) x r; (I0 W0) x (P-r); the W1 left; the W0 left

    Any P, any M. At F = I = W the span has no bubble, the makespan (P-1) F/2 (F of a whole rank). P microbatches in flight.
    """
    row = TwoChunks((rank, 2 * ranks - 1 - rank), microbatches)
    wanted = max(microbatches, 2 * ranks - 1)
    yield from row.run(*["F0"] * (2 * (ranks - rank) - 1))
    yield from row.run(*["F1", "F0"] * rank)
    yield from row.run(*["F1", "I1", "W1"] * (ranks - rank))
    while row.done["F1"] < row.done["F0"] or row.done["F0"] < wanted:
        if row.done["F0"] < wanted:
            yield from row.run("F0")
        yield from row.run("I0", "W0", "F1", "I1", "W1")
    yield from row.run(*["I0", "I1"] * rank)
    yield from row.run(*["I0", "W0"] * (ranks - rank))
    yield from row.run(*["W1"] * len(row.put_off), *["W0"] * len(row.put_off))
