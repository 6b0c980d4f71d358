"""Helpers of the labs: run on ranks, print once, check facts."""

import atexit
import os
import shutil
import sys
from collections.abc import Callable
from textwrap import indent
from typing import NoReturn, TypeVar

import penstock as ps
from penstock.comms.encoding import all_gather_values
from penstock.learn.picture import drawn_in_parts
from penstock.schedule import Timeline

T = TypeVar("T")


def ranks_here(default: int) -> int:
    """Return the number of ranks of the lab: torchrun's, or `default`."""
    return int(os.environ.get("WORLD_SIZE", default))


def is_narrator() -> bool:
    """Return whether this process prints: the only process, or rank 0 of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def on_ranks(function: Callable[..., T], ranks: int, *args: object) -> list[T]:
    """Run `function(*args)` on every rank and return the results. Under torchrun this process is already one of them.

    Raises SystemExit if torchrun has started another number of ranks.
    """
    if "RANK" not in os.environ:
        return ps.launch(function, ranks, *args)
    if ranks_here(ranks) != ranks:
        raise SystemExit(f"this lab runs on {ranks} ranks, torchrun started {ranks_here(ranks)}: use --nproc-per-node {ranks}")
    atexit.register(ps.comms.shutdown)  # a process that ends in the middle of its group may abort
    result = function(*args)
    return all_gather_values(result, ps.comms.init_distributed().transport_device)


def say(text: str = "") -> None:
    """Print `text` once, on the process that prints."""
    if is_narrator():
        print(text, flush=True)


def check(holds: bool, fact: str, otherwise: str) -> None:
    """Print that `fact` was checked. Raises SystemExit with `otherwise` if it does not hold."""
    if not holds:
        stop(f"This lab's check failed: {otherwise}")
    say(f"  checked: {fact}")


def check_time(holds: bool, fact: str, otherwise: str) -> None:
    """Check a measured time as `check` does; on a busy machine it may fail without a fault."""
    check(holds, fact, otherwise)


def stop(reason: str) -> NoReturn:
    """End the lab, and print `reason` once. Raises SystemExit."""
    raise SystemExit(reason if is_narrator() else 1)


def in_lines(refusal: str) -> str:
    """Return the error of `verify` with a line for each rank of a deadlock's circle; other texts unchanged."""
    name, deadlocks, circle = refusal.partition(" deadlocks: ")
    return "\n    ".join([f"{name} deadlocks:", *circle.split("; ")]) if deadlocks else refusal


def percent(share: float) -> str:
    """Return a share as text: 0.256 as `25.6 %`."""
    return f"{share:.1%}".replace("%", " %")


def megabytes(size: float) -> str:
    """Return bytes as text, in MB of 10^6."""
    return f"{size / 1e6:.1f} MB"


def settled(measure: Callable[[], T], off: Callable[[T], float], enough: float, tries: int = 5) -> T:
    """Of some measurements the one that is least `off` what is expected; as soon as one is by no more than `enough`, that one.

    A busy machine disturbs a measurement, and seldom all of them.
    """
    result = measure()
    for _ in range(tries - 1):
        if off(result) <= enough:
            break
        result = min(result, measure(), key=off)
    return result


def picture(timeline: Timeline) -> str:
    """`timeline` drawn for the terminal, if there is one, else for a text file."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120) - 2
    return indent(drawn_in_parts(timeline, width, color=sys.stdout.isatty()), "  ")
