"""Messages and collectives for the learner's code on its ranks. They record their calls for the checks."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comms.wait_errors import is_transport_error
from penstock.learn.puzzles.check_helpers import CheckFailed, WaitsForMessage

calls: list[tuple[str, int]] = []  # name, number of elements
gathered_weights: list[Any] = []  # weak references to tensors that `gather` returned


@contextmanager
def waiting(call: str) -> Iterator[None]:
    """Raise WaitsForMessage with the text of `call` if another rank does not take part in it."""
    try:
        yield
    except Exception as error:
        if is_transport_error(error):
            raise WaitsForMessage(call) from error
        raise


def send(tensor: Tensor | None, to: int) -> None:
    """Send `tensor` to the rank `to`. Wait until it has been sent."""
    with waiting(f"send(.., to={to})"):
        dist.send(_to_send(tensor).contiguous(), to)


def start_send(tensor: Tensor | None, to: int) -> Any:
    """Begin to send `tensor` to the rank `to`. Return a handle at once, whose `wait()` waits until it has been sent."""
    return dist.isend(_to_send(tensor), to)


def _to_send(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise CheckFailed("None cannot be sent: a tensor gets a .grad only after requires_grad_(), called before its use")
    return tensor.detach()


def receive(shape: Any, source: int) -> Tensor:
    """Return the next tensor that the rank `source` sends, of this shape."""
    tensor = torch.empty(tuple(shape))
    with waiting(f"receive({tuple(tensor.shape)}, source={source})"):
        dist.recv(tensor, source)
    return tensor


def swap(piece: Tensor) -> Tensor:
    """Send `piece` to the next rank of the ring. Return the piece of the previous rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    calls.append(("swap", piece.numel()))
    received = torch.empty_like(piece)
    handle = dist.isend(piece.contiguous(), (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    assert handle is not None
    handle.wait()
    return received


def all_reduce(tensor: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors."""
    calls.append(("all_reduce", tensor.numel()))
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def gather(shard: Tensor) -> Tensor:
    """Return all ranks' shards, joined along dimension 0."""
    calls.append(("gather", shard.numel()))
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    tensor = torch.cat(shards)
    gathered_weights.append(weakref.ref(tensor))
    return tensor


def reduce_scatter(tensor: Tensor) -> Tensor:
    """Sum over all ranks. Return this rank's rows of the sum."""
    calls.append(("reduce_scatter", tensor.numel()))
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()].clone()
