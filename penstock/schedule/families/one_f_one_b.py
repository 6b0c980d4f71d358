"""From naive to zero bubble: first some forwards, then one forward and one backward in turn.

The schedules differ in how many forwards come first, in the order in which microbatches pass a rank's stages, and in whether
the weight gradients are deferred: no other rank waits for them, so they fill idle time.
"""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind

Place = tuple[int, int, int]  # stage, microbatch, slice
Passes = tuple[list[Place], list[Place]]  # the forwards of a rank in order, and its backwards


def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Stop and wait: `for m: F m, B m`.

    Any P, any M. Bubble (P-1) M T, T = one rank's forward and backward of one microbatch: only one rank works at a time.
    One activation in flight. A model cut by hand runs this way without a schedule.

        rank 0 | F0 .. .. B0 F1 .. .. B1
        rank 1 | .. F0 B0 .. .. F1 B1 ..
    """
    return _alternate_forwards_and_backwards(_passes(rank, ranks, microbatches), warmup_forwards=0)


def gpipe(rank: int, ranks: int, microbatches: int, *, slices: int = 1) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Any P, any M. Bubble (P-1) T, T = one rank's forward and backward of one microbatch. M activations in flight on every
    rank. The backwards run in ascending order, so that all schedules sum gradients in the same order. With K slices of a
    microbatch (Li et al. 2021, TeraPipe, arXiv 2102.07988) forwards go from the first slice to the last, backwards from the
    last to the first: bubble (P-1) T / K.

        rank 0 | F0 F1 F2 .. .. B0 B1 B2
        rank 1 | .. F0 F1 F2 B0 B1 B2 ..
    """
    passes = _passes(rank, ranks, microbatches, slices=slices)
    return _alternate_forwards_and_backwards(passes, warmup_forwards=len(passes[0]))


def one_f_one_b(rank: int, ranks: int, microbatches: int, *, slices: int = 1) -> Iterator[Action]:
    """One forward, one backward (PipeDream-Flush: arXiv 2006.09503; Megatron-LM: arXiv 2104.04473).

    Warm up with w = min(P-1-r, M) forwards; then, while backwards remain: the next forward if there is one, the next
    backward. Any P, any M, also M < P. Bubble (P-1) T as GPipe's, but only min(P-r, M) activations in flight on rank r.
    With K slices of a microbatch (Sun et al. 2024, Seq1F1B, arXiv 2406.03488) each F and B is of one slice. The backwards of
    a microbatch go from its last slice to its first, after w + K - 1 forwards. Bubble (P-1) T / K; min((P-r+K-1) / K, M)
    microbatches in flight.

        rank 0 | F0 F1 .. B0 F2 B1 .. B2
        rank 1 | .. F0 B0 F1 B1 F2 B2 ..
    """
    passes = _passes(rank, ranks, microbatches, slices=slices)
    return _alternate_forwards_and_backwards(passes, warmup_forwards=ranks - 1 - rank + slices - 1)


def looped_bfs(rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2) -> Iterator[Action]:
    """All forwards stage by stage, then all backwards, breadth first (Lamy-Poirier 2022, arXiv 2211.05953).

    Any P, V and M. Bubble (P-1) T / V for M >= P. M microbatches in flight, as GPipe. The backwards run in ascending order
    of microbatches, so that all schedules sum gradients in the same order.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2B0 2B1 0B0 0B1
        rank 1 | .. 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ..
    """
    passes = _passes(rank, ranks, microbatches, stages_per_rank)
    return _alternate_forwards_and_backwards(passes, warmup_forwards=len(passes[0]))


def interleaved_1f1b(
    rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2, group_size: int | None = None, slices: int = 1
) -> Iterator[Action]:
    """1F1B over V stages on each rank (Narayanan et al. 2021, arXiv 2104.04473).

    Microbatches pass in groups of g: a group goes through all of a rank's stages before the next one enters. Warm up with
    w = min(MV, 2(P-1-r) + (V-1)g) forwards; then, for each backward: the next forward if there is one, the next backward.
    Any P, V and M; g = P where P divides M, else the batch is cut into M // P groups, as equal as possible.
    Where P divides M: bubble (P-1) T / V, a V-th of 1F1B's, for V times the messages. In flight on rank r, in microbatches:
    ((V-1)P + 2(P-1-r) + 1)/V, or M if that is less. With K slices of a microbatch, groups are of slices (Seq1F1B, as in
    1f1b), and the first backward comes after the forwards of all slices of its microbatch.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2B0 .. 2B1 .. 0B0 .. 0B1
        rank 1 | .. 1F0 1F1 3F0 3B0 3F1 3B1 1B0 .. 1B1
    """
    group_size = group_size or _equal_group_size(ranks, microbatches * slices)
    passes = forwards, backwards = _passes(rank, ranks, microbatches, stages_per_rank, group_size, slices)
    warmup_forwards = (stages_per_rank - 1) * group_size
    if slices > 1:  # on the last rank: no backward before the forward of its microbatch's last slice
        at = {place: index for index, place in enumerate(forwards)}
        warmup_forwards = max(at[stage, m, slices - 1] - index for index, (stage, m, _) in enumerate(backwards))
    return _alternate_forwards_and_backwards(passes, warmup_forwards=2 * (ranks - 1 - rank) + warmup_forwards)


