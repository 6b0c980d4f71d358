"""Tensors of which ranks have shards: torch's DTensor, recognised by its placements, since importing it takes a while."""

from typing import Any

from torch import Tensor

from penstock.torch_private import full_tensor

ShardKey = tuple[str, tuple[int, ...]]  # a tensor's name, and the coordinates of a shard


def local_shard(value: Any) -> Any:
    """Return this rank's shard of a DTensor, anything else unchanged."""
    return value.to_local() if hasattr(value, "placements") else value


def gather_full_tensor(value: Any) -> Any:
    """Return the full tensor of a DTensor, anything else unchanged. All ranks that have a shard call it."""
    return full_tensor(value) if hasattr(value, "placements") else value


def shard_like(value: Any, like: Any) -> Any:
    """Return `value`, a full tensor, sharded as `like` is, if that is a DTensor."""
    if not hasattr(like, "placements") or not isinstance(value, Tensor) or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device_mesh.device_type)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def shard_coordinates(value: Any) -> tuple[int, ...]:
    """Return this rank's coordinates along the mesh axes over which `value` is sharded; () if it is not."""
    if not hasattr(value, "placements"):
        return ()
    coordinates = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
    return tuple(coordinate for coordinate, placement in coordinates if not placement.is_replicate())
