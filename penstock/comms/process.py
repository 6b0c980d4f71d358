"""The activity and state of a rank's process: other processes of its machine can read both, even while it is suspended."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from penstock.schedule.table import Action, Kind

MEMORY_FILE_NAME = "penstock-activity"
ActivityMemory = memoryview | Sequence[int]

# The memory is two words of 8 bytes. A write of one word is atomic, so a reader never sees half of it.
STEP_WORD, ACTION_WORD = 0, 1
MEMORY_BYTES = 2 * 8

# STEP_WORD: the step's number, then two bits: in a training step, in an evaluation; 0 if the step is over.
TRAINING_BIT, EVALUATING_BIT, IN_STEP_MASK = 1, 2, 1 | 2

# ACTION_WORD: stage + 1 (32 bits), microbatch (29 bits), kind (2 bits), whether it runs (1 bit); 0: no action yet.
RUNNING_BIT = 1
KINDS = tuple(Kind)
KIND_BITS = {kind: number << 1 for number, kind in enumerate(KINDS)}

SUSPENDED, ENDED, ALIVE = "stopped", "ended", "alive"
LINUX_STATES = {"T": SUSPENDED, "Z": ENDED, "X": ENDED}  # in /proc/PID/stat; any other is alive


class Activity:
    """The current step and action of this process."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(MEMORY_BYTES)).cast("q")
        self.memory_fd = -1  # the file of the memory, once other processes can read it

    def share(self) -> None:
        """Let other processes read the memory from now on, if the system has memory files (Linux)."""
        if self.memory_fd < 0 and hasattr(os, "memfd_create"):
            with suppress(OSError):
                fd = os.memfd_create(MEMORY_FILE_NAME)
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, MEMORY_BYTES)
                memory = memoryview(mmap(fd, MEMORY_BYTES)).cast("q")
                memory[STEP_WORD], memory[ACTION_WORD] = self.memory
                self.memory, self.memory_fd = memory, fd

    @contextmanager
    def during_step(self, number: int, training: bool) -> Iterator[None]:
        """Record that step `number` runs during the block, or an evaluation after step `number`."""
        self.memory[ACTION_WORD] = 0
        self.memory[STEP_WORD] = number << 2 | (TRAINING_BIT if training else EVALUATING_BIT)
        steps_done = number - training
        try:
            yield
            steps_done = number
        finally:
            self.memory[STEP_WORD] = steps_done << 2

    def steps_done(self) -> int | None:
        """Return the number of finished training steps; None if no step has begun."""
        word = self.memory[STEP_WORD]
        return (word >> 2) - (word & IN_STEP_MASK == TRAINING_BIT) if word else None

    def begin_action(self, action: Action) -> None:
        """Record that `action` runs."""
        self.memory[ACTION_WORD] = _encode_action(action)

    def end_action(self) -> None:
        """Record that the action is done."""
        self.memory[ACTION_WORD] &= ~RUNNING_BIT


def describe_activity(memory: ActivityMemory) -> str:
    """Return the activity in the memory of an `Activity` as text: `in 2F3 of step 17`."""
    step_word, action_word = memory
    number, phase = step_word >> 2, step_word & IN_STEP_MASK
    if not phase:
        return f"after step {number}" if number else "before its first step"

    step = f"step {number}" if phase == TRAINING_BIT else "an evaluation"
    if not action_word:
        return f"at the beginning of {step}"
    return f"{'in' if action_word & RUNNING_BIT else 'after'} {_decode_action(action_word)} of {step}"


@cache
def _encode_action(action: Action) -> int:
    kind, stage, microbatch, slice_ = action
    return slice_ << 48 | stage + 1 << 32 | microbatch << 3 | KIND_BITS[kind] | RUNNING_BIT


def _decode_action(word: int) -> Action:
    return Action(KINDS[word >> 1 & 3], (word >> 32 & 2**16 - 1) - 1, word >> 3 & 2**29 - 1, word >> 48)


class ProcessRecord(NamedTuple):
    """Identifies a process, so that other processes of its machine can read its state and its activity."""

    machine: str  # from `machine_id`; empty if the system does not show other processes
    pid: int
    start_ticks: str  # start time in clock ticks since boot: a later process may get the same pid
    activity_fd: int  # the process's descriptor of its `Activity.memory`

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

    def activity(self) -> str:
        """Return the process's activity, or that before it was suspended, as text; empty if this process cannot see it."""
        path = f"/proc/{self.pid}/fd/{self.activity_fd}"
        with suppress(OSError):
            if self.state() and os.readlink(path).startswith(f"/memfd:{MEMORY_FILE_NAME}"):
                return describe_activity(memoryview(Path(path).read_bytes()[:MEMORY_BYTES]).cast("q"))
        return ""


UNKNOWN_PROCESS = ProcessRecord("", 0, "", -1)


def read_process(pid: int, activity_fd: int = -1) -> ProcessRecord:
    """Return the record of this machine's process `pid`; UNKNOWN_PROCESS if this process cannot see it."""
    with suppress(OSError):
        return ProcessRecord(machine_id(), pid, _read_proc_stat(pid)[2], activity_fd)
    return UNKNOWN_PROCESS


def read_parent_process(pid: int) -> ProcessRecord:
    """Return the record of the parent of process `pid`."""
    with suppress(OSError):
        return read_process(int(_read_proc_stat(pid)[1]))
    return UNKNOWN_PROCESS


def read_own_process(activity: Activity) -> ProcessRecord:
    """Return the record of this process. Other processes can read its `activity` from now on."""
    activity.share()
    return read_process(os.getpid(), activity.memory_fd)


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
