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
from penstock.learn.timeline_parts import draw_in_parts
from penstock.schedule import Timeline

T = TypeVar("T")


def ranks_here(default: int) -> int:
    """Return the lab's number of ranks: torchrun's if it was started by torchrun, else `default`."""
    return int(os.environ.get("WORLD_SIZE", default))


def is_printing_process() -> bool:
    """Return whether this process prints the lab's text: it is the only one, or torchrun's rank 0."""
    return os.environ.get("RANK", "0") == "0"


def on_ranks(function: Callable[..., T], ranks: int, *args: object) -> list[T]:
    """Run `function(*args)` on every rank and return the results. Under torchrun this process is one of the ranks.

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
    """Print `text` once: only on the process that prints."""
    if is_printing_process():
        print(text, flush=True)


def check(holds: bool, fact: str, otherwise: str) -> None:
    """Print that `fact` was checked. Raises SystemExit with `otherwise` if it does not hold."""
    if not holds:
        stop(f"This lab's check failed: {otherwise}")
    say(f"  checked: {fact}")


def check_time(holds: bool, fact: str, otherwise: str) -> None:
    """Check a measured time as `check` does; on a busy machine it may fail though nothing is wrong."""
    check(holds, fact, otherwise)


def stop(reason: str) -> NoReturn:
    """End the lab, and print `reason` once. Raises SystemExit."""
    raise SystemExit(reason if is_printing_process() else 1)


def split_deadlock(refusal: str) -> str:
    """Return the error text of `verify` with one line for each rank of a deadlock; other texts unchanged."""
    name, deadlocks, cycle = refusal.partition(" deadlocks: ")
    return "\n    ".join([f"{name} deadlocks:", *cycle.split("; ")]) if deadlocks else refusal


def percent(share: float) -> str:
    """Return a share as text: 0.256 as `25.6 %`."""
    return f"{share:.1%}".replace("%", " %")


def megabytes(size: float) -> str:
    """Return bytes as text, in MB of 10^6."""
    return f"{size / 1e6:.1f} MB"


def best_of(measure: Callable[[], T], error_of: Callable[[T], float], good_enough: float, tries: int = 5) -> T:
    """Measure until `error_of` the result is at most `good_enough`, at most `tries` times; return the result of least error.

    A busy machine disturbs some measurements, but seldom all of them.
    """
    result = measure()
    for _ in range(tries - 1):
        if error_of(result) <= good_enough:
            break
        result = min(result, measure(), key=error_of)
    return result


def drawing(timeline: Timeline) -> str:
    """Return `timeline` drawn as text, as wide as the terminal, or 98 columns if there is none."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120) - 2
    return indent(draw_in_parts(timeline, width, color=sys.stdout.isatty()), "  ")
