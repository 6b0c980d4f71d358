"""What goes into a step: the user's call, and from it this rank's share of the batch, split into microbatches."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.encoding import tensor_bytes
from penstock.comms.topology import Topology
from penstock.engine.loss import LossByRows, Reduction
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.partition.rows import unwrap
from penstock.randomness import mix_seed
from penstock.schedule.table import Action, Table
from penstock.stage import microbatch
from penstock.stage.stage import Stage
from penstock.trees import leaves

NOTHING = -1  # rows of a batch that this rank has no part of
LOOKED_AT = 64  # values of a tensor that are compared between ranks
CASTS = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what autocast may compute in


class Call(NamedTuple):
    """One call of `step()` or `eval()`, as the user made it."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    step: int  # steps done before
    has_loss: bool
    reduction: Reduction = "mean"
    loss_weight: Callable[[Any], Any] | None = None
    seed: int | None = None
    scaler: torch.amp.GradScaler | None = None
    scale: float = 1.0  # of the gradients, besides the scaler's
    losses: list[Tensor] | None = None  # for each microbatch's
    wants_outputs: bool = False  # on the last stage's rank
    rows_dim: int = 0  # the dimension of the rows
    by_rows: LossByRows | None = None  # looks at the loss
    factor: float = math.nan  # of this rank's gradients since the last step (checks/factor.py)
    stepped: float = math.nan  # 1 if this rank's weights have changed since the last step, 0 if not


class Vote(NamedTuple):
    """What one rank says of the step it is about to run; numbers, which travel as float64."""

    training: float
    rows: float
    target_rows: float
    counts: float  # how many it has
    signature: float  # of the inputs: a fingerprint
    trained: float  # which of this rank's parameters are: a fingerprint
    autocast: float  # the place of its dtype in CASTS
    step: float
    scale: float  # of the gradients, as the user gave it
    wants_losses: float  # of each microbatch
    inputs: float  # a fingerprint of their values; 0: not looked at
    target: float  # likewise
    factor: float  # of this rank's gradients since the last step; NaN: not known
    stepped: float  # whether its weights have changed since; NaN: not known

    @property
    def kind(self) -> tuple[float, ...]:
        """What is the same in every step of the same kind."""
        return self[:7]


