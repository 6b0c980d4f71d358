"""A folder in memory for the checkpoints of a run that may restart. It is deleted when the run ends, even by SIGKILL.

The folder is named after the process that restarts the ranks: the caller of `launch`, or torchrun's agent. A small process
waits until that process ends, and then deletes the folder.
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
ROOM_FACTOR = 2 * 3 * 1.1  # bytes for a byte of parameters: two checkpoints of weights and Adam's two averages, and 10 %
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
def memory_of_launch(enabled: bool) -> Iterator[Path | None]:
    """Make the folder of a launch by this process, and delete it at the end; None if not `enabled`, or without /dev/shm."""
    folder = _folder_of(os.getpid()) if enabled else None
    cleaner = _clean_up_after(os.getpid(), folder) if folder else None
    try:
        yield folder
    finally:
        if folder and cleaner:
            shutil.rmtree(folder, ignore_errors=True)
            cleaner.kill()
            cleaner.wait()


def memory_of_agent() -> Path | None:
    """Make the folder of torchrun's agent, this rank's parent; None without /dev/shm, or with ranks on several machines."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    folder = _folder_of(agent := os.getppid())
    if folder and not any(folder.iterdir()):
        _clean_up_after(agent, folder).returncode = 0  # the process outlives this rank; nothing waits for it
    return folder


def has_room(folder: Path, parameters: int) -> bool:
    """Return whether two checkpoints fit into the memory of `folder`, or are there already; `parameters`: bytes."""
    return any(folder.iterdir()) or shutil.disk_usage(folder).free > ROOM_FACTOR * parameters


def _folder_of(owner: int) -> Path | None:
    """Make the folder of the process `owner`, for this user alone; return None if that fails."""
    folder = MEMORY / f"penstock-{socket.gethostname()}-{owner}-{read_process(owner).start_ticks}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() else None


def _clean_up_after(owner: int, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the process that deletes `folder` once the process `owner` has ended."""
    devnull: Any = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", CLEANER, str(owner), str(folder)]
    return subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, cwd="/", start_new_session=True)
