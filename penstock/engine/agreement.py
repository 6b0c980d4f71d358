"""What all ranks agree on before a step's data flows: each tells a vote, and reads the same from all votes."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.comms.control_group import ControlGroup
from penstock.comms.transport.channels import MessageSpecs
from penstock.engine.batch import CASTS, NOTHING, Batch, Vote
from penstock.engine.checks.factor import TOLERANCE
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Size
from penstock.schedule.rank_program import RankProgram, RankPrograms
from penstock.stage.microbatch import loss_shares, rows_dim_hint, split_sizes

REMEMBERED = 64  # kinds of batch whose messages and memory are known
ALIKE: Mapping[str, tuple[str, Callable[[float], str]]] = {  # what every vote must have the same
    "step": ("are apart", lambda step: f"is at step {step:.0f}"),
    "scale": ("do not scale their gradients alike", lambda scale: f"has scale={scale:.6g}"),
    "autocast": ("are not all in the same torch.autocast", lambda cast: f"is in {_cast(cast)}"),
}


def _cast(cast: float) -> str:
    dtype = CASTS[int(cast)]
    return "none" if dtype is None else f"one of {str(dtype).removeprefix('torch.')}"


class Known(NamedTuple):
    """What a step taught about its kind of batch."""

    specs: MessageSpecs  # what its messages are like
    sizes: Mapping[int, Size]  # stage -> bytes that a microbatch keeps there, for this rank's stages where that was measured


class Agreed(NamedTuple):
    """What all ranks know of the step, read from all votes."""

    program: RankProgram  # what of the table this rank runs
    rows: Sequence[int]  # of each microbatch
    weights: Sequence[float]  # of each microbatch in the loss over all replicas, if there is a target
    without_backward: frozenset[int]  # microbatches of weight 0
    counts: bool  # whether any has another, in any replica
    alike: bool  # whether all replicas have as many microbatches, and the same ones of weight 0
    wants_losses: bool  # of each microbatch, on some rank
    kind: tuple[object, ...]
    known: Known | None  # None in the first step of its kind


class Agreement:
    """The votes of one pipeline, and of those beside it, and what the last kinds of batch taught."""

    def __init__(self, control: ControlGroup, position: MeshPosition, programs: RankPrograms) -> None:
        self.control, self.position, self.programs = control, position, programs
        self._known: dict[tuple[object, ...], Known] = {}  # the last kind last
        self._said: tuple[Sequence[tuple[float, ...]], bool] = [], False  # what the votes said last
        self._agreed: Agreed  # which is what that came to
        self._warned = set[str]()  # of what

    def is_known(self, vote: Vote) -> bool:
        """Whether this rank has voted so in a step that is remembered: all it can know before it hears the others."""
        return any(vote.kind in kind for kind in self._known)

    def reach(self, batch: Batch, what: str) -> Agreed:
        """Hear the others. Raises MismatchError, the same on every rank, if the votes do not fit together."""
        votes = [Vote(*row) for row in self.control.finish_all_gather_row(what)]
        check_alike(votes)
        self._check_factors([vote.factor for vote in votes])
        self._check_stepped([vote.stepped for vote in votes])
        said = [vote.kind for vote in votes], any(vote.wants_losses for vote in votes)
        if said != self._said or any(vote.counts for vote in votes):
            self._check_rows(votes, batch, what)
            check_kind(votes, self.position)
            self._said, self._agreed = said, self._read(votes, batch, what)
        check_values(votes, self.position)
        return self._agreed._replace(known=self._known.get(self._agreed.kind))

    def _check_rows(self, votes: Sequence[Vote], batch: Batch, what: str) -> None:
        """Raises MismatchError, with the shapes, if inputs and target of a replica differ in rows."""
        pipelines = self.position.replica_pipelines
        counts = [(_said(votes, ranks, "rows"), _said(votes, ranks, "target_rows")) for ranks in pipelines]
        apart = [replica for replica, (rows, target_rows) in enumerate(counts) if target_rows not in (NOTHING, rows)]
        if not apart:
            return

        shapes = self.control.all_gather_object(batch.shapes(), what)
        rows, target_rows = counts[apart[0]]
        read = ", ".join([text for rank in self.position.replica_pipelines[apart[0]] for text in shapes[rank]])
        told = f"{_where(self.position, apart[0])}the batch has {rows:.0f} rows but the target has {target_rows:.0f} ({read})"
        raise MismatchError(f"{told}; {rows_dim_hint(batch.call.rows_dim)}")

    def _check_factors(self, factors: Sequence[float]) -> None:
        """Warn of ranks that multiplied their gradients by other numbers."""
        known = {rank: factor for rank, factor in enumerate(factors) if factor == factor}
        if known and max(known.values()) > min(known.values()) * (1 + 2 * TOLERANCE):
            several = ", ".join(f"by {factor:.3g} on rank {rank}" for rank, factor in known.items())
            self._warn(
                "factors",
                f"gradients were multiplied {several}, as clipping by the norm of a list of parameters "
                "does, which is one rank's: clip with pipe.clip_grad_norm_(max_norm), by the norm of the whole model",
            )

    def _check_stepped(self, stepped: Sequence[float]) -> None:
        """Warn of ranks whose optimizer has made no step where that of others has."""
        changed, same = ("/".join(str(rank) for rank, each in enumerate(stepped) if each == value) for value in (1.0, 0.0))
        if changed and same:
            self._warn(
                "steps",
                f"weights have changed on rank {changed}, but none that had a gradient on rank {same}: "
                "call optimizer.step(), and all but what prints and logs, on all ranks",
            )

    def _warn(self, what: str, text: str) -> None:
        """Once, on rank 0, of what scripts do between two steps."""
        if what not in self._warned and self.position.world.rank == 0:
            warnings.warn(f"since the last step {text}", stacklevel=9)
        self._warned.add(what)

    def _read(self, votes: Sequence[Vote], batch: Batch, what: str) -> Agreed:
        """What the votes come to, but for what is known of their kind."""
        rows = [int(_said(votes, ranks, "rows")) for ranks in self.position.replica_pipelines]
        most = self.programs.program.schedule.microbatches
        microbatches = [split_sizes(each, min(each, most)) for each in rows]
        weights = self._weights(votes, microbatches, batch, what)
        skipped = [frozenset(number for number, weight in enumerate(each) if not weight) for each in weights]
        mine = self.position.replica
        return Agreed(
            program=self.programs.of(batch.training, len(microbatches[mine]), skipped[mine]),
            rows=microbatches[mine],
            weights=weights[mine],
            without_backward=skipped[mine],
            counts=any(map(any, weights)),
            alike=len({(len(each), skips) for each, skips in zip(microbatches, skipped, strict=True)}) == 1,
            wants_losses=any(vote.wants_losses for vote in votes),
            kind=(skipped[mine], *[vote.kind for vote in votes]),
            known=None,
        )

    def keep(self, agreed: Agreed, known: Known) -> None:
        """The step is over: what it taught holds for the next of its kind. All ranks forget the same kinds."""
        self._known.pop(agreed.kind, None)
        self._known[agreed.kind] = known
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def forget(self) -> None:
        """A step failed: some ranks may know what others do not."""
        self._known.clear()

    def _weights(
        self, votes: Sequence[Vote], microbatches: Sequence[Sequence[float]], batch: Batch, what: str
    ) -> Sequence[Sequence[float]]:
        """For every replica, each microbatch's share of the loss: by rows, or by what `loss_weight` counts; 1 of a sum."""
        if all(vote.target_rows == NOTHING for vote in votes):
            return [[] for _ in microbatches]
        if batch.call.reduction == "sum":
            return [[1.0] * len(rows) for rows in microbatches]
        counts = microbatches
        if any(vote.counts for vote in votes):
            told = self.control.all_gather_object(batch.counts, what)
            counts = [next(filter(None, (told[rank] for rank in ranks))) for ranks in self.position.replica_pipelines]
        total = sum(map(sum, counts))
        return [loss_shares(each, total) for each in counts]


