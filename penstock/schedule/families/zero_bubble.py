"""Zero bubble schedules: weight gradients wait for nobody, so they fill what would be idle."""

from collections.abc import Iterator, Sequence

from penstock.schedule.families.interleaved import Place, group_size_for, interleaved
from penstock.schedule.table import Action, Kind


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with the weight gradients put off, in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241).

    F x (P-r); then for b in 0..M-1: I b; the next W if b >= r; the next F if there is one; then the W left. Any P, any M.
    Bubble (P-1)(F + I - W) for M >= P and F, I >= W. P activations in flight.

        rank 0 | F0 F1 .. I0 W0 F2 .. I1 W1 I2 W2
        rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    places = [(rank, m) for m in range(microbatches)]
    return _put_off(places, places, warmup=ranks - rank, behind=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Zero bubble by span, for twice 1F1B's memory (Qi et al. 2023, arXiv 2401.10241).

    As zb-h1 with F x (2(P-r)-1) first, and W from b >= 2r on. Any P, any M. For M >= 2P-1 the longest span of a rank has the
    bubble (P-1)(F + I - 2W): none at F = I = W. The makespan has zb-h1's: ranks start and end at different times, so the
    gain is real only where no barrier (a norm over all ranks, an ordinary optimizer step) stands between two steps.
    2P-1 activations in flight.

        rank 0 | F0 F1 F2 .. I0 W0 I1 W1 I2 W2
        rank 1 | .. F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    places = [(rank, m) for m in range(microbatches)]
    return _put_off(places, places, warmup=2 * (ranks - rank) - 1, behind=2 * rank)


def interleaved_zb(
    rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2, group_size: int | None = None
) -> Iterator[Action]:
    """Interleaved 1F1B with the weight gradients put off (PyTorch's InterleavedZeroBubble).

    In the order of interleaved-1f1b: w = min(MV, (V-1)g + (P-1-r)) forwards; then for each b: the next F if there is one,
    I b, the next W if b >= r; then the W left. Any P, V and M; groups as there. Bubble (P-1)(F + I - W) / V. P microbatches
    in flight. Sensitive to the cost of sends: see `penstock show --send`.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2I0 2W0 2I1 2W1 .. 0I0 0W0 0I1 0W1
        rank 1 | .. 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    forwards, backwards = interleaved(rank, ranks, microbatches, stages_per_rank, group_size)
    warmup = (stages_per_rank - 1) * (group_size or group_size_for(microbatches, ranks)) + ranks - 1 - rank
    return _put_off(forwards, backwards, warmup + 1, behind=rank)  # the F before each I is the one after the I before it


def _put_off(forwards: Sequence[Place], backwards: Sequence[Place], warmup: int, behind: int) -> Iterator[Action]:
    """`warmup` forwards; then I, the W of `behind` backwards ago, the next F; then the W left."""
    for place in forwards[:warmup]:
        yield Action(Kind.F, *place)
    for index, place in enumerate(backwards):
        yield Action(Kind.I, *place)
        if index >= behind:
            yield Action(Kind.W, *backwards[index - behind])
        if warmup + index < len(forwards):
            yield Action(Kind.F, *forwards[warmup + index])
    for place in backwards[max(0, len(backwards) - behind) :]:
        yield Action(Kind.W, *place)
