"""Processes of this machine as its system sees them: a rank that is stopped, or whose process has ended, is known for sure."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from penstock.comms.health.doing import BYTES, NAME, doing, told

STOPPED, ENDED, ALIVE = "stopped", "ended", "alive"
STATES = {"T": STOPPED, "Z": ENDED, "X": ENDED}  # Linux's, in /proc/PID/stat; any other is alive


class Process(NamedTuple):
    """A rank's process, as it tells the others."""

    machine: str  # this boot of the kernel, and what it numbers processes by; empty where the system tells nothing of others
    number: int
    started: str  # in ticks since the system is up; a number may be given again
    file: int  # of what it is doing

    def state(self) -> str:
        """STOPPED, ENDED or ALIVE; empty if it cannot be seen from here."""
        if not self.machine or self.machine != machine():
            return ""
        try:
            state, _, started = _stat(self.number)
        except FileNotFoundError:
            return ENDED
        except OSError:
            return ""
        return STATES.get(state, ALIVE) if started == self.started else ENDED

    def doing(self) -> str:
        """What it is doing, or was when it stopped; empty if it cannot be seen from here."""
        path = f"/proc/{self.number}/fd/{self.file}"
        with suppress(OSError):
            if self.state() and os.readlink(path).startswith(f"/memfd:{NAME}"):
                return told(memoryview(Path(path).read_bytes()[:BYTES]).cast("q"))
        return ""


UNKNOWN = Process("", 0, "", -1)  # one that cannot be seen


def process_of(number: int, file: int = -1) -> Process:
    """The process of this machine that has this number now."""
    with suppress(OSError):
        return Process(machine(), number, _stat(number)[2], file)
    return UNKNOWN


def parent_of(number: int) -> Process:
    """The one that has started it."""
    with suppress(OSError):
        return process_of(int(_stat(number)[1]))
    return UNKNOWN


def this_process() -> Process:
    """The process that asks. What it is doing can be read from now on."""
    doing.share()
    return process_of(os.getpid(), doing.file)


def _stat(number: int) -> tuple[str, str, str]:
    """State, parent and start of a process. Raises OSError for one that is gone, and where there is no /proc."""
    text = Path(f"/proc/{number}/stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # after its name, which may have anything in it
    return fields[0], fields[1], fields[19]


@cache
def machine() -> str:
    """The same for processes that see each other's numbers."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
