"""The handshake before a step's data flows: each rank sends a header, reads all headers, and draws the same conclusions."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.comms.control_group import ControlGroup
from penstock.engine.batch import AUTOCAST_DTYPES, NO_ROWS, LocalBatch, StepHeader
from penstock.engine.microbatch_list import ReplicaList, check_same_row_counts, exchange_lists
from penstock.engine.sequence import slice_lengths
from penstock.errors import MismatchError
from penstock.guards.gradient_factor import TOLERANCE
from penstock.mesh.position import MeshPosition
from penstock.schedule.memory import ActivationSize
from penstock.schedule.rank_program import RankProgram, RankPrograms
from penstock.stage.microbatch import loss_shares, rows_dim_hint, split_sizes

MAX_LEARNED_KINDS = 64  # kinds of batch whose memory is remembered

# Fields of the header that must be equal on all ranks -> the two halves of the error, of which one describes a value.
EQUAL_FIELDS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "steps_before": ("are apart", lambda step: f"is at step {step:.0f}"),
    "user_scale": ("do not scale their gradients alike", lambda scale: f"has scale={scale:.6g}"),
    "training_mode": (
        "have models in different modes (call model.train() or model.eval() on all ranks)",
        lambda mode: f"is in {'training' if mode else 'evaluation'} mode",
    ),
    "autocast_index": ("are not all in the same torch.autocast", lambda index: f"is in {_autocast_name(index)}"),
}


def _autocast_name(autocast_index: float) -> str:
    dtype = AUTOCAST_DTYPES[int(autocast_index)]
    return "none" if dtype is None else f"one of {str(dtype).removeprefix('torch.')}"


ActivationSizes = Mapping[int, ActivationSize]  # stage of this rank -> bytes that a microbatch keeps, if known


class HandshakeResult(NamedTuple):
    """The settings of one step, which every rank has read from all headers."""

    program: RankProgram  # what this rank runs
    microbatch_rows: Sequence[int]
    loss_shares: Sequence[float]  # of each microbatch, or slice, in the loss over all replicas; empty without a target
    forward_only_microbatches: frozenset[int]  # microbatches of share 0
    has_backward: bool  # whether any microbatch of any replica has another share
    same_on_replicas: bool  # whether all replicas have as many microbatches, and the same ones of share 0
    wants_losses: bool  # whether a rank wants the loss of each microbatch
    batch_kind: tuple[object, ...]
    lists: Sequence[ReplicaList]  # of each replica, if the step is over a list of microbatches
    message_signatures: Sequence[object]  # of each microbatch: those of one signature are expected to have equal messages
    token_shares: Sequence[float]  # of this rank's tokens, or of each slice, in its microbatch's loss; 1 unless tokens are cut
    sequence_lengths: Sequence[int]  # the tokens of each rank along cp, if there are several
    slice_lengths: Sequence[int]  # the tokens of each slice, if microbatches have several
    learned: ActivationSizes | None  # None in the first step of its kind


class StepHandshake:
    """Exchanges the headers of all ranks of the job, and remembers what earlier steps have shown of each kind of batch."""

    def __init__(self, control: ControlGroup, position: MeshPosition, programs: RankPrograms) -> None:
        self.control, self.position, self.programs = control, position, programs
        self._learned: dict[tuple[object, ...], ActivationSizes] = {}  # by kind of batch, the oldest first
        self._last_kinds: tuple[Sequence[tuple[float, ...]], bool] = [], False  # what `_last_result` was read from
        self._last_result: HandshakeResult
        self._warned = set[str]()  # the warnings that have been given

    def has_learned(self, header: StepHeader) -> bool:
        """Whether this rank remembers a step with this header: all it can know before the others' have come."""
        return any(header.batch_kind in batch_kind for batch_kind in self._learned)

    def finish_exchange(self, batch: LocalBatch, wait_reason: str) -> HandshakeResult:
        """Receive all headers. Raise MismatchError, the same on every rank, if they do not fit together."""
        headers = [StepHeader(*row) for row in self.control.finish_all_gather_row(wait_reason)]
        check_same_step(headers)
        self._warn_of_unequal_gradient_factors([header.gradient_factor for header in headers])
        self._warn_of_missing_optimizer_step([header.weights_changed for header in headers])

        # Loss weights and lists are not in the header: where there are any, the shares are computed anew.
        kinds = [header.batch_kind for header in headers], any(header.wants_losses for header in headers)
        if kinds != self._last_kinds or any(header.num_loss_weights for header in headers) or batch.summary is not None:
            self._check_target_rows(headers, batch, wait_reason)
            check_matching_batches(headers, self.position)
            self._last_kinds, self._last_result = kinds, self._result_of_headers(headers, batch, wait_reason)

        check_same_inputs_and_targets(headers, self.position)
        return self._last_result._replace(learned=self._learned.get(self._last_result.batch_kind))

    def remember(self, result: HandshakeResult, learned: ActivationSizes) -> None:
        """Remember what a step has shown about its kind of batch. All ranks forget the same kinds, the oldest first."""
        self._learned.pop(result.batch_kind, None)
        self._learned[result.batch_kind] = learned
        if len(self._learned) > MAX_LEARNED_KINDS:
            del self._learned[next(iter(self._learned))]

    def forget_learned(self) -> None:
        """Forget all kinds. After a failed step some ranks may have learned what others have not."""
        self._learned.clear()

    def _check_target_rows(self, headers: Sequence[StepHeader], batch: LocalBatch, wait_reason: str) -> None:
        """Raise MismatchError, with all shapes, if inputs and target of a replica differ in rows."""
        counts = [
            (_max_field(headers, ranks, "input_rows"), _max_field(headers, ranks, "target_rows"))
            for ranks in self.position.replica_pipelines
        ]
        unequal = [replica for replica, (rows, target_rows) in enumerate(counts) if target_rows not in (NO_ROWS, rows)]
        if not unequal:
            return

        replica = unequal[0]
        rows, target_rows = counts[replica]
        prefix = self.position.replica_prefix(replica)
        all_rows = self.control.all_gather_value(batch.row_counts(), wait_reason)
        rows_by_rank = {rank: all_rows[rank] for rank in self.position.replica_pipelines[replica]}
        check_same_row_counts(rows_by_rank, prefix, is_list=batch.summary is not None)
        if batch.summary is not None:
            raise MismatchError(
                f"{prefix}{batch.call.name} was given {rows:.0f} inputs but {target_rows:.0f} targets: give one target for each"
            )
        shapes = self.control.all_gather_value(batch.describe_shapes(), wait_reason)
        shape_list = ", ".join([text for rank in self.position.replica_pipelines[replica] for text in shapes[rank]])
        raise MismatchError(
            f"{prefix}the batch has {rows:.0f} rows but the target has {target_rows:.0f} ({shape_list}); "
            f"{rows_dim_hint(batch.call.rows_dim)}"
        )

    def _warn_of_unequal_gradient_factors(self, factors: Sequence[float]) -> None:
        """Warn if ranks have multiplied their gradients by different numbers since the last step."""
        known_factors = {rank: factor for rank, factor in enumerate(factors) if factor == factor}
        if known_factors and max(known_factors.values()) > min(known_factors.values()) * (1 + 2 * TOLERANCE):
            factor_list = ", ".join(f"by {factor:.3g} on rank {rank}" for rank, factor in known_factors.items())
            self._warn_once(
                "factors",
                f"gradients were multiplied {factor_list}, as clipping by the norm of a list of parameters "
                "does, which is one rank's: clip with pipe.clip_grad_norm_(max_norm), by the norm of the whole model",
            )

    def _warn_of_missing_optimizer_step(self, weights_changed: Sequence[float]) -> None:
        """Warn if weights have changed on some ranks since the last step, and on others not."""
        changed, unchanged = (
            "/".join(str(rank) for rank, flag in enumerate(weights_changed) if flag == value) for value in (1.0, 0.0)
        )
        if changed and unchanged:
            self._warn_once(
                "steps",
                f"weights have changed on rank {changed}, but none that had a gradient on rank {unchanged}: "
                "call optimizer.step(), and all but what prints and logs, on all ranks",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned and self.position.world.rank == 0:
            warnings.warn(f"since the last step {text}", stacklevel=9)
        self._warned.add(key)

    def _result_of_headers(self, headers: Sequence[StepHeader], batch: LocalBatch, wait_reason: str) -> HandshakeResult:
        """Return the step's settings, except for what earlier steps have shown."""
        lists: list[ReplicaList] = []
        if batch.summary is not None:
            lists = exchange_lists(self.control, self.position, batch.summary, batch.row_counts, wait_reason)
            microbatch_rows = [replica_list.rows for replica_list in lists]
        else:
            max_microbatches = self.programs.program.schedule.microbatches
            replica_rows = [int(_max_field(headers, ranks, "input_rows")) for ranks in self.position.replica_pipelines]
            microbatch_rows = [split_sizes(rows, min(rows, max_microbatches)) for rows in replica_rows]
        cp, replica = self.position.cp_size, self.position.replica
        lengths: Sequence[Sequence[int]] = ()
        if cp > 1 or batch.call.has_slices:
            tokens = [_sequence_length(headers, self.position, replica) for replica in range(self.position.replicas)]
            lengths = [split_sizes(num, cp) if cp > 1 else slice_lengths(batch.call.slices, num) for num in tokens]
        slices = self.programs.program.schedule.slices
        loss_shares = self._loss_shares(headers, microbatch_rows, lengths, batch, lists, wait_reason)

        # Of each replica, the shares of a microbatch's parts. All of them have a backward or none: ranks along cp wait for each
        # other, and an earlier slice gets gradients from later ones.
        columns = [
            [[share for row in parts for share in row[first : first + slices]] for first in range(0, len(parts[0]), slices)]
            for parts in (loss_shares[first : first + cp] for first in range(0, len(loss_shares), cp))
        ]
        skipped = [frozenset(number for number, shares in enumerate(column) if not any(shares)) for column in columns]
        shapes = {(len(rows), numbers) for rows, numbers in zip(microbatch_rows, skipped, strict=True)}
        kind = (skipped[replica], tuple(map(tuple, lengths)), *[header.batch_kind for header in headers])
        return HandshakeResult(
            program=self.programs.select(batch.training, len(microbatch_rows[replica]), skipped[replica]),
            microbatch_rows=microbatch_rows[replica],
            loss_shares=loss_shares[self.position.batch_part_index],
            forward_only_microbatches=skipped[replica],
            has_backward=any(map(any, loss_shares)),
            same_on_replicas=len(shapes) == 1,
            wants_losses=any(header.wants_losses for header in headers),
            batch_kind=kind,
            lists=lists,
            message_signatures=(
                _message_signatures(headers, lists[replica], skipped[replica])
                if lists
                else [(kind, rows, number in skipped[replica]) for number, rows in enumerate(microbatch_rows[replica])]
            ),
            token_shares=[
                share / sum(shares) if batch.call.reduction == "mean" and any(shares) else 1.0
                for number, share in enumerate(loss_shares[self.position.batch_part_index])
                for shares in [columns[replica][number // slices]]
            ],
            sequence_lengths=lengths[replica] if cp > 1 else (),
            slice_lengths=lengths[replica] if slices > 1 else (),
            learned=None,
        )

    def _loss_shares(
        self,
        headers: Sequence[StepHeader],
        microbatch_rows: Sequence[Sequence[float]],
        sequence_lengths: Sequence[Sequence[int]],
        batch: LocalBatch,
        lists: Sequence[ReplicaList],
        wait_reason: str,
    ) -> Sequence[Sequence[float]]:
        """Return, for every part of the batch, each microbatch's share of the loss: by rows and tokens or by `loss_weight`.

        For a sum it is 1. `microbatch_rows` and `sequence_lengths` (empty unless tokens are cut) are of every replica.
        """
        parts = self.position.batch_part_pipelines
        if all(header.target_rows == NO_ROWS for header in headers):
            return [[] for _ in parts]

        weights = microbatch_rows
        if sequence_lengths:
            replicas = zip(microbatch_rows, sequence_lengths, strict=True)
            if batch.call.has_slices:
                weights = [[row * length for row in rows for length in lengths] for rows, lengths in replicas]
            else:
                weights = [[row * length for row in rows] for rows, lengths in replicas for length in lengths]
        if batch.call.reduction == "sum":
            return [[1.0] * len(row) for row in weights]
        if lists:
            weights = [replica_list.loss_weights or replica_list.rows for replica_list in lists]
        elif any(header.num_loss_weights for header in headers):
            rank_weights = self.control.all_gather_value(batch.loss_weights, wait_reason)
            weights = [next(filter(None, (rank_weights[rank] for rank in ranks))) for ranks in parts]
        total = sum(map(sum, weights))
        return [loss_shares(row, total) for row in weights]


def _message_signatures(
    headers: Sequence[StepHeader], replica_list: ReplicaList, forward_only_microbatches: frozenset[int]
) -> list[object]:
    """Return, for each microbatch of a list, all that its messages depend on."""
    settings = tuple((header.training, header.requires_grad_hash, header.autocast_index) for header in headers)
    return [(settings, text, number in forward_only_microbatches) for number, text in enumerate(replica_list.signatures)]


def check_same_step(headers: Sequence[StepHeader]) -> None:
    """Raise MismatchError if the ranks are not about to run the same step."""
    for field, (difference, describe) in EQUAL_FIELDS.items():
        expected, *values = [getattr(header, field) for header in headers]
        for rank, value in enumerate(values, 1):
            if value != expected:
                raise MismatchError(f"the ranks {difference}: rank 0 {describe(expected)}, rank {rank} {describe(value)}")


def check_matching_batches(headers: Sequence[StepHeader], position: MeshPosition) -> None:
    """Raise MismatchError if ranks along tp or cp have different batches, or replicas differ in what is trained or weighted."""
    for replica, pipelines in enumerate(position.pipelines):
        _check_same_batch_in_replica(headers, pipelines, position.replica_prefix(replica))

    for ranks in position.stage_ranks:
        if len({headers[rank].requires_grad_hash for rank in ranks}) > 1:
            rank_list = ", ".join(map(str, ranks))
            raise MismatchError(
                f"ranks {rank_list} have the same stages, but not the same parameters frozen: they must be alike"
            )

    if len({_max_field(headers, ranks, "num_loss_weights") > 0 for ranks in position.replica_pipelines}) > 1:
        raise MismatchError("some replicas have a loss_weight= and others have none: give all of them the same")
    if len({_max_field(headers, ranks, "target_rows") == NO_ROWS for ranks in position.replica_pipelines}) > 1:
        raise MismatchError("some replicas have a target and others have none: give each of them one, or none of them")


def _check_same_batch_in_replica(headers: Sequence[StepHeader], pipelines: Sequence[Sequence[int]], prefix: str) -> None:
    """Raise MismatchError if the pipelines of one replica, which lie along tp and cp, have different batches."""
    rows = [(_max_field(headers, ranks, "input_rows"), _max_field(headers, ranks, "target_rows")) for ranks in pipelines]
    for shard, shard_rows in enumerate(rows):
        if shard_rows != rows[0]:
            difference = f"{rows[0][0]:.0f} rows at tp 0, {shard_rows[0]:.0f} at tp {shard}"
            raise MismatchError(f"{prefix}the ranks along tp work on one batch, but it has {difference}")
    if len({_max_field(headers, ranks, "input_signature") for ranks in pipelines}) > 1:
        raise MismatchError(f"{prefix}the ranks along tp work on one batch, but its tensors differ in shape or dtype")


def check_same_inputs_and_targets(headers: Sequence[StepHeader], position: MeshPosition) -> None:
    """Raise MismatchError if inputs of some rows would meet the target of others.

    If every rank that reads the inputs was given their target, only targets are compared: inputs on ranks that do not read
    them may differ, by a random crop for instance.
    """
    for replica, pipelines in enumerate(position.pipelines):
        replica_ranks = [rank for ranks in pipelines for rank in ranks]
        readers = [rank for rank in replica_ranks if headers[rank].input_rows != NO_ROWS]
        input_ranks = readers if all(headers[rank].target_hash for rank in readers) else replica_ranks

        for name, field, ranks in (("target", "target_hash", replica_ranks), ("inputs", "inputs_hash", input_ranks)):
            hashes = {rank: getattr(headers[rank], field) for rank in ranks if getattr(headers[rank], field)}
            for rank, value in hashes.items():
                first_rank, expected = next(iter(hashes.items()))
                if value != expected:
                    raise MismatchError(
                        f"{position.replica_prefix(replica)}rank {rank}'s batch is another than rank {first_rank}'s: they "
                        f"were given different values as {name}. Give both the same rows (pipe.sampler(dataset), one seed for "
                        "all loaders, no batch skipped on one rank alone), or None where they are not read"
                    )


def _sequence_length(headers: Sequence[StepHeader], position: MeshPosition, replica: int) -> int:
    """Return the tokens of a replica's sequences. Raise MismatchError if inputs and target differ in it."""
    lengths = {headers[rank].sequence_length for ranks in position.pipelines[replica] for rank in ranks} - {0.0}
    if len(lengths) != 1:
        numbers = " and ".join(f"{length:.0f}" for length in sorted(lengths))
        raise MismatchError(f"{position.replica_prefix(replica)}inputs and target have {numbers} tokens a row: give as many")
    return int(lengths.pop())


def _max_field(headers: Sequence[StepHeader], ranks: Sequence[int], field: str) -> float:
    """Return the field of the one of `ranks` that has a value; the others have NO_ROWS or 0."""
    return max(getattr(headers[rank], field) for rank in ranks)
