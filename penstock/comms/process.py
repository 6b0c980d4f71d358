"""What a rank's process does, and how it is, as others of its machine see both, even while it is stopped."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from penstock.schedule.table import Action, Kind

MEMORY_FILE_NAME = "penstock-activity"
KINDS = tuple(Kind)
BITS = {kind: number << 1 for number, kind in enumerate(KINDS)}
STEP_WORD, ACTION_WORD = 0, 1  # the words of the memory, each written at once: a reader never sees half of one
BYTES = 2 * 8
TRAINING, EVALUATING, IN_STEP_MASK = 1, 2, 1 | 2  # the last bits of STEP, above them the step's number; neither: it is over
Words = memoryview | Sequence[int]
SUSPENDED, ENDED, ALIVE = "stopped", "ended", "alive"
STATES = {"T": SUSPENDED, "Z": ENDED, "X": ENDED}  # Linux's, in /proc/PID/stat; any other is alive
RUNNING = 1  # the last bit of ACTION, above it the kind, the microbatch, and the stage from 1; 0: none yet


class Activity:
    """What this process does now."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(BYTES)).cast("q")
        self.file = -1  # of the memory, once others can read it

    def share(self) -> None:
        """From now on others can read it, where the system has such memory."""
        if self.file < 0 and hasattr(os, "memfd_create"):
            with suppress(OSError):
                file = os.memfd_create(MEMORY_FILE_NAME)
                os.fchmod(file, 0o600)
                os.ftruncate(file, BYTES)
                words = memoryview(mmap(file, BYTES)).cast("q")
                words[STEP_WORD], words[ACTION_WORD] = self.words
                self.words, self.file = words, file

    @contextmanager
    def during_step(self, number: int, training: bool) -> Iterator[None]:
        """Around a step, or an evaluation after so many."""
        self.words[ACTION_WORD] = 0
        self.words[STEP_WORD] = number << 2 | (TRAINING if training else EVALUATING)
        done = number - training
        try:
            yield
            done = number
        finally:
            self.words[STEP_WORD] = done << 2

    def steps_done(self) -> int | None:
        """How many steps are done; None: none has begun."""
        step = self.words[STEP_WORD]
        return (step >> 2) - (step & IN_STEP_MASK == TRAINING) if step else None

    def begin_action(self, action: Action) -> None:
        """The action begins."""
        self.words[ACTION_WORD] = _word(action)

    def end_action(self) -> None:
        """It is done."""
        self.words[ACTION_WORD] &= ~RUNNING


def describe_activity(words: Words) -> str:
    """What a rank is doing by its `words`, in ours: `in 2F3 of step 17`."""
    step, action = words
    number, phase = step >> 2, step & IN_STEP_MASK
    if not phase:
        return f"after step {number}" if number else "before its first step"
    where = f"step {number}" if phase == TRAINING else "an evaluation"
    if not action:
        return f"at the beginning of {where}"
    return f"{'in' if action & RUNNING else 'after'} {_action(action)} of {where}"


@cache
def _word(action: Action) -> int:
    kind, stage, microbatch = action
    return stage + 1 << 32 | microbatch << 3 | BITS[kind] | RUNNING


def _action(word: int) -> Action:
    return Action(KINDS[word >> 1 & 3], (word >> 32) - 1, word >> 3 & 2**29 - 1)


class ProcessRecord(NamedTuple):
    """A rank's process, as it tells the others."""

    machine: str  # this boot of the kernel, and what it numbers processes by; empty where the system tells nothing of others
    number: int
    started: str  # in ticks since the system is up; a number may be given again
    file: int  # of what it is doing

    def state(self) -> str:
        """STOPPED, ENDED or ALIVE; empty if it cannot be seen from here."""
        if not self.machine or self.machine != machine_id():
            return ""
        try:
            state, _, started = _stat(self.number)
        except FileNotFoundError:
            return ENDED
        except OSError:
            return ""
        return STATES.get(state, ALIVE) if started == self.started else ENDED

    def activity(self) -> str:
        """What it is doing, or was when it stopped; empty if it cannot be seen from here."""
        path = f"/proc/{self.number}/fd/{self.file}"
        with suppress(OSError):
            if self.state() and os.readlink(path).startswith(f"/memfd:{MEMORY_FILE_NAME}"):
                return describe_activity(memoryview(Path(path).read_bytes()[:BYTES]).cast("q"))
        return ""


UNKNOWN_PROCESS = ProcessRecord("", 0, "", -1)  # one that cannot be seen


def read_process(number: int, file: int = -1) -> ProcessRecord:
    """The process of this machine that has this number now."""
    with suppress(OSError):
        return ProcessRecord(machine_id(), number, _stat(number)[2], file)
    return UNKNOWN_PROCESS


def read_parent_process(number: int) -> ProcessRecord:
    """The one that has started it."""
    with suppress(OSError):
        return read_process(int(_stat(number)[1]))
    return UNKNOWN_PROCESS


def read_own_process(activity: Activity) -> ProcessRecord:
    """The process that asks. Its `activity` can be read from now on."""
    activity.share()
    return read_process(os.getpid(), activity.file)


def _stat(number: int) -> tuple[str, str, str]:
    """State, parent and start of a process. Raises OSError for one that is gone, and where there is no /proc."""
    text = Path(f"/proc/{number}/stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # after its name, which may have anything in it
    return fields[0], fields[1], fields[19]


@cache
def machine_id() -> str:
    """The same for processes that see each other's numbers."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
