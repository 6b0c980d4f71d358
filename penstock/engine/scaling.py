"""Loss scaling for float16: the scale the backward starts with, the same on every rank."""

import torch

from penstock.comms.topology import Topology
from penstock.errors import MismatchError


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
