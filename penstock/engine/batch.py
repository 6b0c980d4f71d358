"""The call of a step and its checks, and from it this rank's share of the batch, split into microbatches."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.topology import Topology
from penstock.engine.loss import Reduction, RowwiseLossCheck
from penstock.engine.microbatch_list import (
    MicrobatchListSummary,
    ReplicaList,
    RowCounts,
    comparable_order,
    count_entry_rows,
    merge_summaries,
    microbatch_order,
    read_inputs,
    read_targets,
)
from penstock.engine.optimizers import make_scaler_flags_binary
from penstock.engine.sequence import (
    check_arguments_can_be_cut,
    kwargs_with_position_ids,
    sequence_length,
    slice_lengths,
    take_tokens,
)
from penstock.errors import MismatchError
from penstock.guards.digest import cached_hash48, hash_values
from penstock.mesh.position import MeshPosition
from penstock.plan.grouping import Limit
from penstock.plan.microbatch_costs import MicrobatchCosts
from penstock.randomness import mix_in, mix_seed
from penstock.schedule.table import Action, Table
from penstock.stage import microbatch
from penstock.stage.sliced_attention import SequenceSlice
from penstock.stage.stage import Stage

NO_ROWS = -1  # in place of the rows of a batch of which this rank reads nothing
AUTOCAST_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class StepCall(NamedTuple):
    """One call of `step()` or `eval()`, as the user made it."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    steps_before: int
    has_loss: bool
    reduction: Reduction = "mean"
    loss_weight: Callable[[Any], Any] | None = None
    seed: int | None = None
    scaler: torch.amp.GradScaler | None = None
    user_scale: float = 1.0  # of the gradients, besides the scaler's
    losses_list: list[Tensor] | None = None  # gets each microbatch's loss
    wants_outputs: bool = False  # on the last stage's rank
    rows_dim: int = 0
    sequence_dim: int = 1
    slices: int | Sequence[int] = 1  # of a microbatch's tokens, or their lengths
    rowwise_check: RowwiseLossCheck | None = None
    order: str | Sequence[int] | None = None  # of `step_microbatches`, whose inputs and target are lists; else None
    microbatch_costs: MicrobatchCosts | None = None  # for `order="planned"`
    limit: Limit = None  # of what is in flight on a rank, in a step over a list
    gradient_factor: float = math.nan  # of this rank since the last step, see checks/gradient_factor.py
    weights_changed: float = math.nan  # 1 if this rank's weights have changed since the last step, 0 if not
    training_mode: bool = True  # of the model that was cut, if it is to be trained

    @property
    def name(self) -> str:
        """The method that was called."""
        name = "step" if self.training else "eval"
        return f"{name}()" if self.order is None else f"{name}_microbatches()"

    @property
    def has_slices(self) -> bool:
        """Whether microbatches run in slices."""
        return self.slices != 1

    @property
    def has_one_input(self) -> bool:
        """Whether it was given one tensor, or one tree of them, without keywords: the common case, with a short way."""
        return len(self.args) == 1 and not self.kwargs

    @property
    def inputs(self) -> Any:
        """The one input, or (args, kwargs); of `step_microbatches`, the list."""
        return self.args[0] if self.has_one_input else (self.args, self.kwargs)


class StepHeader(NamedTuple):
    """A rank's message to all others before a step: numbers, as float64. A hash is 0 if it was not taken."""

    training: float
    input_rows: float
    target_rows: float
    num_loss_weights: float
    sequence_length: float  # tokens of a row, if they are cut; else 0
    input_signature: float  # a hash of the inputs' structure, shapes and dtypes
    requires_grad_hash: float  # of this rank's parameters
    autocast_index: float  # in AUTOCAST_DTYPES
    steps_before: float
    user_scale: float
    training_mode: float  # whether the model is in training mode; 1 for an evaluation, and for stages of a user's own
    wants_losses: float  # whether this rank wants the loss of each microbatch
    inputs_hash: float
    target_hash: float
    gradient_factor: float  # of this rank's gradients since the last step; NaN: not known
    weights_changed: float  # whether an optimizer has changed weights since the last step; NaN: not known

    @property
    def batch_kind(self) -> tuple[float, ...]:
        """The fields that are equal in every step of the same kind."""
        return self[:8]


