"""The command line: parses, calls, prints."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from penstock.commands.show import Compare, Show
from penstock.commands.source import table_of
from penstock.commands.train.config import TrainConfig, saved_options
from penstock.comms.launcher import start_ahead
from penstock.errors import PenstockError


@dataclass(frozen=True)
class Schedules:
    """List the schedules there are."""

    def run(self) -> None:
        """A line for each."""
        from penstock.schedule.catalog import FAMILIES

        rows = [("schedule", "what it does", "stages on a rank", "bubble", "in flight on rank r")]
        rows += [(name, family.summary, family.stages, family.bubble, family.in_flight) for name, family in FAMILIES.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print(
            "\nP ranks, V stages on each, M microbatches (any). F, I, W: what forward, backward to the input and backward"
            "\nto the weights of a microbatch take on one rank; B = I + W, T = F + B. `penstock show NAME` draws one."
        )


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model cut over several ranks of this machine on real data, and compare it with one process."""

    def run(self) -> None:
        """Check first, then start."""
        processes = int(os.environ.get("WORLD_SIZE", self.processes))  # torchrun's, under torchrun
        config = dataclasses.replace(self, ranks=processes // (self.dp * self.tp)) if self.dp * self.tp > 0 else self
        if config.processes not in (processes, 0):
            raise PenstockError(f"--dp {self.dp} --tp {self.tp} do not divide torchrun's {processes} processes: start others")
        config.check()
        start_ahead()
        from penstock.commands.train.job import train

        train(config)


@dataclass(frozen=True)
class Export:
    """Write the weights of a run's newest whole checkpoint to one safetensors file, under the uncut model's names."""

    source: tyro.conf.Positional[Path]
    """The folder of a run, or one checkpoint in it."""
    out: tyro.conf.Positional[Path] = Path("model.safetensors")
    """The file to write."""

    def run(self) -> None:
        """Join the checkpoint's files, without starting ranks."""
        from penstock import checkpoint

        print(f"wrote {self.out} from {checkpoint.export_folder(self.source, self.out)}")


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
        schedule = table_of(self.schedule, self.ranks, self.microbatches)
        start_ahead()
        from penstock.commands.bench.steps import bench

        bench(schedule, self.forward / 1e3, self.megabytes, self.steps)


@dataclass(frozen=True)
class Lab:
    """Work through a lab: a short script that teaches one thing and checks itself."""

    number: tyro.conf.Positional[int | None] = None
    """Which; without it, all are listed."""
    file: tyro.conf.Positional[Path | None] = None
    """For lab 9: the Python file with your schedule. It is written for you if there is none."""

    def run(self) -> None:
        """List the labs, or run one."""
        from penstock.learn import catalog

        if self.number is None:
            for number, lab in catalog.LABS.items():
                print(f"{number:2}  {lab.title}")
        else:
            catalog.run(self.number, self.file)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine offers: devices, backends, what a message costs, and what is missing."""

    def run(self) -> None:
        """Look and measure."""
        start_ahead()
        from penstock.commands.doctor import examine

        examine()


@dataclass(frozen=True)
class Studio:
    """Open the playground: choose, price and edit schedules on a local page, and see them proved, timed and drawn."""

    port: int = 0
    """Where the page is served, on 127.0.0.1 only. 0: any free port."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        from penstock.view.studio.server import serve

        serve(self.port, self.browser)


Commands = Train | Export | Bench | Schedules | Show | Compare | Studio | Lab | Doctor


def _syntax(words: Sequence[str]) -> Any:
    """The commands and their options; those of `train --resume RUN` are by default what they were in that run."""
    return (
        Annotated[Train, tyro.conf.subcommand("train", default=_resumed(words))]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[Schedules, tyro.conf.subcommand("schedules")]
        | Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
        | Annotated[Studio, tyro.conf.subcommand("studio")]
        | Annotated[Lab, tyro.conf.subcommand("lab")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    )


def _resumed(words: Sequence[str]) -> Train:
    """The options of the run that `words` resume, if they do; another schedule has its own V and group size."""
    given = {word.split("=")[0]: word.partition("=")[2] or following for word, following in pairwise([*words, ""])}
    if "--resume" not in given:
        return Train()
    saved = saved_options(Path(given["--resume"]))
    if "--schedule" in given:
        saved |= {"stages_per_rank": None, "group_size": None}
    return Train(**{**saved, "data": saved["data"] and Path(saved["data"]), "out": Path(saved["out"])})


def main() -> None:
    """Run the command that was typed; an error of Penstock's is one line and exit code 1, Ctrl-C is 130."""
    try:
        command: Commands = tyro.cli(
            _syntax(sys.argv[1:]), prog="penstock", description="Pipeline-parallel training you can read, prove and see."
        )
        command.run()
    except PenstockError as error:
        sys.exit(f"penstock: {error}")
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
