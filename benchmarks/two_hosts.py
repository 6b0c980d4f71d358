"""Runs a benchmark whose ranks are on two hosts, namespaces of this machine, and brings back what they found."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

ROOT = Path(__file__).parent.parent
TIMEOUT = 1200  # seconds
Options = TypeVar("Options")


def run(options: type[Options], work: Callable[[Options], None], main: Callable[[Options], None]) -> None:
    """`work` on the ranks that `results_of` starts, `main` in the program that starts them; both get what was typed."""
    given = tyro.cli(options)
    (work if "RANK" in os.environ else main)(given)


def results_of(script: str, ranks: int, rate: str, setup: str = "true") -> tuple[dict[str, Any], int]:
    """What rank 0 of `script` wrote as JSON to the file of its option `--results`, and the bytes that left the first host.

    `script` runs with this program's own options and `ranks` ranks on each host, behind a cable that lets `rate` pass in each
    direction, after the shell command `setup`. Ends the program, with what there is to tell, where that cannot be or fails.
    """
    sys.path.insert(0, str(ROOT))
    from tests.comms import hosts

    if (reason := hosts.why_not()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(2, rate) as on:
        for host in on:
            host.wire("sh", "-c", setup)
        results, cable = Path(folder) / "results.json", on[0].sent()
        options = sys.argv[1:]
        commands = hosts.torchrun(on, ranks, script, *options, "--results", str(results), log_dir=folder)
        ended = hosts.run(on, commands, timeout=TIMEOUT)
        if any(process.code for process in ended):
            sys.exit("\n".join(process.output for process in ended))
        return json.loads(results.read_text()), on[0].sent() - cable
