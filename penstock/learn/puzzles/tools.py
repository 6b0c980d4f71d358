"""What a learner's code is given on its ranks: messages and collectives, which note what they were asked for."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.learn.puzzles.judge import Missed

called: list[tuple[str, int]] = []  # what, and how many numbers
gathered: list[Any] = []  # weak references to what `gather` has returned


def send(tensor: Tensor | None, to: int) -> None:
    """Give `tensor` to the rank `to`; waits until it is there."""
    dist.send(_to_send(tensor).contiguous(), to)


def start_send(tensor: Tensor | None, to: int) -> Any:
    """Begin to send `tensor` to the rank `to`; returns a handle at once, whose `wait()` waits until it is there."""
    return dist.isend(_to_send(tensor), to)


def _to_send(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise Missed("None cannot be sent: a tensor has a .grad only if it asked for one, requires_grad_(), before it was used")
    return tensor.detach()


def receive(shape: Any, source: int) -> Tensor:
    """The next tensor that the rank `source` sends, of this shape."""
    tensor = torch.empty(tuple(shape))
    dist.recv(tensor, source)
    return tensor


def swap(piece: Tensor) -> Tensor:
    """Send `piece` to the next rank of the ring, and return what the one before sends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    called.append(("swap", piece.numel()))
    received = torch.empty_like(piece)
    sending = dist.isend(piece.contiguous(), (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    assert sending is not None
    sending.wait()
    return received


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors."""
    called.append(("all_reduce", tensor.numel()))
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def gather(shard: Tensor) -> Tensor:
    """All ranks' shards, joined along the rows."""
    called.append(("gather", shard.numel()))
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    tensor = torch.cat(parts)
    gathered.append(weakref.ref(tensor))
    return tensor


def reduce_scatter(tensor: Tensor) -> Tensor:
    """The sum over all ranks, of which this rank gets its part of the rows."""
    called.append(("reduce_scatter", tensor.numel()))
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()].clone()
