"""ZB-V and DualPipeV: two stages on each rank, down and back up; the rules name the kind and the chunk that come next."""

from collections import defaultdict
from collections.abc import Iterator

from penstock.schedule.table import Action, Cell, Kind


def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Cell]:
    """Zero bubble by span, in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

    Rank r has the stages r (chunk 0) and 2P-1-r (chunk 1), so the last stage is on the rank of the first and the backward
    starts at once. With n = max(M, 2P-1), microbatches from M on left out at the end:

        F0 x (2(P-r)-1); (F1 F0) x r; (F1 I1 W1) x (P-r)
        while F1 < F0 or F0 < n: [F0 if F0 < n] I0 W0 F1 I1 W1
        (I0 I1) x r; (I0 W0) x (P-r); the W1 left; the W0 left

    Any P, any M. At F = I = W and M >= 2P-1 the span has no bubble, the makespan (P-1) F/2 (F of a whole rank). P
    microbatches in flight.
    """
    row = _ChunkCounters((rank, 2 * ranks - 1 - rank), microbatches)
    num_forwards = max(microbatches, 2 * ranks - 1)
    yield from row.next_actions(*["F0"] * (2 * (ranks - rank) - 1))
    yield from row.next_actions(*["F1", "F0"] * rank)
    yield from row.next_actions(*["F1", "I1", "W1"] * (ranks - rank))
    while row.num_done["F1"] < row.num_done["F0"] or row.num_done["F0"] < num_forwards:
        if row.num_done["F0"] < num_forwards:
            yield from row.next_actions("F0")
        yield from row.next_actions("I0", "W0", "F1", "I1", "W1")
    yield from row.next_actions(*["I0", "I1"] * rank)
    yield from row.next_actions(*["I0", "W0"] * (ranks - rank))
    yield from row.next_actions(*["W1"] * len(row.deferred_weights), *["W0"] * len(row.deferred_weights))


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Cell]:
    """Overlapped forwards and backwards of different microbatches (DeepSeek's DualPipe, arXiv 2412.19437, cut in half).

    Rank r has the stages r (chunk 0) and 2P-1-r (chunk 1). With {a, b} a pair that may overlap, Fc, Bc, Ic, W the next of
    their kind on chunk c (W: the oldest deferred one, if any), and n = max(M, 2P), microbatches from M on left out at the end:

        1  F0 x 2(P-r-1)                  2  (F0 F1) x (r+1)               3  (I1 W F1) x (P-r-1)
        4  ({F0 B1} {F1 B0}) x (n-2P+r+1), on rank P-1 F0 then B1 the first time
        5  (B1 {F1 B0}) x (P-r-1)         6  (B1 B0) x (r+1), in its second half I for B
        7  (W I0) x (P-r-1)               8  W x (r+1)

    Any P, any M. Bubble (P-1)(F&B + B - 3W) per chunk for M >= 2P and F = I >= W, F&B the time of an overlapped pair.
    (2P+1)/2 microbatches in flight.
    """
    row, num_microbatches = _ChunkCounters((rank, 2 * ranks - 1 - rank), microbatches), max(microbatches, 2 * ranks)
    ranks_behind, half, odd = ranks - rank - 1, (rank + 1) // 2, (rank + 1) % 2
    yield from row.next_actions(*["F0"] * (2 * ranks_behind))
    yield from row.next_actions(*["F0", "F1"] * (rank + 1))
    yield from row.next_actions(*["I1", "W", "F1"] * ranks_behind)
    for index in range(num_microbatches - 2 * ranks + rank + 1):
        first_actions = ["F0", "B1"] if index == 0 and ranks_behind == 0 else ["F0+B1"]
        yield from row.next_actions(*first_actions, "F1+B0")
    yield from row.next_actions(*["B1", "F1+B0"] * ranks_behind)
    yield from row.next_actions(*["B1", "B0"] * half, *["B1", "I0"] * odd, *["I1", "I0"] * half)
    yield from row.next_actions(*["W", "I0"] * ranks_behind)
    yield from row.next_actions(*["W"] * (rank + 1))


class _ChunkCounters:
    """Counters of what a rank has done on each chunk. Microbatches from M = `microbatches` on are counted, and left out."""

    def __init__(self, stages: tuple[int, int], microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.num_done: dict[str, int] = defaultdict(int)  # F0, F1, B0 and B1, which I0 and I1 count as
        self.deferred_weights: list[Action] = []  # each W whose I is done, the oldest first

    def next_actions(self, *cells: str) -> Iterator[Cell]:
        """Yield the actions of `cells`: `F0` is the next F of chunk 0, `W` the oldest deferred W, if any, `F0+B1` a pair."""
        for cell in cells:
            real = [action for action in map(self._next, cell.split("+")) if action and action.microbatch < self.microbatches]
            if len(real) == 2:
                yield real[0], real[1]
            else:
                yield from real

    def _next(self, name: str) -> Action | None:
        kind, chunk = Kind(name[0]), name[1:]
        if kind is Kind.W:
            deferred = (action for action in self.deferred_weights if not chunk or action.stage == self.stages[int(chunk)])
            if action := next(deferred, None):
                self.deferred_weights.remove(action)
            return action
        counter = "F" + chunk if kind is Kind.F else "B" + chunk
        action = Action(kind, self.stages[int(chunk)], self.num_done[counter])
        self.num_done[counter] += 1
        if kind is Kind.I:
            self.deferred_weights.append(action._replace(kind=Kind.W))
        return action