def check_alike(votes: Sequence[Vote]) -> None:
    """Raises MismatchError if the ranks are not about to run the same step."""
    for name, (differ, said) in ALIKE.items():
        first, *others = [getattr(vote, name) for vote in votes]
        for rank, other in enumerate(others, 1):
            if other != first:
                raise MismatchError(f"the ranks {differ}: rank 0 {said(first)}, rank {rank} {said(other)}")


def check_kind(votes: Sequence[Vote], position: MeshPosition) -> None:
    """Raises MismatchError if the kinds of batch that `votes` tell, of all ranks, do not fit together."""
    for replica, pipelines in enumerate(position.pipelines):
        _check_batch(votes, pipelines, _where(position, replica))
    for copies in position.stage_ranks:
        if len({votes[rank].trained for rank in copies}) > 1:
            told = f"ranks {', '.join(map(str, copies))} have the same stages, but not the same parameters"
            raise MismatchError(f"{told} frozen: they must be alike")
    if len({_said(votes, ranks, "counts") > 0 for ranks in position.replica_pipelines}) > 1:
        raise MismatchError("some replicas have a loss_weight= and others have none: give all of them the same")
    if len({_said(votes, ranks, "target_rows") == NOTHING for ranks in position.replica_pipelines}) > 1:
        raise MismatchError("some replicas have a target and others have none: give each of them one, or none of them")