class Batch(NamedTuple):
    """This rank's share of it: what its actions work on, and what the other ranks must know."""

    call: Call
    vote: Vote
    inputs: Sequence[tuple[Any, Any]]  # (args, kwargs) of each microbatch, on the first stage's rank
    targets: Sequence[Any]  # of each microbatch, on the last stage's rank
    counts: Sequence[float]  # what each microbatch counts in the loss, there and if it is not by rows
    seed: int | None  # of this step's random numbers, None for whatever the generator gives
    scale: float  # of all gradients

    @property
    def training(self) -> bool:
        """Whether it is a step, not an evaluation."""
        return self.call.training

    def shapes(self) -> list[str]:
        """Of the inputs and the target, as far as this rank reads them."""
        args, kwargs = self.call.args, self.call.kwargs
        inputs = args[0] if len(args) == 1 and not kwargs else (args, kwargs)
        read = (("the batch", inputs, self.inputs), ("the target", self.call.target, self.targets))
        return [microbatch.describe_shapes(tree, what, self.call.rows_dim) for what, tree, pieces in read if pieces]

    def given(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """What a forward works on: the batch's own inputs on the first stage, on others the `values` that other stages gave."""
        return values if action.stage else self.inputs[action.microbatch]


def split(call: Call, position: MeshPosition, schedule: Table, trained: bytes = b"") -> Batch:
    """This rank's share of the batch; `trained` says which of its parameters are, which decides what its stages send.

    Raises MismatchError for inputs or a target that do not fit.
    """
    _check_options(call)
    rank, device, most = position.pipeline.rank, position.pipeline.device, schedule.microbatches
    first, last = schedule.placement[0], schedule.placement[-1]
    inputs: Sequence[tuple[Any, Any]] = ()
    targets: Sequence[Any] = ()
    counts: Sequence[float] = ()
    rows, target_rows, signature = NOTHING, NOTHING, 0
    bare = len(call.args) == 1 and not call.kwargs  # the common case, a short way
    given = call.args[0] if bare else (call.args, call.kwargs)
    if rank == first:
        _check_inputs(call, rank)
        sizes = microbatch.nonempty_split_sizes(given, "the batch", most, call.rows_dim)
        parts, rows = microbatch.split(given, sizes, device, call.rows_dim), sum(sizes)
        inputs = [((part,), {}) for part in parts] if bare else parts
        signature = fingerprint(microbatch.batch_signature(given).encode())
    if rank == last and (call.training or call.target is not None):
        _check_target(call, rank)
        sizes = microbatch.nonempty_split_sizes(call.target, "the target", most, call.rows_dim)
        if call.loss_weight is not None:  # of the target where it is: nothing waits for a device
            counts = microbatch.microbatch_weights(microbatch.split(call.target, sizes, None, call.rows_dim), call.loss_weight)
        targets, target_rows = microbatch.split(call.target, sizes, device, call.rows_dim), sum(sizes)
    compares = rank in (first, last) and (first != last or position.tp is not None)
    values = (seen(given), seen(call.target)) if compares else (0, 0)
    kind = call.training, rows, target_rows, len(counts), signature, fingerprint(trained), CASTS.index(_cast(device))
    vote = Vote(*kind, call.step, call.scale, call.losses is not None, *values, call.factor, call.stepped)
    seed = mix_seed(call.seed, call.step) if call.training and call.seed is not None else None
    scale = scale_of(call.scaler, position.world) if call.training and call.scaler is not None else 1.0
    return Batch(call, vote, inputs, targets, counts, seed, scale * call.scale * position.num_replicas)  # which are averaged


def _cast(device: torch.device) -> torch.dtype | None:
    """The dtype of an autocast that is on for `device`."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def trained(stages: Iterable[Stage]) -> bytes:
    """Which parameters of `stages` are trained."""
    return bytes(parameter.requires_grad for stage in stages for parameter in stage.parameters)


def seen(batch: Any) -> int:
    """A fingerprint of some values of each tensor, the same in every process; 0 where there are none, or none to look at.

    Nothing waits for a device: of a batch that is not on the CPU nothing is seen.
    """
    found = [leaf for leaf in map(unwrap, leaves(batch)) if isinstance(leaf, Tensor)]
    if not found or any(type(each) is not Tensor or each.layout != torch.strided or not each.is_cpu for each in found):
        return 0
    return digest(b"".join(map(_some_values, found)))


def _some_values(tensor: Tensor) -> bytes:
    """Of at most LOOKED_AT, those of up to 16 rows."""
    left, slices = LOOKED_AT, []
    for size in tensor.shape:
        taken = min(size, left, 16) or 1
        slices.append(slice(None, None, max(1, math.ceil(size / taken))))
        left //= taken
    values = tensor[tuple(slices)].detach().resolve_conj().resolve_neg()
    return tensor_bytes(values.contiguous())


def digest(text: bytes) -> int:
    """A number of 48 bits for `text`, the same in every process, exact in a float64."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


fingerprint = lru_cache(256)(digest)  # of texts that come again and again


def _check_options(call: Call) -> None:
    if not isinstance(call.scale, int | float) or not math.isfinite(call.scale):
        raise MismatchError(f"step() cannot scale gradients by {call.scale!r}: give a number, 1/k for the mean over k batches")
    if call.losses is not None and not isinstance(call.losses, list):
        raise MismatchError(f"step(.., losses=[]) fills a list, and cannot fill {call.losses!r}")
    if call.training and torch.is_inference_mode_enabled():
        raise MismatchError("step() trains, which torch.inference_mode() rules out: call it outside")


def _check_inputs(call: Call, rank: int) -> None:
    if call.kwargs or any(each is not None for each in call.args):
        return
    name = "step(inputs, target=..)" if call.training else "eval(inputs)"
    modes = "" if call.training else "; it puts the modules into evaluation mode for the batch, and back"
    raise MismatchError(f"rank {rank}: the first stage's rank was given no inputs: call pipe.{name}{modes}")


def _check_target(call: Call, rank: int) -> None:
    if not call.has_loss:
        raise MismatchError(f"rank {rank}: a loss needs a Pipeline with loss_fn=")
    if call.target is None:
        raise MismatchError(
            f"rank {rank}: step() needs target=.., by that name, which the last stage's rank takes for the loss"
        )


def scale_of(scaler: torch.amp.GradScaler, topology: Topology) -> float:
    """The scale of this step's gradients. Raises MismatchError for a scaler that would judge each rank's by themselves."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # imports for a second

    if topology.world_size > 1 and scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler):
        raise MismatchError(
            f"{type(scaler).__name__} would let each of {topology.world_size} ranks skip steps of its own: "
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )
    scaler.scale(torch.ones((), device=topology.device))  # makes it create its scale
    return scaler.get_scale()
