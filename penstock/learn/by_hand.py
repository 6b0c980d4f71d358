"""The collectives by hand: each is a few sends and receives, posted together and then waited for.

`mine` is what a rank has: a piece for each rank, (ranks, ..); `piece` is one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps


@dataclass
class Here:
    """This rank among `ranks`, and how many bytes it has sent."""

    rank: int
    ranks: int
    sent: int = 0

    @classmethod
    def join(cls) -> "Here":
        """The ranks that were started."""
        topology = ps.comms.init_distributed(backend="gloo")
        return cls(topology.rank, topology.world_size)

    @property
    def all(self) -> range:
        """Every rank, this one too."""
        return range(self.ranks)

    def exchange(self, sends: dict[int, Tensor], like: dict[int, Tensor]) -> dict[int, Tensor]:
        """Post all sends (to whom, what) and receives (from whom, of which shape); wait. Returns what came from whom."""
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


def broadcast(here: Here, mine: Tensor) -> Tensor:
    """Rank 0 sends all it has to all."""
    return here.exchange(dict.fromkeys(here.all, mine) if here.rank == 0 else {}, {0: mine})[0]


def reduce(here: Here, mine: Tensor) -> Tensor | None:
    """All send all they have to rank 0, which adds."""
    came = here.exchange({0: mine}, dict.fromkeys(here.all, mine) if here.rank == 0 else {})
    return sum(came.values(), torch.zeros_like(mine)) if came else None


def scatter(here: Here, mine: Tensor) -> Tensor:
    """Rank 0 sends each its piece."""
    return here.exchange(dict(enumerate(mine)) if here.rank == 0 else {}, {0: mine[0]})[0]


def gather(here: Here, piece: Tensor) -> Tensor | None:
    """All send their piece to rank 0."""
    came = here.exchange({0: piece}, dict.fromkeys(here.all, piece) if here.rank == 0 else {})
    return torch.stack([*came.values()]) if came else None


def all_gather(here: Here, piece: Tensor) -> Tensor:
    """All send their piece to all."""
    return torch.stack([*here.exchange(dict.fromkeys(here.all, piece), dict.fromkeys(here.all, piece)).values()])


def reduce_scatter(here: Here, mine: Tensor) -> Tensor:
    """All send each its piece; each adds what it got."""
    return all_to_all(here, mine).sum(dim=0)


def all_reduce(here: Here, mine: Tensor) -> Tensor:
    """Rank 0 adds, and sends the sum to all."""
    total = reduce(here, mine)
    return broadcast(here, mine if total is None else total)


def all_to_all(here: Here, mine: Tensor) -> Tensor:
    """All send each its piece."""
    return torch.stack([*here.exchange(dict(enumerate(mine)), dict.fromkeys(here.all, mine[0])).values()])


def ring_all_reduce(here: Here, mine: Tensor, watch: Callable[[Tensor], None] = lambda pieces: None) -> Tensor:
    """Reduce-scatter, then all-gather, and nobody talks to anybody but the rank after and the rank before."""
    pieces, n = mine.clone(), here.ranks
    after, before = (here.rank + 1) % n, (here.rank - 1) % n
    watch(pieces)
    for step in range(n - 1):  # add what comes; in the end piece rank + 1 is whole
        goes, comes = (here.rank - step) % n, (here.rank - step - 1) % n
        pieces[comes] += here.exchange({after: pieces[goes]}, {before: pieces[comes]})[before]
        watch(pieces)
    for step in range(n - 1):  # keep what comes: it is whole
        goes, comes = (here.rank + 1 - step) % n, (here.rank - step) % n
        pieces[comes] = here.exchange({after: pieces[goes]}, {before: pieces[comes]})[before]
        watch(pieces)
    return pieces


def everything_to_everyone(here: Here, mine: Tensor) -> Tensor:
    """All send all they have to all; each adds."""
    return all_gather(here, mine).sum(dim=0)
