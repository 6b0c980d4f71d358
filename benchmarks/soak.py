"""Does anything grow? Many steps whose shapes change, and many pipelines made and dropped, at few file descriptors.

python benchmarks/soak.py                       20,000 steps and 300 pipelines on two ranks: about ten minutes
python benchmarks/soak.py --steps 2000 --pipelines 30

Every twentieth part of the way each rank looks at its file descriptors, threads and resident memory. What is printed is the
slope of a line through them, from a quarter of the way on; exit code 1 if descriptors or threads grow, or memory by more than a
megabyte for 1,000 steps or 8 kB for a pipeline.
"""

import gc
import os
import random
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from torch import nn

import penstock as ps

LOOKS = 20
MOST = {"steps": 1e6 / 1000, "pipelines": 8e3}  # bytes that one may leave


@dataclass(frozen=True)
class SoakOptions:
    """Run until something would have grown."""

    steps: int = 20_000
    pipelines: int = 300
    ranks: int = 2
    seed: int = 0
    descriptors: int = 256  # that a rank may have


class Look(NamedTuple):
    """What a process holds."""

    done: int
    descriptors: int
    threads: int
    memory: int  # bytes, resident

    @classmethod
    def at(cls, done: int) -> "Look":
        """Now."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tasks = len(list(Path("/proc/self/task").iterdir()))
        assert threading.active_count() <= tasks
        return cls(done, len(os.listdir("/proc/self/fd")), tasks, pages * resource.getpagesize())


def layers(width: int = 16) -> nn.Sequential:
    """A small model."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])


def looks(count: int, do: Callable[[int], None]) -> list[Look]:
    """Do it `count` times, looking now and then."""
    found = []
    for number in range(count):
        do(number)
        if number % max(1, count // LOOKS) == 0:
            found.append(Look.at(number))
    return found


def soak(options: SoakOptions) -> dict[str, list[Look]]:
    """What one rank does."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, options.descriptors))
    ps.comms.init_distributed(timeout=60)
    draw = random.Random(options.seed)
    pipe = ps.Pipeline(layers(), nn.functional.mse_loss, "1f1b", 4)
    optimizer = torch.optim.SGD(pipe.parameters(), 1e-3)

    def step(_: int) -> None:
        inputs = torch.ones(draw.randint(1, 32), draw.randint(1, 200), 16)
        pipe.step(inputs, target=inputs)
        optimizer.step()
        optimizer.zero_grad()

    def make(_: int) -> None:
        name = draw.choice(ps.schedule.names())
        other = ps.Pipeline(layers(), nn.functional.mse_loss, name, draw.randint(1, 8))
        other.step(torch.ones(8, 16), target=torch.ones(8, 16))

    return {"steps": looks(options.steps, step), "pipelines": looks(options.pipelines, make)}


def slope(found: list[Look], what: str) -> float:
    """How much `what` grows each time, by least squares."""
    settled = found[len(found) // 4 :]
    times, values = [look.done for look in settled], [getattr(look, what) for look in settled]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    return sum((time - middle) * (value - mean) for time, value in zip(times, values, strict=True)) / spread


def grows(found: list[Look], what: str) -> bool:
    """Whether the fewest descriptors or threads of the second half are more than those of the first.

    A look may see a thread of a dropped pipeline that is about to end.
    """
    values = [getattr(look, what) for look in found[len(found) // 4 :]]
    middle = len(values) // 2
    return min(values[middle:]) > min(values[:middle])


def main(options: SoakOptions) -> None:
    """Soak, and say what grew."""
    has_grown = False
    for rank, looks_by_part in enumerate(ps.launch(soak, options.ranks, options)):
        for what, found in looks_by_part.items():
            last, value = found[-1], slope(found, "memory")
            growing = [name for name in ("descriptors", "threads") if grows(found, name)]
            has_grown |= bool(growing) or value > MOST[what]
            counts = f"{last.descriptors} descriptors, {last.threads} threads{''.join(f' ({name} grow!)' for name in growing)}"
            memory = f"{last.memory / 2**20:.0f} MiB, {value / 1e3:+.2f} kB for each"
            print(f"rank {rank}, {getattr(options, what):,} {what}: {counts}, {memory}")
    sys.exit(int(has_grown))


if __name__ == "__main__":
    main(tyro.cli(SoakOptions))
