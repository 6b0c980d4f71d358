"""What all ranks agree on before a step's data flows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.comms.control import Control
from penstock.comms.messages.channels import Specs
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Size
from penstock.stage.microbatch import shares, sizes

NOTHING = -1
_EXACT = 2**52  # whole numbers below are exact in the float64 that travels


@dataclass
class Vote:
    """What one rank says about the step it is about to run."""

    training: bool
    step: int
    rows: int = NOTHING  # of the inputs, on the first stage's rank
    target_rows: int = NOTHING  # on the last stage's rank
    signature: int = 0  # of the inputs' shapes and dtypes
    local: int = 0  # of whatever else on this rank decides what its stages send
    counts: Sequence[float] = ()  # what each microbatch counts, on the last stage's rank if it is not by their rows

    def row(self) -> list[float]:
        """The vote as numbers."""
        fixed = (self.training, self.step, self.rows, self.target_rows, len(self.counts))
        return [float(number) for number in (*fixed, self.signature % _EXACT, self.local % _EXACT)]


@dataclass
class Agreed:
    """What all ranks know of the step."""

    pieces: int  # this pipeline's microbatches that have rows
    weights: Sequence[float]  # of each of them in the loss over all replicas, if there is a target
    without_backward: frozenset[int]  # those of weight 0
    specs: Specs  # what the messages are like, or will be once the step is over
    known: bool
    alike: bool = True  # whether all replicas have as many microbatches, and the same ones of weight 0
    sizes: dict[int, Size] = field(default_factory=dict)  # what a microbatch keeps on this rank's stages, in bytes, if known
    key: tuple[object, ...] = field(default=(), repr=False)


class Agreement:
    """The votes of one pipeline, and of those beside it, and the messages' descriptions for every vote that was run before."""

    def __init__(self, control: Control, position: MeshPosition, microbatches: int) -> None:
        self.control, self.position, self.microbatches = control, position, microbatches
        self._known: dict[tuple[object, ...], Agreed] = {}
        self._votes: set[tuple[float, ...]] = set()  # of this rank, in steps that ended well

    def vote(self, vote: Vote, what: str) -> None:
        """Tell the others; `what` says what for, should it fail. This rank may go on with what needs no other."""
        self._vote, self._what = vote, what
        self.control.tell(vote.row(), what)

    @property
    def repeated(self) -> bool:
        """Whether this rank has voted so before, as far as it can know."""
        return _kind(self._vote.row()) in self._votes

    def reach(self) -> Agreed:
        """Hear the others. Raises MismatchError, the same on every rank, if the votes do not fit together."""
        vote, what = self._vote, self._what
        rows = self.control.hear(what)
        self._check(rows)
        batches = [_most(rows, ranks, 2) for ranks in self.position.counted]
        pieces = [sizes(batch, min(batch, self.microbatches)) for batch in batches]
        weights: list[list[float]] = [[] for _ in batches]
        if any(row[3] != NOTHING for row in rows):
            counts: Sequence[Sequence[float]] = pieces
            if any(row[4] for row in rows):
                told = self.control.gather_objects(vote.counts, what)
                counts = [next(filter(None, (told[rank] for rank in ranks))) for ranks in self.position.counted]
            total = sum(map(sum, counts))
            weights = [shares(each, total) for each in counts]
        skipped = [frozenset(piece for piece, weight in enumerate(each) if not weight) for each in weights]
        mine = self.position.replica
        alike = len({(len(each), skips) for each, skips in zip(pieces, skipped, strict=True)}) == 1
        key = (self.control.generation, skipped[mine], *map(_kind, rows))
        before = self._known.get(key)
        specs, lasting = (before.specs, before.sizes) if before else ({}, {})
        return Agreed(len(pieces[mine]), weights[mine], skipped[mine], specs, before is not None, alike, lasting, key)

    def keep(self, agreed: Agreed) -> None:
        """The step is over: what its messages were like holds for the next of the same kind."""
        self._known.setdefault(agreed.key, agreed)
        self._votes.add(_kind(self._vote.row()))

    def _check(self, rows: Sequence[Sequence[float]]) -> None:
        for rank, (training, step, *_) in enumerate(rows):
            if training != rows[0][0]:
                calls = ["step()" if row[0] else "eval()" for row in (rows[0], rows[rank])]
                raise MismatchError(f"the ranks do different things: rank 0 calls {calls[0]}, rank {rank} calls {calls[1]}")
            if step != rows[0][1]:
                raise MismatchError(f"the ranks are apart: rank 0 is at step {rows[0][1]:.0f}, rank {rank} at step {step:.0f}")
        for replica, shards in enumerate(self.position.pipelines):
            where = f"replica {replica}: " if self.position.replicas > 1 else ""
            batches = [(_most(rows, ranks, 2), _most(rows, ranks, 3)) for ranks in shards]
            batch, target = batches[0]
            if target not in (NOTHING, batch):
                raise MismatchError(f"{where}the batch has {batch} rows but the target has {target}")
            signatures = {_most(rows, ranks, 5) for ranks in shards}
            if len(signatures) > 1 and len(set(batches)) == 1:
                raise MismatchError(f"{where}the ranks along tp work on one batch, but its tensors differ in shape or dtype")
            for shard, other in enumerate(batches):
                if other != batches[0]:
                    told = f"{batch} rows at tp 0, {other[0]} at tp {shard}"
                    raise MismatchError(f"{where}the ranks along tp work on one batch, but it has {told}")
        for copies in self.position.stages:
            if len({rows[rank][6] for rank in copies}) > 1:
                told = f"ranks {', '.join(map(str, copies))} have the same stages, but not the same parameters"
                raise MismatchError(f"{told} frozen, or not the same autocast: they must be alike")
        if len({_most(rows, ranks, 4) > 0 for ranks in self.position.counted}) > 1:
            raise MismatchError("some replicas have a loss_weight= and others have none: give all of them the same")
        if len({_most(rows, ranks, 3) == NOTHING for ranks in self.position.counted}) > 1:
            raise MismatchError("some replicas have a target and others have none: give each of them one, or none of them")


def _kind(row: Sequence[float]) -> tuple[float, ...]:
    """What of a vote is the same in every step of the same kind."""
    return *row[:1], *row[2:]


def _most(rows: Sequence[Sequence[float]], ranks: Sequence[int], column: int) -> int:
    """The number that the ranks which have one say."""
    return int(max(rows[rank][column] for rank in ranks))
