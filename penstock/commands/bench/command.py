"""The command `penstock bench`: a step on emulated devices, or with `collectives` every collective over sizes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from penstock.commands.source import table_of
from penstock.comms.starting.server import start_ahead
from penstock.errors import PenstockError


@dataclass(frozen=True)
class Collectives:
    """Measure broadcast, scatter, gather, reduce, all-gather, reduce-scatter, all-reduce, all-to-all and send over sizes."""

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
    against_raw: bool = False
    """Measure torch.distributed called directly too, and Penstock's without its check, taking turns."""
    csv: Path | None = None
    """Write the table to this file."""
    plot: Path | None = None
    """Draw bandwidth over size in this file, .svg or .png."""

    def run(self) -> None:
        """Check first, then start."""
        from penstock.commands.bench.collectives import bench, plan_of

        plan = plan_of(self.operations, self.sizes, self.largest, self.seconds, self.against_raw, self.ranks)
        bench(plan, self.ranks, self.csv, self.plot)


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
        start_ahead()
        from penstock.commands.bench.steps import bench

        bench(schedule, self.forward / 1e3, self.megabytes, self.steps)
