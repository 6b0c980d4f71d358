"""What is typed at a prompt, in a process of its own: forked from the ranks' server, where torch is imported already.

If it launches ranks, they come from that server too.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fork_server import server_address, use_server

from penstock.launcher import rank_processes
from penstock.launcher.forkserver import HELD_SIGNALS, forkserver_context
from penstock.launcher.rank_main import rank_main

WAIT = 500  # seconds
Ended = subprocess.CompletedProcess[str]


class Typed(NamedTuple):
    """What is typed, and where."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    said: tuple[Path, Path]  # where its standard output and its error output go
    server: dict[str, Any]  # what leads there


def penstock(*words: object, columns: int = 120) -> Ended:
    """What the command came to, and what it said."""
    return _ended(_command, ["penstock", *map(str, words)], COLUMNS=str(columns), NO_COLOR="1")


def python(program: Path, *words: object) -> Ended:
    """The same of `python program words`."""
    return _ended(_program, [str(program.resolve()), *map(str, words)])


def code(text: str) -> Ended:
    """The same of `python -c text`."""
    return _ended(_code, ["-c", text])


def torchrun(ranks: int, *words: object, **variables: str) -> Ended:
    """The same of `torchrun words`, on this machine; its ranks are interpreters of their own."""
    return _ended(_torchrun, ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *map(str, words)], **variables)


def _ended(work: Callable[[], None], words: list[str], **variables: str) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        context, said = forkserver_context(), (Path(folder) / "stdout", Path(folder) / "stderr")
        typed = Typed(words, os.environ | variables, os.getcwd(), said, server_address())
        process: Any = context.Process(target=_run, args=(work, typed))
        process.start()
        try:
            process.join(WAIT)
            late = process.is_alive()
        finally:
            process.kill()
            process.join()
        assert not late, f"{words} took {WAIT} s: {said[1].read_text()}"
        return subprocess.CompletedProcess(words, process.exitcode, *[path.read_text() for path in said])


def _run(work: Callable[[], None], typed: Typed) -> None:
    use_server(typed.server)
    rank_processes.rank_main = partial(_rank, typed.said)
    _speak_into(typed.said)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)  # as the server has them
    os.environ.clear()
    os.environ.update(typed.environment)
    os.chdir(typed.folder)
    torch.set_num_threads(1)
    sys.argv = typed.words
    work()


def _rank(said: tuple[Path, Path], *args: Any) -> None:
    _speak_into(said)
    rank_main(*args)


def _speak_into(said: tuple[Path, Path]) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)


def _command() -> None:
    from penstock.commands.cli import main

    main()


def _torchrun() -> None:
    from torch.distributed.run import main

    main()


def _code() -> None:
    text, main = sys.argv.pop(), ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.modules.pop("__mp_main__", None)
    exec(text, main.__dict__)


def _program() -> None:
    path = Path(sys.argv[0])
    sys.path.insert(0, str(path.parent))
    main = ModuleType("__main__")
    sys.modules |= {"__main__": main, "__mp_main__": main}  # by the second name ranks know it
    main.__file__ = str(path)  # from which its ranks import what they run
    exec(compile(path.read_text(), path, "exec"), main.__dict__)
