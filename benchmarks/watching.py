"""What it costs to watch over a training: digests, a look for what is not finite, and the heartbeat.

python benchmarks/watching.py                        about a minute
python benchmarks/watching.py --rows 16 --layers 16  more weights for the same computing

Ranks train stages of linear layers, whose forward takes about 10 ms on one core of a small machine. Steps with each of these
and steps without take turns; every one is digested, and that is divided by the interval. Beside seconds the ranks'
processor time is counted, which other work on the machine does not lengthen as much. The heartbeat goes on in all steps: it is
counted by the processor time of its thread.
"""

import hashlib
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.training_digests import STEPS_BETWEEN_DIGESTS
from penstock.schedule import Kind

WARM_UP = 3  # turns
HASHED = 2**24  # bytes, for the hashes alone
REPEATS = 5
BARE, DIGESTS, LOOK = "bare", f"digests every {STEPS_BETWEEN_DIGESTS} steps, the default", "on_nonfinite"
INTERVALS = {DIGESTS: STEPS_BETWEEN_DIGESTS, LOOK: 1}  # steps


@dataclass
class WatchingOptions:
    """Measure steps that are watched, and steps that are not."""

    ranks: int = 2
    width: int = 1024
    layers: int = 4  # on a rank
    rows: int = 64  # of a microbatch
    microbatches: int = 8
    turns: int = 20  # steps of each kind


class StepTimes(NamedTuple):
    """Of one step, in seconds."""

    clock: float
    processor: float  # this rank's


class Measured(NamedTuple):
    """What a rank has measured."""

    turns: list[dict[str, StepTimes]]  # by what watches
    forward: float  # seconds
    digested: int  # bytes
    heartbeat: float  # seconds of processor time a second


def steps(options: WatchingOptions, folder: str) -> Measured:
    """All turns, on one rank."""
    ps.comms.init_distributed(backend="gloo")
    width, names = options.width, [BARE, *INTERVALS]
    layers = [layer for _ in range(options.ranks * options.layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    asked: dict[str, dict[str, Any]] = {LOOK: {"on_nonfinite": "raise"}}
    model, loss = nn.Sequential(*layers), nn.functional.mse_loss
    pipes = {name: ps.Pipeline(deepcopy(model), loss, "1f1b", options.microbatches, **asked.get(name, {})) for name in names}
    optimizers = {name: torch.optim.Adam(pipe.parameters()) for name, pipe in pipes.items()}
    batch, turns = torch.randn(2, options.rows * options.microbatches, width), []
    beating = next(thread for thread in threading.enumerate() if thread.name == "penstock-heartbeat")
    beats, begin = time.pthread_getcpuclockid(beating.ident or 0), time.monotonic()
    for turn in range(WARM_UP + options.turns):
        times, first = {}, turn % len(names)  # none always goes first
        for name in [*names[first:], *names[:first]]:
            trail = checkpoint.DigestLog(folder, pipes[name], optimizers[name], every=1) if name == DIGESTS else None
            times[name] = _step(pipes[name], optimizers[name], batch, trail)
        turns.append(times)
    heartbeat = time.clock_gettime(beats) / (time.monotonic() - begin)
    forwards = [event.end - event.start for event in pipes[BARE].timeline().events if event.action.kind is Kind.F]
    parameters = sum(parameter.nbytes for parameter in pipes[BARE].parameters())
    digested = 4 * parameters + batch[0].nbytes * 2 * options.layers
    return Measured(turns[WARM_UP:], median(forwards), digested, heartbeat)


def _step(pipe: ps.Pipeline, optimizer: Any, batch: torch.Tensor, trail: checkpoint.DigestLog | None) -> StepTimes:
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    pipe.step(batch[0], target=batch[1])
    optimizer.step()
    if trail is not None:
        trail.record_step()
    optimizer.zero_grad()
    return StepTimes(time.perf_counter() - begin, time.process_time() - used)


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


def shares(everyone: list[Measured], name: str, interval: int) -> str:
    """What `name` adds to a step, in per cent of one without: of the ranks' processor time, and of the slowest's seconds."""
    told = []
    for what, total in (("processor", sum), ("clock", max)):
        sides = [[total(getattr(action[side], what) for action in turn) for side in (name, BARE)]
                 for turn in zip(*[result.turns for result in everyone], strict=True)]  # fmt: skip
        low, middle, high = quantiles([100 * (with_it / without - 1) / interval for with_it, without in sides], n=4)
        told.append(f"{middle:6.2f} ({low:.2f} to {high:.2f})")
    return f"{told[0]:24} {told[1]}"


def main(options: WatchingOptions) -> None:
    """Measure and print."""
    print(f"one core hashes, GB/s: {', '.join(f'{name} {speed / 1e9:.1f}' for name, speed in hashes().items())}")
    with tempfile.TemporaryDirectory() as folder:
        everyone = ps.launch(steps, options.ranks, options, folder)
    first, ranks = everyone[0], options.ranks
    clock = 1e3 * median(turn[BARE].clock for turn in first.turns)
    print(f"{options.turns} steps of each kind on {ranks} ranks: {clock:.0f} ms, a forward {1e3 * first.forward:.1f} ms")
    print(f"a rank's digests of one step are of {first.digested / 1e6:.0f} MB")
    print(f"\n{'per cent of a step (quartiles of the turns)':44} {'processor time':24} clock")
    for name, interval in INTERVALS.items():
        print(f"{name:44} {shares(everyone, name, interval)}")
    print(f"{'heartbeat, per cent of one core':44} {100 * max(result.heartbeat for result in everyone):6.2f}")


if __name__ == "__main__":
    main(tyro.cli(WatchingOptions))
