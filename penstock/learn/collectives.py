"""Collectives made of sends and receives, which are posted together and then waited for.

`tensor` is a rank's tensor of (ranks, ..): one piece for each rank. `piece` is one of these.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps


@dataclass
class RankGroup:
    """This rank, the number of ranks, and the bytes that this rank has sent."""

    rank: int
    ranks: int
    sent: int = 0

    @classmethod
    def join(cls) -> "RankGroup":
        """Join the ranks that were started."""
        topology = ps.comms.init_distributed(backend="gloo")
        return cls(topology.rank, topology.world_size)

    @property
    def all(self) -> range:
        """Return all ranks, including this one."""
        return range(self.ranks)

    def exchange(self, sends: dict[int, Tensor], like: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send `sends` (rank -> tensor). Receive tensors shaped as those of `like` (rank -> tensor), and return them."""
        received = {source: torch.empty_like(tensor) for source, tensor in like.items()}
        handles = [dist.irecv(tensor, source) for source, tensor in received.items() if source != self.rank]
        for to, tensor in sends.items():
            if to == self.rank:
                received[to].copy_(tensor)  # to itself a rank needs no message
            else:
                handles.append(dist.isend(tensor, to))
                self.sent += tensor.nbytes
        for handle in handles:
            if handle is not None:
                handle.wait()
        return received


def broadcast(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send rank 0's tensor to all ranks. Return it."""
    return group.exchange(dict.fromkeys(group.all, tensor) if group.rank == 0 else {}, {0: tensor})[0]


def reduce(group: RankGroup, tensor: Tensor) -> Tensor | None:
    """Send all tensors to rank 0. Return their sum there, None elsewhere."""
    received = group.exchange({0: tensor}, dict.fromkeys(group.all, tensor) if group.rank == 0 else {})
    return sum(received.values(), torch.zeros_like(tensor)) if received else None


def scatter(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece of rank 0's tensor. Return this rank's."""
    return group.exchange(dict(enumerate(tensor)) if group.rank == 0 else {}, {0: tensor[0]})[0]


def gather(group: RankGroup, piece: Tensor) -> Tensor | None:
    """Send all pieces to rank 0. Return them there, (ranks, ..), and None elsewhere."""
    received = group.exchange({0: piece}, dict.fromkeys(group.all, piece) if group.rank == 0 else {})
    return torch.stack([*received.values()]) if received else None


def all_gather(group: RankGroup, piece: Tensor) -> Tensor:
    """Send each rank's piece to all ranks. Return all pieces, (ranks, ..)."""
    return torch.stack([*group.exchange(dict.fromkeys(group.all, piece), dict.fromkeys(group.all, piece)).values()])


def reduce_scatter(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece of every tensor. Return the sum of the pieces that arrive."""
    return all_to_all(group, tensor).sum(dim=0)


def all_reduce(group: RankGroup, tensor: Tensor) -> Tensor:
    """Sum all tensors on rank 0, and send the sum to all ranks. Return it."""
    total = reduce(group, tensor)
    return broadcast(group, tensor if total is None else total)


def all_to_all(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece of every tensor. Return the pieces that arrive, (ranks, ..)."""
    return torch.stack([*group.exchange(dict(enumerate(tensor)), dict.fromkeys(group.all, tensor[0])).values()])


def ring_all_reduce(group: RankGroup, tensor: Tensor, on_step: Callable[[Tensor], None] = lambda pieces: None) -> Tensor:
    """Reduce-scatter, then all-gather, each rank sending to the next. Return the sum. `on_step` gets the pieces after each."""
    pieces, rank, n = tensor.clone(), group.rank, group.ranks
    next_rank, previous_rank = (rank + 1) % n, (rank - 1) % n
    like = {previous_rank: pieces[0]}
    on_step(pieces)
    for step in range(n - 1):  # add the received piece; in the end piece rank + 1 is the whole sum
        pieces[(rank - step - 1) % n] += group.exchange({next_rank: pieces[(rank - step) % n]}, like)[previous_rank]
        on_step(pieces)
    for step in range(n - 1):  # the received piece is a whole sum: keep it
        pieces[(rank - step) % n] = group.exchange({next_rank: pieces[(rank + 1 - step) % n]}, like)[previous_rank]
        on_step(pieces)
    return pieces


def all_gather_and_sum(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send all tensors to all ranks. Return their sum, which each rank computes."""
    return all_gather(group, tensor).sum(dim=0)
