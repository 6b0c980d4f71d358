"""What it costs to keep digests of a run's steps, and how fast the hashes are that could make them.

python benchmarks/digests.py                        about a minute
python benchmarks/digests.py --rows 16 --layers 16  more weights for the same computing

Ranks train stages of linear layers, whose forward takes about 10 ms on one core of a small machine. A step with digests - of
outputs, gradients, weights and Adam's state - and one without take turns. Beside seconds the processor's time is counted, which
other work on the machine does not lengthen as much.
"""

import hashlib
import random
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from torch import nn

import penstock as ps
from penstock import checkpoint
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


class Times(NamedTuple):
    """Of one step, in seconds."""

    clock: float
    processor: float  # this rank's


Turn = tuple[Times, Times]  # with digests, without


def steps(options: Options, folder: str) -> tuple[list[Turn], float, float]:
    """All turns; seconds of a forward; and bytes that are hashed. Run on every rank."""
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


def _step(pipe: ps.Pipeline, optimizer: Any, batch: torch.Tensor, trail: checkpoint.Trail | None) -> Times:
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    pipe.step(batch[0], target=batch[1])
    optimizer.step()
    if trail is not None:
        trail.note()
        trail.close()
    optimizer.zero_grad()
    return Times(time.perf_counter() - begin, time.process_time() - used)


def hashes() -> dict[str, float]:
    """Bytes a second of what could make digests, by name."""
    data = random.randbytes(HASHED)
    ways: dict[str, Callable[[Any], Any]] = {
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        "hashlib.sha256": lambda data: hashlib.sha256(data).digest(),
        "hashlib.blake2b": lambda data: hashlib.blake2b(data).digest(),
    }
    return {name: HASHED / min(_seconds(way, data) for _ in range(REPEATS)) for name, way in ways.items()}


def _seconds(way: Callable[[Any], Any], data: bytes) -> float:
    begin = time.perf_counter()
    way(data)
    return time.perf_counter() - begin


def main(options: Options) -> None:
    """Measure and print."""
    print(f"one core hashes, GB/s: {', '.join(f'{name} {speed / 1e9:.1f}' for name, speed in hashes().items())}")
    with tempfile.TemporaryDirectory() as folder:
        turns, forward, size = ps.launch(steps, options.ranks, options, folder)[0]
    clock = 1e3 * median(without.clock for _, without in turns)
    print(f"{len(turns)} steps of each kind on {options.ranks} ranks: {clock:.0f} ms, a forward {1e3 * forward:.1f} ms")
    print(f"a rank's digests of one step are of {size / 1e6:.0f} MB")
    for told, kind in (("clock", 0), ("processor's time", 1)):
        low, middle, high = quantiles([100 * (kept[kind] / without[kind] - 1) for kept, without in turns], n=4)
        print(f"digests of every step cost {middle:.1f} % by the {told} (turn by turn; quartiles {low:.1f}, {high:.1f} %),")
        print(f"  those of every {EVERY} steps, the default, {middle / EVERY:.2f} %")


if __name__ == "__main__":
    main(tyro.cli(Options))
