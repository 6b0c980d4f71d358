"""What goes into a step: the user's call, and from it this rank's share of the batch, split into microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.comms.topology import Topology
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.randomness import mix
from penstock.schedule.table import Table
from penstock.stage import microbatch

NOTHING = -1  # rows of a batch that this rank has no part of


class Call(NamedTuple):
    """One call of `step()` or `eval()`, as the user made it."""

    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    step: int  # steps done before
    has_loss: bool
    loss_weight: Callable[[Any], Any] | None = None
    seed: int | None = None
    scaler: torch.amp.GradScaler | None = None


class Batch(NamedTuple):
    """This rank's share of it: what its actions work on, and what the other ranks must know."""

    training: bool
    step: int
    inputs: Sequence[tuple[Any, Any]]  # (args, kwargs) of each microbatch, on the first stage's rank
    rows: int  # of the inputs there, else NOTHING
    signature: str  # of their structure, shapes and dtypes, there
    targets: Sequence[Any]  # of each microbatch, on the last stage's rank
    target_rows: int  # there, else NOTHING
    counts: Sequence[float]  # what each microbatch counts in the loss, there and if it is not by rows
    seed: int | None  # of this step's random numbers, None for whatever the generator gives
    scale: float  # of all gradients


def split(call: Call, position: MeshPosition, schedule: Table) -> Batch:
    """This rank's share of the batch. Raises MismatchError for inputs or a target that do not fit."""
    rank, device, most = position.pipeline.rank, position.pipeline.device, schedule.microbatches
    inputs: Sequence[tuple[Any, Any]] = ()
    targets: Sequence[Any] = ()
    counts: Sequence[float] = ()
    rows, target_rows, signature = NOTHING, NOTHING, ""
    if rank == schedule.placement[0]:
        inputs, rows = microbatch.split_inputs(call.args, call.kwargs, most, device)
        signature = microbatch.signature(call.args[0] if len(call.args) == 1 and not call.kwargs else (call.args, call.kwargs))
    if rank == schedule.placement[-1] and (call.training or call.target is not None):
        _check_target(call, rank)
        sizes = microbatch.sizes_of(call.target, "the target", most)
        targets, target_rows = microbatch.split(call.target, sizes, device), sum(sizes)
        if call.loss_weight is not None:
            counts = microbatch.counts(targets, call.loss_weight)
    seed = mix(call.seed, call.step) if call.training and call.seed is not None else None
    scale = scale_of(call.scaler, position.world) if call.training and call.scaler is not None else 1.0
    return Batch(
        call.training,
        call.step,
        inputs,
        rows,
        signature,
        targets,
        target_rows,
        counts,
        seed,
        scale * position.replicas,  # whose gradients are averaged
    )


def _check_target(call: Call, rank: int) -> None:
    if not call.has_loss:
        raise MismatchError(f"rank {rank}: a loss needs a Pipeline with loss_fn=")
    if call.target is None:
        raise MismatchError(f"rank {rank}: step() needs target=, which the last stage's rank takes for the loss")


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
