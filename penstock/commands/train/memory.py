"""A folder in memory for the checkpoints of a run that may begin again; it is gone when the run is, whatever ends that.

It is named after the process that starts the ranks again: the one that called `launch`, or torchrun's agent. A small process of
our own waits for the end of that one, which may be a SIGKILL, and deletes the folder then.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.comms.process import read_process

MEMORY = Path("/dev/shm")
ROOM = 2 * 3 * 1.1  # of what parameters take: two checkpoints, each of weights and Adam's two averages, and some more
CLEANER = """
import os, select, shutil, sys, time
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except ProcessLookupError:
    pass
for _ in range(10):  # ranks end a moment later, and may write until then
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    time.sleep(0.3)
"""


@contextmanager
def memory_of_launch(wanted: bool) -> Iterator[Path | None]:
    """The folder of a launch by this process, as long as that lasts; None if it is not `wanted`, or there is no such memory."""
    folder = _folder_of(os.getpid()) if wanted else None
    cleaner = _clean_up_after(os.getpid(), folder) if folder else None
    try:
        yield folder
    finally:
        if folder and cleaner:
            shutil.rmtree(folder, ignore_errors=True)
            cleaner.kill()
            cleaner.wait()


def memory_of_agent() -> Path | None:
    """The folder of torchrun's agent, which started this rank; None without such memory, and with ranks on several machines."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    folder = _folder_of(agent := os.getppid())
    if folder and not any(folder.iterdir()):
        _clean_up_after(agent, folder).returncode = 0  # it outlives this rank, as it should: nobody is to wait for it
    return folder


def has_room(folder: Path, parameters: int) -> bool:
    """Whether two checkpoints fit into the memory of `folder`; `parameters`: bytes. Those that are there have shown it."""
    return any(folder.iterdir()) or shutil.disk_usage(folder).free > ROOM * parameters


def _folder_of(owner: int) -> Path | None:
    """The folder of a process that starts ranks, made if it is not there, for this user alone."""
    folder = MEMORY / f"penstock-{socket.gethostname()}-{owner}-{read_process(owner).started}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else None


def _clean_up_after(owner: int, folder: Path) -> "subprocess.Popen[bytes]":
    nothing: Any = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", CLEANER, str(owner), str(folder)]
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)
