"""Tensors of which ranks have pieces: torch's DTensor, known by its placements, since importing it takes a while."""

from typing import Any

from torch import Tensor

from penstock.torch_private import full_tensor

ShardKey = tuple[str, tuple[int, ...]]  # a name, and which piece of it


def local(value: Any) -> Any:
    """This rank's piece of `value`, where ranks have pieces of it; else `value`."""
    return value.to_local() if hasattr(value, "placements") else value


def full(value: Any) -> Any:
    """The whole of `value`, likewise; all who have a piece call it."""
    return full_tensor(value) if hasattr(value, "placements") else value


def placed_as(value: Any, like: Any) -> Any:
    """`value`, a whole tensor, in pieces as `like` is, if that is."""
    if not hasattr(like, "placements") or not isinstance(value, Tensor) or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device_mesh.device_type)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def piece_of(value: Any) -> tuple[int, ...]:
    """Which piece this rank has: its coordinates along the axes over which `value` is cut."""
    if not hasattr(value, "placements"):
        return ()
    coordinates = value.device_mesh.get_coordinate()
    return tuple(each for each, placement in zip(coordinates, value.placements, strict=True) if not placement.is_replicate())
