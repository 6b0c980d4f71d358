"""Memory that outlives a rank: files without names, kept by a process that starts ranks again and gone when it is.

Under `launch` with restarts that is the launching process. Under torchrun, on each machine, it is a small one of our own
(this file, run as a program: it imports nothing of ours), which ends with the agent; ranks find it by a socket that is named
after the agent, and take no other user's for it.
"""

import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "PENSTOCK_MEMORY"  # the environment's, from `launch`
START = 10.0  # seconds that the process of our own has to start
_CREDENTIALS = struct.Struct("3i")  # Linux's `ucred`: process, user, group


class Drawers(NamedTuple):
    """Files that `process` holds open, each for one rank's part of a checkpoint."""

    process: int
    name: str  # of the files
    files: tuple[int, ...]  # their numbers there
    width: int  # ranks of this machine, at most: a checkpoint has so many drawers here

    def path(self, number: int) -> Path:
        """Where to open a drawer."""
        return Path(f"/proc/{self.process}/fd/{self.files[number]}")

    def are_there(self) -> bool:
        """Whether they can be opened from here, and are those that were meant."""
        with suppress(OSError):
            return os.readlink(self.path(0)).startswith(f"/memfd:{self.name} ") and os.access(self.path(0), os.W_OK)
        return False

    def told(self) -> str:
        """As text, for `of`."""
        return json.dumps(self)

    @classmethod
    def of(cls, text: str) -> "Drawers | None":
        """What was `told`, if it is there."""
        process, name, files, width = json.loads(text)
        drawers = cls(process, name, tuple(files), width)
        return drawers if drawers.are_there() else None

    def close(self) -> None:
        """Give the memory back, in the process that has it."""
        for file in self.files:
            os.close(file)


@contextmanager
def for_launch(ranks: int) -> Iterator[dict[str, str]]:
    """Drawers of this process for so many ranks of its own, as what it adds to their environment."""
    drawers = make(2 * ranks, ranks) if ranks else None
    try:
        yield {VARIABLE: drawers.told()} if drawers else {}
    finally:
        if drawers:
            drawers.close()


def make(count: int, width: int) -> Drawers | None:
    """Empty drawers of this process, which nobody but this user can open; None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return None
    name = f"penstock-{secrets.token_hex(8)}"
    files = tuple(os.memfd_create(name) for _ in range(count))
    for file in files:
        os.fchmod(file, 0o600)
    return Drawers(os.getpid(), name, files, width)


def wanted() -> bool:
    """Whether somebody would start the ranks again, as the environment says: the same on all of them."""
    return VARIABLE in os.environ or bool(int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)))


def find(start: bool = False) -> Drawers | None:
    """The drawers of this machine's ranks, the same on each; None where there are none.

    `start`: have our own process started, if there is to be one. Only `LOCAL_RANK` 0 starts it, the others wait for it.
    """
    if VARIABLE in os.environ:
        return Drawers.of(os.environ[VARIABLE])
    if not hasattr(os, "pidfd_open"):
        return None
    agent, width = os.getppid(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    found = _asked(agent)
    if found is None and start:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _start(agent, width)
        deadline = time.monotonic() + START
        while (found := _asked(agent)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    return found


def _address(agent: int) -> str:
    """The socket's, which no file stands for: it is gone with its process."""
    with open(f"/proc/{agent}/stat", encoding="utf-8", errors="replace") as stat:
        since = stat.read().rpartition(")")[2].split()[19]  # numbers of processes come again
    return f"\0penstock-memory-{os.getuid()}-{agent}-{since}"


def _asked(agent: int) -> Drawers | None:
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(START)
        asking.connect(_address(agent))
        if _user(asking) == os.getuid():
            return Drawers.of(asking.makefile().read())
    return None


def _user(connected: socket.socket) -> int:
    """Who is at the other end."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def _start(agent: int, width: int) -> None:
    nothing: Any = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(agent), str(width)]
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)
    process.returncode = 0  # it outlives this rank, as it should: nobody is to wait for it, or to warn


def _keep(agent: int, width: int) -> None:
    """Keep drawers, and tell this user's processes where they are, until `agent` ends."""
    ended: Any = os.pidfd_open(agent)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(_address(agent))
        drawers = make(4 * width, width)  # two checkpoints, and two of another machine's
        listening.listen(128)
        while not select.select([listening, ended], [], [])[0].count(ended):
            asking, _ = listening.accept()
            with asking, suppress(OSError):
                if drawers is not None and _user(asking) == os.getuid():
                    asking.sendall(drawers.told().encode())


if __name__ == "__main__":
    _keep(int(sys.argv[1]), int(sys.argv[2]))
