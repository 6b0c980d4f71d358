"""What goes into a step: the user's call, and from it this rank's share of the batch, split into microbatches."""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.encoding import tensor_bytes
from penstock.comms.topology import Topology
from penstock.engine.checks.digest import tensor_crc
from penstock.engine.loss import Reduction, RowwiseLossCheck
from penstock.engine.microbatch_costs import MicrobatchCosts
from penstock.engine.microbatch_list import (
    ListSummary,
    ReplicaList,
    microbatch_order,
    order_argument,
    read_inputs,
    read_targets,
)
from penstock.engine.sequence import (
    check_arguments_can_be_cut,
    sequence_length,
    slice_lengths,
    take_tokens,
    with_position_ids,
)
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.partition.rows import unwrap
from penstock.randomness import mix_in, mix_seed
from penstock.schedule.table import Action, Table
from penstock.stage import microbatch
from penstock.stage.sliced_attention import SequenceSlice
from penstock.stage.stage import Stage
from penstock.trees import leaves

NO_ROWS = -1  # in place of the rows of a batch of which this rank reads nothing
MAX_DIGEST_BYTES = 2**18  # of a tensor of a batch that ranks compare whole, in 0.1 ms
MAX_HASHED_VALUES = 64  # of a larger one
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
    limit: float | None = None  # of the padded tokens in flight on a rank, in such a step
    gradient_factor: float = math.nan  # of this rank since the last step, see checks/gradient_factor.py
    weights_changed: float = math.nan  # 1 if this rank's weights have changed since the last step, 0 if not
    training_mode: bool = True  # of the model that was cut, if it is to be trained

    @property
    def name(self) -> str:
        """The method that was called."""
        name = "step" if self.training else "eval"
        return f"{name}()" if self.order is None else f"{name}_microbatches()"

    @property
    def cuts_tokens(self) -> bool:
        """Whether microbatches run in slices."""
        return self.slices != 1


