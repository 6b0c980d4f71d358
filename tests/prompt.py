"""`penstock` as typed at a prompt: in a process of its own, forked from the ranks' server, where torch is imported already."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from penstock.comms.starting.server import HELD, server_context


def penstock(*words: object, columns: int = 120) -> "subprocess.CompletedProcess[str]":
    """What the command came to, and what it said."""
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process: Any = server_context().Process(target=_run, args=([*map(str, words)], environment, os.getcwd(), said))
        process.start()
        try:
            process.join(250)
            late = process.is_alive()
        finally:
            process.kill()
            process.join()
        assert not late, f"{words} took 250 s: {said[1].read_text()}"
        return subprocess.CompletedProcess(words, process.exitcode, *[path.read_text() for path in said])


def _run(words: list[str], environment: dict[str, str], folder: str, said: list[Path]) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)  # as the server has them
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["penstock", *words]

    from penstock.commands.cli import main

    main()
