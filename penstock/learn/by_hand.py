"""The collectives by hand: each is a few sends and receives, posted together and then waited for.

`tensor` is what a rank has: a piece for each rank, (ranks, ..). `piece` is one of these.
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
        """Return the numbers of all ranks, this one too."""
        return range(self.ranks)

    def exchange(self, sends: dict[int, Tensor], like: dict[int, Tensor]) -> dict[int, Tensor]:
        """Post `sends` (rank -> tensor) and receives `like` tensors (rank -> shape), then wait. Return the received tensors."""
        came = {source: torch.empty_like(tensor) for source, tensor in like.items()}
        promises = [dist.irecv(tensor, source) for source, tensor in came.items() if source != self.rank]
        for to, tensor in sends.items():
            if to == self.rank:
                came[to].copy_(tensor)  # what a rank has for itself needs no message
            else:
                promises.append(dist.isend(tensor, to))
                self.sent += tensor.nbytes
        for promise in promises:
            if promise is not None:
                promise.wait()
        return came


def broadcast(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send all pieces of rank 0 to all ranks."""
    return group.exchange(dict.fromkeys(group.all, tensor) if group.rank == 0 else {}, {0: tensor})[0]


def reduce(group: RankGroup, tensor: Tensor) -> Tensor | None:
    """Send all pieces to rank 0, which adds them up. Return the sum there, None elsewhere."""
    came = group.exchange({0: tensor}, dict.fromkeys(group.all, tensor) if group.rank == 0 else {})
    return sum(came.values(), torch.zeros_like(tensor)) if came else None


def scatter(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece from rank 0."""
    return group.exchange(dict(enumerate(tensor)) if group.rank == 0 else {}, {0: tensor[0]})[0]


def gather(group: RankGroup, piece: Tensor) -> Tensor | None:
    """Send each rank's piece to rank 0. Return all pieces there, None elsewhere."""
    came = group.exchange({0: piece}, dict.fromkeys(group.all, piece) if group.rank == 0 else {})
    return torch.stack([*came.values()]) if came else None


def all_gather(group: RankGroup, piece: Tensor) -> Tensor:
    """Send each rank's piece to all ranks."""
    return torch.stack([*group.exchange(dict.fromkeys(group.all, piece), dict.fromkeys(group.all, piece)).values()])


def reduce_scatter(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece from all ranks, and add up what arrives."""
    return all_to_all(group, tensor).sum(dim=0)


def all_reduce(group: RankGroup, tensor: Tensor) -> Tensor:
    """Add up on rank 0, and send the sum to all ranks."""
    total = reduce(group, tensor)
    return broadcast(group, tensor if total is None else total)


def all_to_all(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send each rank its piece from all ranks."""
    return torch.stack([*group.exchange(dict(enumerate(tensor)), dict.fromkeys(group.all, tensor[0])).values()])


def ring_all_reduce(group: RankGroup, tensor: Tensor, watch: Callable[[Tensor], None] = lambda pieces: None) -> Tensor:
    """Reduce-scatter, then all-gather; a rank sends to the next rank only. `watch` gets the pieces after every step."""
    pieces, n = tensor.clone(), group.ranks
    next_rank, previous_rank = (group.rank + 1) % n, (group.rank - 1) % n
    watch(pieces)
    for step in range(n - 1):  # add what comes; in the end piece rank + 1 is whole
        goes, comes = (group.rank - step) % n, (group.rank - step - 1) % n
        pieces[comes] += group.exchange({next_rank: pieces[goes]}, {previous_rank: pieces[comes]})[previous_rank]
        watch(pieces)
    for step in range(n - 1):  # keep what comes: it is whole
        goes, comes = (group.rank + 1 - step) % n, (group.rank - step) % n
        pieces[comes] = group.exchange({next_rank: pieces[goes]}, {previous_rank: pieces[comes]})[previous_rank]
        watch(pieces)
    return pieces


def everything_to_everyone(group: RankGroup, tensor: Tensor) -> Tensor:
    """Send all pieces to all ranks; each rank adds them up."""
    return all_gather(group, tensor).sum(dim=0)