def zb_h1(rank: int, ranks: int, microbatches: int, *, slices: int = 1) -> Iterator[Action]:
    """1F1B with deferred weight gradients, in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241).

    F x (P-1-r); then for b in 0..M-1: the next F if there is one; I b; the next W if b >= r; then the W left. Any P, any M.
    Bubble (P-1)(F + I - W) for M >= P and F, I >= W. P activations in flight. With K slices of a microbatch, as in 1f1b: K - 1
    more F first, the bubble over K, (P+K-1) / K microbatches in flight.

        rank 0 | F0 F1 .. I0 W0 F2 .. I1 W1 I2 W2
        rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    passes = _passes(rank, ranks, microbatches, slices=slices)
    return _alternate_forwards_and_backwards(passes, warmup_forwards=ranks - 1 - rank + slices - 1, weights_behind=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Zero bubble by span, for twice 1F1B's memory (Qi et al. 2023, arXiv 2401.10241).

    As zb-h1 with F x 2(P-1-r) first, and W from b >= 2r on. Any P, any M. For M >= 2P-1 the longest span of a rank has the
    bubble (P-1)(F + I - 2W), if F, I >= W: none at F = I = W. The bubble of the makespan is zb-h1's, because ranks start and
    end at different times: the gain is real only if no barrier (a norm over all ranks, an ordinary optimizer step) stands
    between two steps. 2P-1 activations in flight.

        rank 0 | F0 F1 F2 .. I0 W0 I1 W1 I2 W2
        rank 1 | .. F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    return _alternate_forwards_and_backwards(
        _passes(rank, ranks, microbatches), warmup_forwards=2 * (ranks - 1 - rank), weights_behind=2 * rank
    )


def interleaved_zb(
    rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2, group_size: int | None = None
) -> Iterator[Action]:
    """Interleaved 1F1B with deferred weight gradients (PyTorch's InterleavedZeroBubble; after arXiv 2104.04473, 2401.10241).

    In the order of interleaved-1f1b: w = min(MV, (V-1)g + (P-1-r)) forwards; then for each b: the next F if there is one,
    I b, the next W if b >= r; then the W left. Any P, V and M; groups as there. Where P divides M and F, I >= W: bubble
    (P-1)(F + I - W) / V, P microbatches in flight. Sensitive to the cost of sends: see `penstock show --send`.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2I0 2W0 2I1 2W1 .. 0I0 0W0 0I1 0W1
        rank 1 | .. 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    group_size = group_size or _equal_group_size(ranks, microbatches)
    passes = _passes(rank, ranks, microbatches, stages_per_rank, group_size)
    return _alternate_forwards_and_backwards(
        passes, warmup_forwards=(stages_per_rank - 1) * group_size + ranks - 1 - rank, weights_behind=rank
    )


def _equal_group_size(ranks: int, count: int) -> int:
    """Return the size of N // P groups (one, if N < P), as equal as possible, of N = `count` slices of microbatches."""
    return -(-count // max(1, count // ranks))


def _passes(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int = 1, group_size: int | None = None, slices: int = 1
) -> Passes:
    """Return the order in which slices pass a rank's stages: a group through all its stages, then the next one.

    Without a `group_size` all slices of all microbatches are one group.
    """
    order = [(m, k) for m in range(microbatches) for k in range(slices)]
    down, up = (range(rank, ranks * stages_per_rank, ranks)[::step] for step in (1, -1))
    size = group_size or len(order)
    return _order_in_groups(order, down, size), _order_in_groups([(m, slices - 1 - k) for m, k in order], up, size)


def _order_in_groups(order: list[tuple[int, int]], stages: range, size: int) -> list[Place]:
    """Return (stage, microbatch, slice) in order: a group of `size` from `order` through all `stages`, then the next one."""
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    return [(stage, m, k) for group in groups for stage in stages for m, k in group]


def _alternate_forwards_and_backwards(
    passes: Passes, warmup_forwards: int, weights_behind: int | None = None
) -> Iterator[Action]:
    """Yield up to `warmup_forwards` forwards, then in turn the next forward, while there is one, and the next backward.

    With `weights_behind` = n, a backward is an I, followed by the W of n backwards ago; the W left come last.
    """
    forwards, backwards = passes
    for place in forwards[:warmup_forwards]:
        yield Action(Kind.F, *place)
    for index, place in enumerate(backwards):
        if warmup_forwards + index < len(forwards):
            yield Action(Kind.F, *forwards[warmup_forwards + index])
        yield Action(Kind.B if weights_behind is None else Kind.I, *place)
        if weights_behind is not None and index >= weights_behind:
            yield Action(Kind.W, *backwards[index - weights_behind])
    for place in backwards[-weights_behind:] if weights_behind else ():
        yield Action(Kind.W, *place)
