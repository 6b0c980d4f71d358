"""The command line: finds the command that was typed, parses its options and runs it.

Only that command is imported, so that those that need little answer at once.
"""

import difflib
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from penstock import __version__
from penstock.commands.options import parsed
from penstock.commands.source import nearest_path, question_of
from penstock.errors import PenstockError


@dataclass(frozen=True)
class Schedules:
    """List the schedules there are."""

    def run(self) -> None:
        """A line for each, or a few lines on a terminal that is not as wide."""
        from penstock.view.terminal import terminal_width

        print("\n".join(_schedules(terminal_width() if sys.stdout.isatty() else None)))
        print(
            "\nP ranks, V stages on each, M microbatches (any). F, I, W: what forward, backward to the input and backward"
            "\nto the weights of a microbatch take on one rank; B = I + W, T = F + B. `penstock show NAME` draws one."
        )


def _schedules(width: int | None) -> Iterator[str]:
    """What there is to say of each schedule: a table, unless that is wider than `width`."""
    from penstock.schedule.catalog import FAMILIES

    heads = ("schedule", "what it does", "stages on a rank", "bubble", "in flight on rank r")
    rows = [(name, family.summary, family.stages, family.bubble, family.in_flight) for name, family in FAMILIES.items()]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    if width is None or sum(widths) + 2 * len(widths) <= width:
        for row in (heads, *rows):
            yield "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        return
    for name, *cells in rows:
        told = "; ".join(f"{head}: {cell}" for head, cell in zip(heads[2:], cells[1:], strict=True))
        yield textwrap.fill(f"{name}: {cells[0]}; {told}", width, subsequent_indent="    ")


@dataclass(frozen=True)
class Export:
    """Write the weights of a run's newest whole checkpoint to a safetensors file, or to a folder of them with an index."""

    source: tyro.conf.Positional[Path]
    """The folder of a run, or one checkpoint in it."""
    out: tyro.conf.Positional[Path] = Path("model.safetensors")
    """The file to write; a path that does not end in .safetensors is a folder, as transformers has them."""
    max_shard_size: str = "5GB"
    """Of a file in the folder."""

    def run(self) -> None:
        """Join the checkpoint's files, without starting ranks."""
        if not self.source.exists():
            raise PenstockError(f"{self.source} does not exist{nearest_path(self.source)}")
        from penstock import checkpoint

        print(f"wrote {self.out} from {checkpoint.export_folder(self.source, self.out, self.max_shard_size)}")


@dataclass(frozen=True)
class Lab:
    """Work through a lab: a short script that teaches one thing and checks itself."""

    number: tyro.conf.Positional[int | None] = None
    """Which; without it, all are listed."""
    file: tyro.conf.Positional[Path | None] = None
    """For lab 9: the Python file with your schedule. It is written for you if there is none."""
    fix: bool = False
    """For lab 9: say what mends the schedule that it hands out."""

    def run(self) -> None:
        """List the labs, or run one."""
        from penstock.learn import catalog

        if self.number is None:
            for number, lab in catalog.LABS.items():
                print(f"{number:2}  {lab.title}")
        else:
            catalog.run(self.number, self.file, self.fix)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine offers: devices, backends, what a message costs, and what is missing."""

    def run(self) -> None:
        """Look and measure."""
        from penstock.comms.launch.forkserver import start_forkserver_early

        start_forkserver_early()
        from penstock.commands.doctor import examine

        examine()


@dataclass(frozen=True)
class Studio:
    """Open the playground: choose, price and edit schedules on a local page, and see them proved, timed and drawn."""

    file: tyro.conf.Positional[str | None] = None
    """A table to open, as CSV or as a Python file, which is run, a plan.json or the timeline.json of a run; it is read again
    whenever it changes."""
    ranks: int = 4
    """Of a Python file's table."""
    microbatches: int = 8
    """Of a Python file's table."""
    port: int = 0
    """Where the page is served, on 127.0.0.1 only. 0: any free port."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        from penstock.view.studio.opened import Opened
        from penstock.view.studio.server import serve

        opened = None
        if self.file:
            reader = partial(question_of, self.file, self.ranks, self.microbatches)
            reader()  # so that what is no table is told here
            opened = Opened(Path(self.file), reader)
        serve(self.port, self.browser, opened)


@dataclass(frozen=True)
class Watch:
    """Open the page of a run on this machine: while it trains, or afterwards."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of a run."""
    port: int = 0
    """Where the page is served, on 127.0.0.1 only. 0: any free port."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        if not (self.run_folder / "run.json").is_file():
            raise PenstockError(f"{self.run_folder} is no run, it has no run.json{nearest_path(self.run_folder)}")
        from penstock.view.watch.server import serve

        serve(self.run_folder, self.port, self.browser)


ABOUT = "Pipeline-parallel training you can read, prove and see. `penstock --version` says which Penstock this is."
COMMANDS = {  # name -> the module with its class, which is called after it
    "train": "train.command",
    "generate": "trained",
    "eval": "trained",
    "export": "cli",
    "audit": "audit",
    "bench": "bench.command",
    "schedules": "cli",
    "show": "show",
    "plan": "plan",
    "search": "search",
    "compare": "show",
    "studio": "cli",
    "watch": "cli",
    "lab": "cli",
    "puzzle": "puzzle",
    "doctor": "cli",
}


def _command(name: str) -> Any:
    return getattr(importlib.import_module(f"penstock.commands.{COMMANDS[name]}"), name.capitalize())


def _parsed(words: Sequence[str]) -> Any:
    """The command that was typed, with its options. Raises PenstockError if there is no such command.

    Without a command, what tyro says of all of them ends the program.
    """
    words = words or ["--help"]
    name = words[0]
    if name.startswith("-"):
        every: Any = Union[*(Annotated[_command(each), tyro.conf.subcommand(each)] for each in COMMANDS)]
        return parsed(every, words, prog="penstock", description=ABOUT)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise PenstockError(f"there is no command {name!r}{meant}: choose from {', '.join(COMMANDS)}")
    command = _command(name)
    given: dict[str, Any] = {"default": command.of_run(words)} if name == "train" else {}
    return parsed(command, words[1:], prog=f"penstock {name}", **given)


def main() -> None:
    """Run the command that was typed; an error of Penstock's is one line and exit code 1, Ctrl-C is 130."""
    words = sys.argv[1:]
    try:
        with _flushed():
            if words == ["--version"]:
                return print(f"penstock {__version__}")
            _parsed(words).run()
    except PenstockError as error:
        sys.exit(f"penstock: {error}")
    except BrokenPipeError:  # as in `penstock show .. | head`: whoever read it has enough
        sys.exit(141)
    except OSError as error:  # of a file that this machine does not let be made, read or written
        named = f"{error.filename}: " if error.filename else ""
        sys.exit(f"penstock: {named}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        from penstock.comms.system import explain_error, is_out_of_resources

        if not is_out_of_resources(error):
            raise
        sys.exit(f"penstock: this machine has no room for that, give smaller numbers: {explain_error(error)}")
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _flushed() -> Iterator[None]:
    """What is printed inside has gone out afterwards; if it cannot, that is raised once, and not at Python's exit as well.

    Where there is no output (`>&-`) nothing is printed, by the ranks too, and no file gets its number; a character that the
    terminal's encoding lacks is a question mark.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    finally:
        try:
            print(end="", flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
