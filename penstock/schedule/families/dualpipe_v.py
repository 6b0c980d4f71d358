"""DualPipeV: forward of one microbatch and backward of another at the same time."""

from collections import deque
from collections.abc import Iterator

from penstock.schedule.table import Action, Cell, Kind


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
    rule = _Row((rank, 2 * ranks - 1 - rank), microbatches)
    for cell in _steps(rule, rank, ranks, max(microbatches, 2 * ranks)):
        yield from rule.within(cell)


def _steps(rule: "_Row", rank: int, ranks: int, wanted: int) -> Iterator[tuple[Action, ...]]:
    for _ in range(2 * (ranks - rank - 1)):
        yield rule.forward(0)
    for _ in range(rank + 1):
        yield rule.forward(0)
        yield rule.forward(1)
    for _ in range(ranks - rank - 1):
        yield rule.inputs(1)
        yield rule.weights()
        yield rule.forward(1)
    for index in range(wanted - 2 * ranks + rank + 1):
        if index == 0 and rank == ranks - 1:
            yield rule.forward(0)
            yield rule.full(1)
        else:
            yield rule.forward(0) + rule.full(1)
        yield rule.forward(1) + rule.full(0)
    for _ in range(ranks - rank - 1):
        yield rule.full(1)
        yield rule.forward(1) + rule.full(0)
    half, odd = divmod(rank + 1, 2)
    for index in range(rank + 1):
        yield rule.inputs(1) if index >= half + odd else rule.full(1)
        yield rule.inputs(0) if index >= half else rule.full(0)
    for _ in range(ranks - rank - 1):
        yield rule.weights()
        yield rule.inputs(0)
    for _ in range(rank + 1):
        yield rule.weights()


class _Row:
    """The next action of each kind and chunk of one rank."""

    def __init__(self, stages: tuple[int, int], microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self._next = {Kind.F: [0, 0], Kind.B: [0, 0]}
        self._put_off: deque[Action] = deque()

    def forward(self, chunk: int) -> tuple[Action, ...]:
        return (self._take(Kind.F, Kind.F, chunk),)

    def full(self, chunk: int) -> tuple[Action, ...]:
        return (self._take(Kind.B, Kind.B, chunk),)

    def inputs(self, chunk: int) -> tuple[Action, ...]:
        action = self._take(Kind.B, Kind.I, chunk)
        self._put_off.append(action._replace(kind=Kind.W))
        return (action,)

    def weights(self) -> tuple[Action, ...]:
        return (self._put_off.popleft(),) if self._put_off else ()

    def within(self, cell: tuple[Action, ...]) -> Iterator[Cell]:
        """`cell` without microbatches that do not exist; a group of one is an action."""
        real = [action for action in cell if action.microbatch < self.microbatches]
        if len(real) == 2:
            yield real[0], real[1]
        else:
            yield from real

    def _take(self, counted_as: Kind, kind: Kind, chunk: int) -> Action:
        microbatch = self._next[counted_as][chunk]
        self._next[counted_as][chunk] += 1
        return Action(kind, self.stages[chunk], microbatch)
