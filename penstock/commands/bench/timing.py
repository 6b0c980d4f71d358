"""What every rank runs to time a collective: a barrier before each sample, and variants of it that take turns.

A sample is the time from when the last rank started to when the last rank was done. Nobody always goes first.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import comms
from penstock.comms.collectives import operations as ours

WARM_UP, FEWEST, MOST = 2, 5, 400  # rounds

Variant = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operation at one size, in one variant."""

    operation: str
    ranks: int
    bytes: int
    variant: str
    seconds: tuple[float, ...]  # of each sample

    @property
    def factor(self) -> float:
        """Bus over algorithm bandwidth."""
        return bus_factor(self.operation, self.ranks)

    @property
    def bandwidth(self) -> float:
        """Of the algorithm, bytes a second."""
        return self.bytes / median(self.seconds)

    @property
    def middle(self) -> tuple[float, float]:
        """Seconds between which the middle 80 % of the samples are."""
        tenths = quantiles(self.seconds, n=10, method="inclusive")
        return tenths[0], tenths[-1]


def bus_factor(operation: str, ranks: int) -> float:
    """What the algorithm's bandwidth is multiplied by to be the bus's."""
    return 1.0 if operation == "send" else (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)


def variants(operation: str, size: int, topology: comms.Topology, raw: bool) -> dict[str, Variant]:
    """By name, what to call: ours, and with `raw` ours without the check and torch's. Results are in memory made before."""
    n, rank, device = topology.world_size, topology.rank, topology.device
    whole = torch.full((floats(size, n),), 0.0, device=device)  # not zeros, whose memory is not there before it is written
    piece, result = torch.full((whole.numel() // n,), 0.0, device=device), torch.full_like(whole, 0.0)
    if operation == "send":
        mine: list[Variant] = [lambda: comms.send_tensor(whole, 1), lambda: comms.recv_tensor(whole.shape, 0)]
        theirs: list[Variant] = [lambda: dist.send(whole, 1), lambda: dist.recv(whole, 0)]
        choice = {"penstock": mine, "raw": theirs} if raw else {"penstock": mine}
        return {name: each[rank] if rank < 2 else _nothing for name, each in choice.items()}

    def mine_with(check: bool) -> Variant:
        """The collective by `ps.comms`, with or without its check that all ranks make the same call."""
        calls: dict[str, Variant] = {
            "broadcast": lambda: ours.broadcast(whole, check=check),
            "scatter": lambda: ours.scatter(piece, whole if rank == 0 else None, check=check),
            "gather": lambda: ours.gather(piece, check=check, out=result if rank == 0 else None),
            "reduce": lambda: ours.reduce(whole, check=check),
            "all_gather": lambda: ours.all_gather(piece, check=check, out=result),
            "reduce_scatter": lambda: ours.reduce_scatter(whole, check=check, out=piece),
            "all_reduce": lambda: ours.all_reduce(whole, check=check),
            "all_to_all": lambda: ours.all_to_all(whole, check=check, out=result),
        }
        return calls[operation]

    if not raw:
        return {"penstock": mine_with(True)}
    pieces = list(result.view(n, -1)) if rank == 0 else None
    direct: dict[str, Variant] = {
        "broadcast": lambda: dist.broadcast(whole, 0),
        "scatter": lambda: dist.scatter(piece, pieces, 0),
        "gather": lambda: dist.gather(piece, pieces, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather_single(result, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(result, whole),
    }
    return {"penstock": mine_with(True), "unchecked": mine_with(False), "raw": direct[operation]}


def _nothing() -> None:
    """What ranks do that have no part."""


def floats(size: int, ranks: int) -> int:
    """How many float32 are nearest to `size` bytes, a multiple of the ranks."""
    return max(1, round(size / 4 / ranks)) * ranks


def measure(operation: str, choice: dict[str, Variant], size: int, seconds: float, topology: comms.Topology) -> list[Row]:
    """The variants in turns for about `seconds` altogether; a row for each."""
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        for variant in choice.values():
            _sample(variant, topology)
        took = time.perf_counter() - begin
    wanted = torch.tensor([min(MOST, max(FEWEST, round(seconds / took)))], device=topology.device)
    rounds = int(ours.broadcast(wanted))
    times = {name: torch.zeros(rounds, 2, dtype=torch.float64) for name in choice}
    for turn in range(rounds):
        for name in choice if turn % 2 else reversed(choice):
            times[name][turn] = torch.tensor(_sample(choice[name], topology), dtype=torch.float64)
    taking_part = 2 if operation == "send" else topology.world_size
    rows = []
    for name, mine in times.items():
        everyone = ours.all_gather(mine.unsqueeze(0).to(topology.device)).cpu()[:taking_part]  # (ranks, rounds, 2)
        spans = everyone[..., 1].amax(0) - everyone[..., 0].amax(0)
        rows.append(Row(operation, topology.world_size, floats(size, topology.world_size) * 4, name, tuple(spans.tolist())))
    return rows


def _sample(variant: Variant, topology: comms.Topology) -> tuple[float, float]:
    """When it started and ended on this rank, in seconds of the machine's clock, which its processes share."""
    _settle(topology)
    _barrier()
    begin = time.perf_counter()
    variant()
    _settle(topology)
    return begin, time.perf_counter()


@cache
def _barrier_group() -> Any:
    return dist.new_group(backend="gloo")


def _barrier() -> None:
    """In a group of its own: else its connections and threads, just awake, would favour whoever uses the same ones."""
    dist.barrier(_barrier_group())


def _settle(topology: comms.Topology) -> None:
    if topology.device.type == "cuda":
        torch.cuda.synchronize(topology.device)


def two_halves(whole: Tensor, piece: Tensor | None = None, result: Tensor | None = None) -> Tensor:
    """What an all-reduce is made of; into new memory, or into `piece` and `result`."""
    return ours.all_gather(ours.reduce_scatter(whole, out=piece), out=result)


def same_bits(values: Tensor, topology: comms.Topology) -> bool:
    """Whether both give the same bits, on every rank."""
    values = values.to(topology.device)
    halves = two_halves(values)
    same = torch.equal(ours.all_reduce(values), halves)
    return bool(ours.all_reduce(torch.tensor(float(same), device=topology.device), "min"))
