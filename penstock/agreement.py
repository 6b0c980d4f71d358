"""What all ranks agree on before a step's data flows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.channels import Specs
from penstock.control import Control
from penstock.errors import MismatchError
from penstock.microbatch import sizes

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
    weights: Sequence[float] = ()  # what each microbatch counts, on the last stage's rank if it is not by their rows

    def row(self) -> list[float]:
        """The vote as numbers."""
        fixed = (self.training, self.step, self.rows, self.target_rows, len(self.weights))
        return [float(number) for number in (*fixed, self.signature % _EXACT, self.local % _EXACT)]


@dataclass
class Agreed:
    """What all ranks know of the step."""

    pieces: int  # microbatches that have rows
    weights: Sequence[float]  # of each of them, if there is a target
    without_backward: frozenset[int]  # those of weight 0
    specs: Specs  # what the messages are like, or will be once the step is over
    known: bool
    key: tuple[object, ...] = field(default=(), repr=False)


class Agreement:
    """The votes of one pipeline, and the messages' descriptions for every vote that has been run before."""

    def __init__(self, control: Control, microbatches: int) -> None:
        self.control, self.microbatches = control, microbatches
        self._specs: dict[tuple[object, ...], Specs] = {}

    def vote(self, vote: Vote, what: str) -> None:
        """Tell the others; `what` says what for, should it fail. This rank may go on with what needs no other."""
        self._vote, self._what = vote, what
        self.control.tell(vote.row(), what)

    def reach(self) -> Agreed:
        """Hear the others. Raises MismatchError, the same on every rank, if the votes do not fit together."""
        vote, what = self._vote, self._what
        rows = self.control.hear(what)
        self._check(rows)
        batch, target = (int(max(row[column] for row in rows)) for column in (2, 3))
        pieces = sizes(batch, min(batch, self.microbatches))
        weights = [size / batch for size in pieces] if target != NOTHING else []
        if any(row[4] for row in rows):
            weights = next(filter(None, self.control.gather_objects(vote.weights, what)))
        skipped = frozenset(piece for piece, weight in enumerate(weights) if not weight)
        key = (self.control.generation, skipped, *(tuple(row[:1] + row[2:]) for row in rows))
        specs = self._specs.get(key)
        return Agreed(len(pieces), weights, skipped, specs or {}, specs is not None, key)

    def keep(self, agreed: Agreed) -> None:
        """The step is over: what its messages were like holds for the next of the same kind."""
        self._specs.setdefault(agreed.key, agreed.specs)

    def _check(self, rows: Sequence[Sequence[float]]) -> None:
        for rank, (training, step, *_) in enumerate(rows):
            if training != rows[0][0]:
                calls = ["step()" if row[0] else "eval()" for row in (rows[0], rows[rank])]
                raise MismatchError(f"the ranks do different things: rank 0 calls {calls[0]}, rank {rank} calls {calls[1]}")
            if step != rows[0][1]:
                raise MismatchError(f"the ranks are apart: rank 0 is at step {rows[0][1]:.0f}, rank {rank} at step {step:.0f}")
        batch, target = (int(max(row[column] for row in rows)) for column in (2, 3))
        if target not in (NOTHING, batch):
            raise MismatchError(f"the batch has {batch} rows but the target has {target}")