class LocalBatch(NamedTuple):
    """This rank's share of the batch: the tensors for its actions, and the header for the other ranks."""

    call: StepCall
    header: StepHeader
    # Of each microbatch; of its slices, if its tokens are cut, one after the other.
    inputs: Sequence[tuple[Any, Any]]  # (args, kwargs), on the first stage's rank
    targets: Sequence[Any]  # on the last stage's rank
    loss_weights: Sequence[float]  # `loss_weight(target)`, there
    seed: int | None  # of this step's random numbers; None for torch's generator
    grad_scale: float  # of all gradients: the scaler's, the user's, and the number of parts of the batch
    summary: MicrobatchListSummary | None = None  # of a list of microbatches
    first_seed_index: int = 0  # of the replica's first microbatch, for random numbers
    order: Sequence[int] = ()  # of a list: position in the step -> index in the list
    slice_lengths: Sequence[int] = ()  # the tokens of each slice, if they are cut and known

    @property
    def num_slices(self) -> int:
        """The number of slices of a microbatch."""
        return len(self.slice_lengths) or 1

    def sequence_slice(self, action: Action) -> SequenceSlice | None:
        """Return the slice that a forward runs; None unless tokens are cut."""
        if not self.slice_lengths:
            return None
        return SequenceSlice(action.microbatch, action.slice, self.slice_lengths, self.call.sequence_dim)

    @property
    def training(self) -> bool:
        """Whether it is a training step, not an evaluation."""
        return self.call.training

    def with_targets_in_run_order(self, lists: Sequence[ReplicaList], replica: int) -> "LocalBatch":
        """Return the batch with the targets in the order of the inputs, once all ranks know each replica's list."""
        order = lists[replica].order
        return self._replace(
            targets=[self.targets[index] for index in order] if self.targets else (),
            order=order,
            first_seed_index=sum(len(earlier.rows) for earlier in lists[:replica]),
        )

    def microbatch_seed(self, number: int) -> int | None:
        """Return the seed of a microbatch's random numbers, by its number or a slice's, whatever the order of a list."""
        if self.seed is None:
            return None
        return mix_in(self.seed, self.first_seed_index + (self.order[number] if self.order else number // self.num_slices))

    def describe_shapes(self) -> list[str]:
        """Return the shapes of inputs and target in words, of those that this rank reads."""
        trees = (("the batch", self.call.inputs, self.inputs), ("the target", self.call.target, self.targets))
        return [microbatch.describe_shapes(tree, name, self.call.rows_dim) for name, tree, pieces in trees if pieces]

    def row_counts(self) -> RowCounts:
        """Return the rows of all that this rank was given, whether it reads them or not: of inputs and of target."""
        inputs, target = self.call.inputs, self.call.target
        entries = (inputs, target) if self.summary is not None else ([inputs], [target])
        rows, target_rows = (count_entry_rows(entry, self.call.rows_dim) for entry in entries)
        return rows, target_rows

    def forward_inputs(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs of a forward: the batch's on the first stage, else the `values` received from other stages."""
        return values if action.stage else self.inputs[action.index_among_slices(self.num_slices)]


def split_batch(
    call: StepCall,
    mesh_position: MeshPosition,
    schedule: Table,
    requires_grad: bytes = b"",
    forward_signature: inspect.Signature | None = None,
    table_of: Callable[[int], Table] | None = None,
) -> LocalBatch:
    """Split a call's batch into microbatches, as far as this rank reads it, and write the header.

    `requires_grad`: a flag for each parameter of this rank; they decide what its stages send. `forward_signature`: the model's,
    on the first stage's rank. `table_of(microbatches)`: the table for a list, by default `schedule`.

    Raises MismatchError for inputs or a target that do not fit.
    """
    _check_options(call)
    if mesh_position.cp_size > 1 and call.order is not None:
        raise MismatchError(f"{call.name} does not cut tokens along cp: give a batch to step(), or use a mesh without cp")
    if call.has_slices and call.order is not None:
        raise MismatchError(f"{call.name} does not cut tokens into slices: give a batch to step(), or use slices=1")
    rank, device = mesh_position.pipeline.rank, mesh_position.pipeline.device
    first_rank, last_rank = schedule.placement[0], schedule.placement[-1]
    list_arguments = None if call.order is None else (comparable_order(call.order), call.limit)

    # The first stage's rank reads the inputs; of a list of microbatches, it chooses the order too.
    inputs = _LocalPart()
    if rank == first_rank and list_arguments is not None:
        inputs = _read_input_list(call, device, table_of or (lambda _: schedule))
    elif rank == first_rank:
        inputs = _split_inputs(call, mesh_position, schedule.microbatches, forward_signature)

    # The last stage's rank reads the target.
    target = _LocalPart()
    if rank == last_rank and (call.training or call.target is not None):
        _check_target(call, rank)
        if list_arguments is not None:
            target = _read_target_list(call, device)
        else:
            target = _split_target(call, mesh_position, schedule.microbatches, inputs.num_tokens)
    num_tokens = target.num_tokens or inputs.num_tokens

    summary = None
    if list_arguments is not None:
        arguments = MicrobatchListSummary(arguments=list_arguments)
        summary = merge_summaries([inputs.list_summary, target.list_summary, arguments])

    # If several ranks are given the batch, they compare some of its values, all of a small tensor.
    are_compared = rank in (first_rank, last_rank) and (first_rank != last_rank or len(mesh_position.pipelines[0]) > 1)
    hashes = (hash_values(call.inputs), hash_values(call.target)) if are_compared else (0, 0)

    header = StepHeader(
        training=call.training,
        input_rows=inputs.rows,
        target_rows=target.rows,
        num_loss_weights=len(target.loss_weights),
        sequence_length=num_tokens,
        input_signature=inputs.signature,
        requires_grad_hash=cached_hash48(requires_grad),
        autocast_index=AUTOCAST_DTYPES.index(_autocast_dtype(device)),
        steps_before=call.steps_before,
        user_scale=call.user_scale,
        training_mode=call.training_mode,
        wants_losses=call.losses_list is not None,
        inputs_hash=hashes[0],
        target_hash=hashes[1],
        gradient_factor=call.gradient_factor,
        weights_changed=call.weights_changed,
    )
    seed = mix_seed(call.seed, call.steps_before) if call.training and call.seed is not None else None
    scale = read_grad_scale(call.scaler, mesh_position.world) if call.training and call.scaler is not None else 1.0
    grad_scale = scale * call.user_scale * len(mesh_position.batch_part_pipelines)  # gradients are averaged afterwards
    first_seed_index = mesh_position.replica * schedule.microbatches
    return LocalBatch(
        call,
        header,
        inputs.microbatches,
        target.microbatches,
        target.loss_weights,
        seed,
        grad_scale,
        summary,
        first_seed_index,
        inputs.list_summary.order,
        slice_lengths(call.slices, num_tokens) if num_tokens and call.has_slices else (),
    )


class _LocalPart(NamedTuple):
    """The inputs, or the target, as far as this rank reads them."""

    microbatches: Sequence[Any] = ()  # as in LocalBatch
    rows: int = NO_ROWS  # of a list, the number of its entries
    num_tokens: int = 0  # of a row, if tokens are cut
    signature: int = 0  # of inputs
    loss_weights: Sequence[float] = ()  # of a target
    list_summary: MicrobatchListSummary = MicrobatchListSummary()


def _split_inputs(
    call: StepCall, mesh_position: MeshPosition, max_microbatches: int, forward_signature: inspect.Signature | None
) -> _LocalPart:
    _check_inputs(call, mesh_position.pipeline.rank)
    batch, num_tokens = call.inputs, 0
    sizes = microbatch.nonempty_split_sizes(batch, "the batch", max_microbatches, call.rows_dim)
    pieces, is_call = [batch], not call.has_one_input
    if mesh_position.cp_size > 1 or call.has_slices:
        assert forward_signature is not None
        pieces, num_tokens = _split_input_sequence(call, mesh_position, forward_signature)
        is_call = True
    parts = _split_rows(pieces, sizes, mesh_position.pipeline.device, call.rows_dim)
    calls = parts if is_call else [((part,), {}) for part in parts]
    return _LocalPart(calls, sum(sizes), num_tokens, cached_hash48(microbatch.batch_signature(batch).encode()))


def _read_input_list(call: StepCall, device: torch.device, table_of: Callable[[int], Table]) -> _LocalPart:
    entries, summaries = read_inputs(call.inputs, device, call.rows_dim)
    order = microbatch_order(call.order, summaries, table_of, call.microbatch_costs, call.limit)
    ordered = [entries[index] for index in order]
    summary = MicrobatchListSummary(inputs=summaries, order=order)
    return _LocalPart(ordered, len(ordered), signature=cached_hash48(b"a list"), list_summary=summary)


def _split_target(call: StepCall, mesh_position: MeshPosition, max_microbatches: int, num_input_tokens: int) -> _LocalPart:
    pieces, num_tokens = [call.target], 0
    sizes = microbatch.nonempty_split_sizes(call.target, "the target", max_microbatches, call.rows_dim)
    if mesh_position.cp_size > 1 or call.has_slices:
        pieces, num_tokens = _cut_tokens(call.target, "the target", call, mesh_position)
        if num_input_tokens not in (0, num_tokens):
            raise MismatchError(f"the batch has {num_input_tokens} tokens a row, but the target has {num_tokens}")
    loss_weights: Sequence[float] = ()
    if call.loss_weight is not None:  # computed where the target is: nothing waits for a device
        loss_weights = microbatch.microbatch_weights(_split_rows(pieces, sizes, None, call.rows_dim), call.loss_weight)
    parts = _split_rows(pieces, sizes, mesh_position.pipeline.device, call.rows_dim)
    return _LocalPart(parts, sum(sizes), num_tokens, loss_weights=loss_weights)


def _read_target_list(call: StepCall, device: torch.device) -> _LocalPart:
    targets, rows = read_targets(call.target, device, call.rows_dim)
    loss_weights = () if call.loss_weight is None else microbatch.microbatch_weights(call.target, call.loss_weight)
    shapes = [microbatch.describe_shapes(entry, "the target", call.rows_dim) for entry in call.target]
    summary = MicrobatchListSummary(target_rows=rows, target_shapes=shapes, loss_weights=loss_weights)
    return _LocalPart(targets, len(targets), loss_weights=loss_weights, list_summary=summary)


def _split_rows(pieces: Sequence[Any], sizes: Sequence[int], device: torch.device | None, rows_dim: int) -> list[Any]:
    """Split each piece, of some tokens, into microbatches. Return the pieces of the first microbatch, of the second, .."""
    columns = [microbatch.split(piece, sizes, device, rows_dim) for piece in pieces]
    return [part for row in zip(*columns, strict=True) for part in row]


def _split_input_sequence(
    call: StepCall, mesh_position: MeshPosition, forward_signature: inspect.Signature
) -> tuple[list[Any], int]:
    """Return (args, kwargs) as `_cut_tokens` does, with the positions of tokens if the model takes them."""
    check_arguments_can_be_cut(forward_signature, call.args, call.kwargs)
    num_tokens = sequence_length((call.args, call.kwargs), "the batch", call.sequence_dim)
    kwargs = kwargs_with_position_ids(forward_signature, call.args, call.kwargs, num_tokens)
    return _cut_tokens((call.args, kwargs), "the batch", call, mesh_position)


def _cut_tokens(batch: Any, what: str, call: StepCall, mesh_position: MeshPosition) -> tuple[list[Any], int]:
    """Return `batch` with the tokens of each slice, or with this rank's along cp; and the number of all tokens."""
    num_tokens = sequence_length(batch, what, call.sequence_dim)
    if call.has_slices:
        lengths = slice_lengths(call.slices, num_tokens)
        indices = range(len(lengths))
    elif num_tokens < mesh_position.cp_size:
        raise MismatchError(f"{num_tokens} tokens cannot be shared by {mesh_position.cp_size} ranks along cp: each needs one")
    else:
        lengths = microbatch.split_sizes(num_tokens, mesh_position.cp_size)
        indices = range(mesh_position.cp_index, mesh_position.cp_index + 1)
    return [take_tokens(batch, call.sequence_dim, sum(lengths[:index]), lengths[index]) for index in indices], num_tokens


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of an autocast that is on for `device`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def requires_grad_flags(stages: Iterable[Stage]) -> bytes:
    """Return a byte for each parameter of `stages`: whether it is trained."""
    return bytes(parameter.requires_grad for stage in stages for parameter in stage.parameters)


def _check_options(call: StepCall) -> None:
    if not isinstance(call.user_scale, int | float) or not math.isfinite(call.user_scale):
        scale = call.user_scale
        raise MismatchError(f"{call.name} cannot scale gradients by {scale!r}: give a number, 1/k for the mean over k batches")
    if call.losses_list is not None and not isinstance(call.losses_list, list):
        raise MismatchError(f"{call.name.removesuffix(')')}.., losses=[]) fills a list, and cannot fill {call.losses_list!r}")
    if call.training and torch.is_inference_mode_enabled():
        raise MismatchError(f"{call.name} trains, which torch.inference_mode() rules out: call it outside")


def _check_inputs(call: StepCall, rank: int) -> None:
    if call.kwargs or any(argument is not None for argument in call.args):
        return
    example = "step(inputs, target=..)" if call.training else "eval(inputs)"
    hint = "" if call.training else "; it puts the modules into evaluation mode for the batch, and back"
    raise MismatchError(f"rank {rank}: the first stage's rank was given no inputs: call pipe.{example}{hint}")


def _check_target(call: StepCall, rank: int) -> None:
    if not call.has_loss:
        raise MismatchError(f"rank {rank}: a loss needs a Pipeline with loss_fn=")
    if call.target is None:
        needed = "step() needs target=.., by that name" if call.order is None else "step_microbatches() needs targets=[..]"
        raise MismatchError(f"rank {rank}: {needed}, which the last stage's rank takes for the loss")


def read_grad_scale(scaler: torch.amp.GradScaler, topology: Topology) -> float:
    """Return the scaler's scale. Raise MismatchError for a scaler that would skip steps on one rank alone."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # the import takes a second

    if topology.world_size > 1 and scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler):
        raise MismatchError(
            f"{type(scaler).__name__} would let each of {topology.world_size} ranks skip steps by itself: "
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )
    if topology.world_size > 1:
        make_scaler_flags_binary()
    scaler.scale(torch.ones((), device=topology.device))  # a scaler creates its scale at the first use
    return scaler.get_scale()
