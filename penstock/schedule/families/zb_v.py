"""ZB-V: two stages on each rank, down and back up, and no bubble."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind


def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Zero bubble in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

    Rank r has the stages r (chunk 0) and 2P-1-r (chunk 1), so the last stage stands beside the first and the backward starts
    at once. With n = max(M, 2P-1), microbatches from M on left out at the end:

        F0 x (2(P-r)-1); (F1 F0) x r; (F1 I1 W1) x (P-r)
        while F1 < F0 or F0 < n: [F0 if F0 < n] I0 W0 F1 I1 W1
        (I0 I1) x r; (I0 W0) x (P-r); the W1 left; the W0 left

    Any P, any M. At F = I = W the span has no bubble, the makespan (P-1) F/2 (F of a whole rank). P microbatches in flight.
    """
    stage = rank, 2 * ranks - 1 - rank
    wanted = max(microbatches, 2 * ranks - 1)
    done = {(kind, chunk): 0 for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1)}

    def take(kind: Kind, chunk: int) -> Iterator[Action]:
        microbatch = done[kind, chunk]
        done[kind, chunk] += 1
        if microbatch < microbatches:
            yield Action(kind, stage[chunk], microbatch)

    def run(*cells: str) -> Iterator[Action]:
        for cell in cells:
            yield from take(Kind(cell[0]), int(cell[1]))

    yield from run(*["F0"] * (2 * (ranks - rank) - 1))
    yield from run(*["F1", "F0"] * rank)
    yield from run(*["F1", "I1", "W1"] * (ranks - rank))
    while done[Kind.F, 1] < done[Kind.F, 0] or done[Kind.F, 0] < wanted:
        if done[Kind.F, 0] < wanted:
            yield from run("F0")
        yield from run("I0", "W0", "F1", "I1", "W1")
    yield from run(*["I0", "I1"] * rank)
    yield from run(*["I0", "W0"] * (ranks - rank))
    for chunk in (1, 0):
        yield from run(*[f"W{chunk}"] * (done[Kind.I, chunk] - done[Kind.W, chunk]))
