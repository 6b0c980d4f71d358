"""`penstock doctor`, `penstock bench steps` and `penstock bench collectives`: their options."""

import math
import re
from pathlib import Path

from penstock.commands.command_options import command
from penstock.commands.source import table_of
from penstock.errors import PenstockError
from penstock.launcher.forkserver import start_forkserver_early

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SIZES = tuple(4**power for power in range(5, 15))  # 1 KB to 256 MB


@command()
class DoctorCommand:
    """List devices, backends, message times, missing extras."""

    def run(self) -> None:
        """Print what this machine offers; a minus sign marks what is missing."""
        start_forkserver_early()
        from penstock.commands.machine.doctor import examine

        examine()


@command(ranks="P", schedule="NAME | FILE", microbatches="M", forward="MS", megabytes="MB")
class BenchStepsCommand:
    """Measure a training step against its table.

    Each rank is an emulated device that sleeps instead of computing. The last line is the engine's own time for an action.
    The short form is `penstock bench`.
    """

    ranks: int | None = None
    """Ranks, a process each; 4 by default, a table's own for a table."""
    schedule: str = "1f1b"
    """Name that `penstock schedules` lists, or CSV table."""
    microbatches: int | None = None
    """Microbatches that a batch is split into; 8 by default, a table's own for a table."""
    forward: float = 10.0
    """Milliseconds of a forward; a backward takes twice as long."""
    megabytes: float = 0.001
    """Size of a microbatch's activation between two stages."""
    steps: int = 10
    """Measured steps."""

    def run(self) -> None:
        """Check the options, then measure."""
        if self.steps < 1:
            raise PenstockError(f"--steps {self.steps} is too few: use 1 or more")
        for name in ("forward", "megabytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PenstockError(f"--{name} {getattr(self, name):g} is no amount: use a number of 0 or more")
        schedule = table_of(self.schedule, self.ranks, self.microbatches)
        start_forkserver_early()
        from penstock.commands.machine.steps_benchmark import bench

        bench(schedule, self.forward / 1e3, self.megabytes, self.steps)


@command(ranks="P", operations="NAME..", sizes="BYTES..", largest="BYTES", csv="FILE", plot="FILE")
class BenchCollectivesCommand:
    """Measure torch's collectives over sizes.

    They are broadcast, scatter, gather, reduce, all_gather, reduce_scatter, all_reduce, all_to_all and send.
    """

    ranks: int = 4
    """Ranks, a process each; 2 or more."""
    operations: tuple[str, ...] = ()
    """Operations to measure, such as all_reduce send; by default all."""
    sizes: tuple[str, ...] = ()
    """Sizes of tensors, such as 512 64K 1MB; by default 1 KB, 4 KB and so on up to --largest."""
    largest: str = "64MB"
    """Largest default size, up to 256MB."""
    seconds: float = 0.5
    """Seconds for each operation and size; at least five samples are taken."""
    csv: Path | None = None
    """Write the table to this file."""
    plot: Path | None = None
    """Draw bandwidth over size in this file, .svg or .png."""

    def run(self) -> None:
        """Check the options, then measure."""
        from penstock.commands.machine.collectives_benchmark import OPERATIONS, bench

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
    """Return the bytes that `64K`, `1 MB` or `512` says; K is 1024. Raises PenstockError for another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)B?", text.strip().upper())
    if not match or not (size := round(float(match[1]) * UNITS[match[2]])):
        raise PenstockError(f"{text!r} is no size: write it as 512, 64K or 1MB")
    return size