class StepHeader(NamedTuple):
    """What a rank sends to all others before a step: numbers, as float64. A hash of 0 is one that was not taken."""

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
    """This rank's share of the batch: what its actions work on, and the header for the other ranks."""

    call: StepCall
    header: StepHeader
    # Of each microbatch; of its slices, if its tokens are cut, one after the other.
    inputs: Sequence[tuple[Any, Any]]  # (args, kwargs), on the first stage's rank
    targets: Sequence[Any]  # on the last stage's rank
    loss_weights: Sequence[float]  # `loss_weight(target)`, there
    seed: int | None  # of this step's random numbers; None for torch's generator
    grad_scale: float  # of all gradients: the scaler's, the user's, and the number of parts of the batch
    summary: ListSummary | None = None  # of a list of microbatches
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
        return SequenceSlice(action.microbatch, action.slice, self.slice_lengths)

    @property
    def training(self) -> bool:
        """Whether it is a training step, not an evaluation."""
        return self.call.training

    def in_order(self, lists: Sequence[ReplicaList], replica: int) -> "LocalBatch":
        """Return the batch with the targets in the order of the inputs, once all ranks know each replica's list."""
        order = lists[replica].order
        return self._replace(
            targets=[self.targets[index] for index in order] if self.targets else (),
            order=order,
            first_seed_index=sum(len(earlier.rows) for earlier in lists[:replica]),
        )

    def microbatch_seed(self, number: int) -> int | None:
        """Return the seed of a microbatch's (or slice's) random numbers, which the order of a list does not change."""
        if self.seed is None:
            return None
        return mix_in(self.seed, self.first_seed_index + (self.order[number] if self.order else number))

    def describe_shapes(self) -> list[str]:
        """Return the shapes of inputs and target in words, of those that this rank reads."""
        args, kwargs = self.call.args, self.call.kwargs
        inputs = args[0] if len(args) == 1 and not kwargs else (args, kwargs)
        trees = (("the batch", inputs, self.inputs), ("the target", self.call.target, self.targets))
        return [microbatch.describe_shapes(tree, name, self.call.rows_dim) for name, tree, pieces in trees if pieces]

    def forward_inputs(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs of a forward: the batch's on the first stage, else the `values` received from other stages."""
        return values if action.stage else self.inputs[action.slice_number(self.num_slices)]


def split_batch(
    call: StepCall,
    position: MeshPosition,
    schedule: Table,
    requires_grad: bytes = b"",
    signature: inspect.Signature | None = None,
    table_of: Callable[[int], Table] | None = None,
) -> LocalBatch:
    """Split a call's batch into microbatches, as far as this rank reads it, and write the header.

    `requires_grad`: a flag for each parameter of this rank; they decide what its stages send. `signature`: of the model's
    forward, on the first stage's rank. `table_of(microbatches)`: the table that a list of so many runs, by default `schedule`.

    Raises MismatchError for inputs or a target that do not fit.
    """
    _check_options(call)
    if position.cp_size > 1 and call.order is not None:
        raise MismatchError(f"{call.name} does not cut tokens along cp: give a batch to step(), or use a mesh without cp")
    if call.cuts_tokens and call.order is not None:
        raise MismatchError(f"{call.name} does not cut tokens into slices: give a batch to step(), or use slices=1")
    rank, device = position.pipeline.rank, position.pipeline.device
    max_microbatches, rows_dim = schedule.microbatches, call.rows_dim
    first_rank, last_rank = schedule.placement[0], schedule.placement[-1]

    # The first stage's rank reads the inputs; of a list of microbatches, it chooses the order too.
    is_one_tensor = len(call.args) == 1 and not call.kwargs  # or one tree: the common case, a short way
    batch = call.args[0] if is_one_tensor else (call.args, call.kwargs)
    inputs: Sequence[tuple[Any, Any]] = ()
    order: Sequence[int] = ()
    input_rows, input_signature, num_tokens = NO_ROWS, 0, 0
    cuts_tokens = position.cp_size > 1 or call.cuts_tokens
    summary = ListSummary(arguments=(order_argument(call.order), call.limit)) if call.order is not None else None
    if rank == first_rank and summary is not None:
        inputs, input_summaries = read_inputs(batch, device, rows_dim)
        input_rows, input_signature = len(inputs), cached_hash48(b"a list")
        tables = table_of or (lambda _: schedule)
        order = microbatch_order(call.order, input_summaries, tables, call.microbatch_costs, call.limit)
        inputs = [inputs[index] for index in order]
        summary = summary._replace(inputs=input_summaries, order=order)
    elif rank == first_rank:
        _check_inputs(call, rank)
        sizes = microbatch.nonempty_split_sizes(batch, "the batch", max_microbatches, rows_dim)
        pieces = [batch]
        if cuts_tokens:
            assert signature is not None
            pieces, num_tokens = _cut_input_tokens(call, position, signature)
            is_one_tensor = False
        parts = _split_rows(pieces, sizes, device, rows_dim)
        inputs = [((part,), {}) for part in parts] if is_one_tensor else parts
        input_rows, input_signature = sum(sizes), cached_hash48(microbatch.batch_signature(batch).encode())

    # The last stage's rank reads the target.
    targets: Sequence[Any] = ()
    loss_weights: Sequence[float] = ()
    target_rows = NO_ROWS
    target = call.target
    reads_target = rank == last_rank and (call.training or call.target is not None)
    if reads_target and summary is not None:
        _check_target(call, rank)
        targets, sizes = read_targets(call.target, device, rows_dim)
        if call.loss_weight is not None:
            loss_weights = microbatch.microbatch_weights(call.target, call.loss_weight)
        shapes = [microbatch.describe_shapes(entry, "the target", rows_dim) for entry in call.target]
        summary = summary._replace(target_rows=sizes, target_shapes=shapes, loss_weights=loss_weights)
        target_rows = len(targets)
    elif reads_target:
        _check_target(call, rank)
        sizes = microbatch.nonempty_split_sizes(target, "the target", max_microbatches, rows_dim)
        pieces = [target]
        if cuts_tokens:
            pieces, num_target_tokens = _cut_tokens(target, "the target", call, position)
            if num_tokens not in (0, num_target_tokens):
                raise MismatchError(f"the batch has {num_tokens} tokens a row, but the target has {num_target_tokens}")
            num_tokens = num_target_tokens
        if call.loss_weight is not None:  # computed where the target is: nothing waits for a device
            loss_weights = microbatch.microbatch_weights(_split_rows(pieces, sizes, None, rows_dim), call.loss_weight)
        targets, target_rows = _split_rows(pieces, sizes, device, rows_dim), sum(sizes)

    # If several ranks are given the batch, they compare some of its values, all of a small tensor.
    are_compared = rank in (first_rank, last_rank) and (first_rank != last_rank or len(position.pipelines[0]) > 1)
    hashes = (hash_values(batch), hash_values(call.target)) if are_compared else (0, 0)

    header = StepHeader(
        training=call.training,
        input_rows=input_rows,
        target_rows=target_rows,
        num_loss_weights=len(loss_weights),
        sequence_length=num_tokens,
        input_signature=input_signature,
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
    if seed is not None and position.cp_index:
        seed = mix_in(seed, -position.cp_index)  # each part of the tokens draws numbers of its own
    scale = read_grad_scale(call.scaler, position.world) if call.training and call.scaler is not None else 1.0
    grad_scale = scale * call.user_scale * len(position.part_pipelines)  # gradients are averaged afterwards
    first_seed_index = position.replica * schedule.microbatches * schedule.slices
    lengths = slice_lengths(call.slices, num_tokens) if num_tokens and call.cuts_tokens else ()
    return LocalBatch(
        *(call, header, inputs, targets, loss_weights, seed, grad_scale, summary, first_seed_index, order), lengths
    )


def _split_rows(pieces: Sequence[Any], sizes: Sequence[int], device: torch.device | None, rows_dim: int) -> list[Any]:
    """Split each piece, of some tokens, into microbatches. Return the pieces of the first microbatch, of the second, .."""
    columns = [microbatch.split(piece, sizes, device, rows_dim) for piece in pieces]
    return [part for row in zip(*columns, strict=True) for part in row]


def _cut_input_tokens(call: StepCall, position: MeshPosition, signature: inspect.Signature) -> tuple[list[Any], int]:
    """Return (args, kwargs) as `_cut_tokens` does, with the positions of tokens if the model takes them."""
    check_arguments_can_be_cut(signature, call.args, call.kwargs)
    num_tokens = sequence_length((call.args, call.kwargs), "the batch", call.sequence_dim)
    kwargs = with_position_ids(signature, call.args, call.kwargs, 0, num_tokens)
    return _cut_tokens((call.args, kwargs), "the batch", call, position)


def _cut_tokens(batch: Any, what: str, call: StepCall, position: MeshPosition) -> tuple[list[Any], int]:
    """Return `batch` with the tokens of each slice, or with this rank's along cp; and the number of all tokens."""
    num_tokens = sequence_length(batch, what, call.sequence_dim)
    if call.cuts_tokens:
        lengths = slice_lengths(call.slices, num_tokens)
        indices = range(len(lengths))
    elif num_tokens < position.cp_size:
        raise MismatchError(f"{num_tokens} tokens cannot be shared by {position.cp_size} ranks along cp: each needs one")
    else:
        lengths = microbatch.split_sizes(num_tokens, position.cp_size)
        indices = range(position.cp_index, position.cp_index + 1)
    return [take_tokens(batch, call.sequence_dim, sum(lengths[:index]), lengths[index]) for index in indices], num_tokens


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of an autocast that is on for `device`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def requires_grad_flags(stages: Iterable[Stage]) -> bytes:
    """Return a byte for each parameter of `stages`: whether it is trained."""
    return bytes(parameter.requires_grad for stage in stages for parameter in stage.parameters)


def hash_values(batch: Any) -> int:
    """Hash all values of each small tensor, some of a larger one, the same in every process; 0 without tensors.

    Never synchronises: 0 for a batch that is not on the CPU.
    """
    tensors = [leaf for leaf in map(unwrap, leaves(batch)) if isinstance(leaf, Tensor)]
    if not tensors or any(
        type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.is_cpu for tensor in tensors
    ):
        return 0
    return hash48(b"".join(map(_value_bytes, tensors)))


def _value_bytes(tensor: Tensor) -> bytes:
    """Return the digest of a small tensor, a sample of a larger one."""
    return tensor_crc(tensor).to_bytes(4, "little") if tensor.nbytes <= MAX_DIGEST_BYTES else _sample_bytes(tensor)


def _sample_bytes(tensor: Tensor) -> bytes:
    """Return at most MAX_HASHED_VALUES values, spread over the tensor, of up to 16 rows."""
    values_left, slices = MAX_HASHED_VALUES, []
    for size in tensor.shape:
        count = min(size, values_left, 16) or 1
        slices.append(slice(None, None, max(1, math.ceil(size / count))))
        values_left //= count
    values = tensor[tuple(slices)].detach().resolve_conj().resolve_neg()
    return tensor_bytes(values.contiguous())


def hash48(data: bytes) -> int:
    """Hash `data` to 48 bits, which a float64 holds exactly; the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")


cached_hash48 = lru_cache(256)(hash48)  # for data that repeats from step to step


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
    scaler.scale(torch.ones((), device=topology.device))  # a scaler creates its scale at the first use
    return scaler.get_scale()
