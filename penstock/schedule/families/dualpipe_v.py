"""DualPipeV: forward of one microbatch and backward of another at the same time."""

from collections.abc import Iterator

from penstock.schedule.families.two_chunks import TwoChunks
from penstock.schedule.table import Cell


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Cell]:
    """Overlaps forward and backward of different microbatches (DeepSeek's DualPipe, arXiv 2412.19437, cut in half).

    Rank r has the stages r (chunk 0) and 2P-1-r (chunk 1). With {a, b} a pair that may overlap, Fc, Bc, Ic, W the next of
    their kind on chunk c (W: the oldest put off, if any), and n = max(M, 2P), microbatches from M on left out at the end:

        1  F0 x 2(P-r-1)                  2  (F0 F1) x (r+1)               3  (I1 W F1) x (P-r-1)
        4  ({F0 B1} {F1 B0}) x (n-2P+r+1), on rank P-1 F0 then B1 the first time
        5  (B1 {F1 B0}) x (P-r-1)         6  (B1 B0) x (r+1), in its second half I for B
        7  (W I0) x (P-r-1)               8  W x (r+1)

    Any P, any M. Bubble (P-1)(F&B + B - 3W) per chunk for M >= 2P, F&B the time of an overlapped pair. (2P+1)/2 microbatches
    in flight.
    """
    row, wanted = TwoChunks((rank, 2 * ranks - 1 - rank), microbatches), max(microbatches, 2 * ranks)
    after, half, odd = ranks - rank - 1, (rank + 1) // 2, (rank + 1) % 2
    yield from row.run(*["F0"] * (2 * after))
    yield from row.run(*["F0", "F1"] * (rank + 1))
    yield from row.run(*["I1", "W", "F1"] * after)
    for index in range(wanted - 2 * ranks + rank + 1):
        first = ["F0", "B1"] if index == 0 and after == 0 else ["F0+B1"]
        yield from row.run(*first, "F1+B0")
    yield from row.run(*["B1", "F1+B0"] * after)
    yield from row.run(*["B1", "B0"] * half, *["B1", "I0"] * odd, *["I1", "I0"] * half)
    yield from row.run(*["W", "I0"] * after)
    yield from row.run(*["W"] * (rank + 1))
