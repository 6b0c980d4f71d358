"""What it costs to keep digests of a run's steps, and how fast the hashes are that could make them.

python benchmarks/digests.py                        about a minute
python benchmarks/digests.py --width 2048 --rows 16 more weights for the same computing

Ranks train stages of linear layers, whose forward takes about 10 ms on one core of a small machine. A step with digests - of
outputs, gradients, weights and Adam's state - and one without take turns.
"""

import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.audit.digests import condensed
from penstock.checkpoint.audit.trail import EVERY
from penstock.schedule import Kind

WARM_UP = 3  # steps
HASHED = 2**24  # bytes, for the hashes alone
REPEATS = 5


@dataclass
class Options:
    """Measure steps with and without digests."""

    ranks: int = 2
    width: int = 1024
    layers: int = 4  # on a rank
    rows: int = 64  # of a microbatch
    microbatches: int = 8
    turns: int = 30  # steps of each kind


def steps(options: Options, folder: str) -> tuple[list[tuple[float, float]], float, float]:
    """Seconds of a step (with, without) digests, turn by turn; of a forward; and bytes hashed. Run on every rank."""
    ps.comms.init_distributed(backend="gloo")
    width = options.width
    layers = [layer for _ in range(options.ranks * options.layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, "1f1b", options.microbatches)
    optimizer = torch.optim.Adam(pipe.parameters())
    batch = torch.randn(2, options.rows * options.microbatches, width)
    turns = []
    for turn in range(WARM_UP + options.turns):
        times = {}
        for kept in (True, False) if turn % 2 else (False, True):  # neither always goes first
            trail = checkpoint.Trail(folder, pipe, optimizer, every=1) if kept else None
            times[kept] = _step(pipe, optimizer, batch, trail)
        turns.append((times[True], times[False]))
    forwards = [each.end - each.start for each in pipe.timeline().events if each.action.kind is Kind.F]
    parameters = sum(each.nbytes for each in pipe.parameters())
    outputs = batch[0].nbytes * 2 * options.layers
    return turns[WARM_UP:], median(forwards), 4 * parameters + outputs


def _step(pipe: ps.Pipeline, optimizer: Any, batch: torch.Tensor, trail: checkpoint.Trail | None) -> float:
    dist.barrier()
    begin = time.perf_counter()
    pipe.step(batch[0], target=batch[1])
    optimizer.step()
    if trail is not None:
        trail.note()
        trail.close()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def hashes() -> dict[str, float]:
    """Bytes a second of what could make digests, by name."""
    data = torch.randn(HASHED // 4)
    raw = bytes(data.view(torch.uint8).tolist())
    ways: dict[str, Callable[[], Any]] = {
        "zlib.crc32": lambda: zlib.crc32(raw),
        "zlib.adler32": lambda: zlib.adler32(raw),
        "hashlib.sha256": lambda: hashlib.sha256(raw).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(raw).digest(),
        "torch, condensed": lambda: condensed(data),
    }
    return {name: HASHED / min(_seconds(way) for _ in range(REPEATS)) for name, way in ways.items()}


def _seconds(way: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"one core hashes, GB/s: {', '.join(f'{name} {speed / 1e9:.1f}' for name, speed in hashes().items())}")
    with tempfile.TemporaryDirectory() as folder:
        turns, forward, size = ps.launch(steps, options.ranks, options, folder)[0]
    ratios = [100 * (one / other - 1) for one, other in turns]
    low, middle, high = quantiles(ratios, n=4)
    print(f"{len(turns)} steps of each kind on {options.ranks} ranks, a forward takes {1e3 * forward:.1f} ms")
    print(f"a step takes {1e3 * median(other for _, other in turns):.0f} ms; {size / 1e6:.0f} MB are hashed on a rank")
    print(f"digests of every step cost {middle:.1f} % (turn by turn; quartiles {low:.1f}, {high:.1f} %)")
    print(f"of every {EVERY} steps, the default: {middle / EVERY:.2f} % ({high / EVERY:.2f} % by the upper quartile)")


if __name__ == "__main__":
    main(tyro.cli(Options))
