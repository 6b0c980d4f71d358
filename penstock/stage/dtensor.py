"""Tensors of which ranks have shards: torch's DTensor, known by its placements, since importing it takes a while."""

from typing import Any

from torch import Tensor

from penstock.torch_private import full_tensor

ShardKey = tuple[str, tuple[int, ...]]  # a name, and which shard of it


def local_shard(value: Any) -> Any:
    """This rank's shard of `value`, where ranks have shards of it; else `value`."""
    return value.to_local() if hasattr(value, "placements") else value


def gather_full_tensor(value: Any) -> Any:
    """The whole of `value`, likewise; all who have a shard call it."""
    return full_tensor(value) if hasattr(value, "placements") else value


def shard_like(value: Any, like: Any) -> Any:
    """`value`, a whole tensor, in shards as `like` is, if that is."""
    if not hasattr(like, "placements") or not isinstance(value, Tensor) or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device_mesh.device_type)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def shard_coordinates(value: Any) -> tuple[int, ...]:
    """Which shard this rank has: its coordinates along the axes over which `value` is cut."""
    if not hasattr(value, "placements"):
        return ()
    coordinates = value.device_mesh.get_coordinate()
    return tuple(each for each, placement in zip(coordinates, value.placements, strict=True) if not placement.is_replicate())
