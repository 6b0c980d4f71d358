"""What the store has of a rank: its process, whose state its machine shows, and its last heartbeat, with what it is doing."""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedule.table import Action

if TYPE_CHECKING:
    from torch.distributed import Store

SUSPENDED, ENDED, ALIVE = "stopped", "ended", "alive"
LINUX_STATES = {"T": SUSPENDED, "Z": ENDED, "X": ENDED}  # in /proc/PID/stat; any other is alive


def read_text(store: "Store", key: str) -> str:
    """Return the text stored under `key`; empty if there is none yet."""
    return store.get(key).decode() if store.check([key]) else ""


class Activity:
    """The current step and action of this process. The heartbeat's thread reads `now` while the main thread writes it.

    Each action that begins or ends is a new tuple: one that is the same for long shows that an action takes long.
    """

    def __init__(self) -> None:
        self.now: tuple[str, Action | None, bool] = "", None, False  # the step, empty between steps; the action; if it runs
        self.steps_done: int | None = None  # finished training steps; None if none has begun

    @contextmanager
    def during_step(self, number: int, training: bool) -> Iterator[None]:
        """Record that step `number` runs during the block, or an evaluation after step `number`."""
        self.now = f"step {number}" if training else "an evaluation", None, False
        self.steps_done = number - 1 if training else number or None
        try:
            yield
            self.steps_done = number or None
        finally:
            self.now = "", None, False

    def describe(self) -> str:
        """Return the activity as text: `in 2F3 of step 17`; empty before the first step."""
        step, action, is_running = self.now
        if not step:
            return f"after step {self.steps_done}" if self.steps_done else ""
        return f"{'in' if is_running else 'after'} {action} of {step}" if action else f"at the beginning of {step}"


class ProcessRecord(NamedTuple):
    """Identifies a process, so that other processes of its machine can read its state."""

    machine: str  # from `machine_id`; empty if the system does not show other processes
    pid: int
    start_ticks: str  # start time in clock ticks since boot: a later process may get the same pid

    def state(self) -> str:
        """Return SUSPENDED, ENDED or ALIVE; an empty string if this process cannot see it."""
        if not self.machine or self.machine != machine_id():
            return ""
        try:
            state, _, start_ticks = _read_proc_stat(self.pid)
        except FileNotFoundError:
            return ENDED
        except OSError:
            return ""
        return LINUX_STATES.get(state, ALIVE) if start_ticks == self.start_ticks else ENDED


UNKNOWN_PROCESS = ProcessRecord("", 0, "")


def read_process(pid: int) -> ProcessRecord:
    """Return the record of this machine's process `pid`; UNKNOWN_PROCESS if this process cannot see it."""
    with suppress(OSError):
        return ProcessRecord(machine_id(), pid, _read_proc_stat(pid)[2])
    return UNKNOWN_PROCESS


def read_parent_process(pid: int) -> ProcessRecord:
    """Return the record of the parent of process `pid`."""
    with suppress(OSError):
        return read_process(int(_read_proc_stat(pid)[1]))
    return UNKNOWN_PROCESS


def _read_proc_stat(pid: int) -> tuple[str, str, str]:
    """Return state, parent's pid and start time of a process. Raises OSError if it is gone, or there is no /proc."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # behind the process's name, which may contain any character
    return fields[0], fields[1], fields[19]


@cache
def machine_id() -> str:
    """Return a text that is equal for two processes exactly if they see each other's pids: kernel boot and pid namespace."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


# ---- in the store


def publish_process(store: "Store", rank: int) -> None:
    """Write the record of this process, which is `rank`."""
    store.set(f"process-{rank}", json.dumps(read_process(os.getpid())))


def have_published_processes(store: "Store", ranks: Collection[int]) -> bool:
    """Return whether all of these `ranks` have called `publish_process`."""
    return bool(store.check([f"process-{rank}" for rank in ranks]))


def read_process_of_rank(store: "Store", rank: int) -> ProcessRecord:
    """Return the record of the process of `rank`; UNKNOWN_PROCESS if it has not published one."""
    text = read_text(store, f"process-{rank}")
    return ProcessRecord(*json.loads(text)) if text else UNKNOWN_PROCESS


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    number: int = 0
    activity: str = ""  # as `Activity.describe` gives it


def publish_beat(store: "Store", rank: int, beat: Heartbeat) -> None:
    """Write a heartbeat of this `rank`."""
    store.set(f"beat-{rank}", json.dumps(beat))


def read_beat(store: "Store", rank: int) -> Heartbeat:
    """Return the last heartbeat of `rank`."""
    return Heartbeat(*json.loads(read_text(store, f"beat-{rank}") or "[]"))
