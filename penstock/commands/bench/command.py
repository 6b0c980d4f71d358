"""The command `penstock bench`: a step on emulated devices, or with `collectives` every collective over sizes."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from penstock.commands.source import table_of
from penstock.comms.launch.forkserver import start_forkserver_early
from penstock.errors import PenstockError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SIZES = tuple(4**power for power in range(5, 15))  # 1 KB to 256 MB


@dataclass(frozen=True)
class Collectives:
    """Measure torch's broadcast, scatter, gather, reduce, all_gather, reduce_scatter, all_reduce, all_to_all and send."""

    ranks: int = 4
    """Processes, 2 or more."""
    operations: tuple[str, ...] = ()
    """Which, as all_reduce and send; left out, all of them."""
    sizes: tuple[str, ...] = ()
    """Of tensors, as 512, 64K, 1MB; left out, 1 KB, 4 KB and so on to --largest."""
    largest: str = "64MB"
    """The largest of those sizes, up to 256MB."""
    seconds: float = 0.5
    """For one operation and size; at least five samples are taken."""
    csv: Path | None = None
    """Write the table to this file."""
    plot: Path | None = None
    """Draw bandwidth over size in this file, .svg or .png."""

    def run(self) -> None:
        """Check first, then start."""
        from penstock.commands.bench.collectives import OPERATIONS, bench

        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise PenstockError(f"--operations {unknown[0]} is not known: use {', '.join(OPERATIONS)}")
        if self.ranks < 2:
            raise PenstockError(f"--ranks {self.ranks} is too small: a collective takes 2 or more")
        if not 0 < self.seconds < math.inf:
            raise PenstockError(f"--seconds {self.seconds:g} is too short: use more than 0")
        if self.plot is not None and self.plot.suffix not in (".svg", ".png"):
            raise PenstockError(f"--plot {self.plot}: give it a name that ends in .svg or .png")
        largest = bytes_of(self.largest)
        sizes = tuple(map(bytes_of, self.sizes)) or tuple(size for size in SIZES if size <= largest)
        if not sizes:
            raise PenstockError(f"--largest {self.largest} leaves no size to measure: use 1KB or more")
        bench(self.operations or OPERATIONS, sizes, self.seconds, self.ranks, self.csv, self.plot)


def bytes_of(text: str) -> int:
    """`64K`, `1 MB`, `512` -> bytes; K is 1024. Raises PenstockError for another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)B?", text.strip().upper())
    if not match or not (size := round(float(match[1]) * UNITS[match[2]])):
        raise PenstockError(f"{text!r} is no size: write it as 512, 64K or 1MB")
    return size


Subject = Annotated[
    Annotated[Collectives, tyro.conf.subcommand("collectives")] | Annotated[None, tyro.conf.subcommand("steps")],
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.OmitArgPrefixes,
]


@dataclass(frozen=True)
class Bench:
    """Measure what a step takes against what its table says, with emulated devices, and what the engine itself costs."""

    ranks: int = 4
    """Processes; each is a device that sleeps instead of computing."""
    schedule: str = "1f1b"
    """A name that `penstock schedules` lists, or the path of a CSV table."""
    microbatches: int = 8
    """M: microbatches each batch is split into."""
    forward: float = 10.0
    """Milliseconds a forward takes; a backward takes twice as long."""
    megabytes: float = 0.001
    """Size of the activation each microbatch hands to the next stage."""
    steps: int = 10
    """Measured steps."""
    subject: Subject = None

    def run(self) -> None:
        """Check first, then start."""
        if self.subject is not None:
            return self.subject.run()
        if self.steps < 1:
            raise PenstockError(f"--steps {self.steps} is too few: use 1 or more")
        for name in ("forward", "megabytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PenstockError(f"--{name} {getattr(self, name):g} is no amount: use a number of 0 or more")
        schedule = table_of(self.schedule, self.ranks, self.microbatches)
        start_forkserver_early()
        from penstock.commands.bench.steps import bench

        bench(schedule, self.forward / 1e3, self.megabytes, self.steps)