def _where(position: MeshPosition, replica: int) -> str:
    return f"replica {replica}: " if position.num_replicas > 1 else ""


def _check_batch(votes: Sequence[Vote], pipelines: Sequence[Sequence[int]], where: str) -> None:
    """The inputs and the target of one replica, which all its `pipelines`, those along tp, are given."""
    batches = [(_said(votes, ranks, "rows"), _said(votes, ranks, "target_rows")) for ranks in pipelines]
    for shard, other in enumerate(batches):
        if other != batches[0]:
            told = f"{batches[0][0]:.0f} rows at tp 0, {other[0]:.0f} at tp {shard}"
            raise MismatchError(f"{where}the ranks along tp work on one batch, but it has {told}")
    if len({_said(votes, ranks, "signature") for ranks in pipelines}) > 1:
        raise MismatchError(f"{where}the ranks along tp work on one batch, but its tensors differ in shape or dtype")


def check_values(votes: Sequence[Vote], position: MeshPosition) -> None:
    """Raises MismatchError if inputs of some rows would meet the target of others.

    Where a rank that reads the inputs was given their target, that is all there is to compare: inputs that nobody reads may
    differ, by a random crop for instance.
    """
    for replica, pipelines in enumerate(position.pipelines):
        everyone = [rank for ranks in pipelines for rank in ranks]
        readers = [rank for rank in everyone if votes[rank].rows != NOTHING]  # of the inputs
        compared = readers if all(votes[rank].target for rank in readers) else everyone
        for what, ranks in (("target", everyone), ("inputs", compared)):
            told = [rank for rank in ranks if getattr(votes[rank], what)]
            for rank in told:
                if getattr(votes[rank], what) != getattr(votes[told[0]], what):
                    raise MismatchError(
                        f"{_where(position, replica)}rank {rank}'s batch is another than rank {told[0]}'s: they were given "
                        f"different values as {what}. Give both the same rows (pipe.sampler(dataset), one seed for all "
                        "loaders, no batch skipped on one rank alone), or None where they are not read"
                    )


def _said(votes: Sequence[Vote], ranks: Sequence[int], what: str) -> float:
    """The number that the one of `ranks` says which has one; the others say NOTHING or 0."""
    return max(getattr(votes[rank], what) for rank in ranks)
