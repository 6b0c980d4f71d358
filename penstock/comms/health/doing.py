"""What this rank is doing, in memory that others of its machine can read even while this process is stopped."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from mmap import mmap

from penstock.schedule.table import Action, Kind

NAME = "penstock-doing"
KINDS = tuple(Kind)
BITS = {kind: number << 1 for number, kind in enumerate(KINDS)}
STEP, ACTION = 0, 1  # the words of the memory, each written at once: a reader never sees half of one
BYTES = 2 * 8
TRAINING, EVALUATING, WITHIN = 1, 2, 1 | 2  # the last bits of STEP, above them the step's number; neither: it is over
Words = memoryview | Sequence[int]
RUNNING = 1  # the last bit of ACTION, above it the kind, the microbatch, and the stage from 1; 0: none yet


class Doing:
    """What the process is doing."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(BYTES)).cast("q")
        self.file = -1  # of the memory, once others can read it

    def share(self) -> None:
        """From now on others can read it, where the system has such memory."""
        if self.file < 0 and hasattr(os, "memfd_create"):
            with suppress(OSError):
                file = os.memfd_create(NAME)
                os.fchmod(file, 0o600)
                os.ftruncate(file, BYTES)
                words = memoryview(mmap(file, BYTES)).cast("q")
                words[STEP], words[ACTION] = self.words
                self.words, self.file = words, file

    @contextmanager
    def step(self, number: int, training: bool) -> Iterator[None]:
        """Around a step, or an evaluation after so many."""
        self.words[ACTION] = 0
        self.words[STEP] = number << 2 | (TRAINING if training else EVALUATING)
        done = number - training
        try:
            yield
            done = number
        finally:
            self.words[STEP] = done << 2

    def steps_done(self) -> int | None:
        """How many steps are done; None: none has begun."""
        step = self.words[STEP]
        return (step >> 2) - (step & WITHIN == TRAINING) if step else None

    def enter(self, action: Action) -> None:
        """The action begins."""
        self.words[ACTION] = _word(action)

    def leave(self) -> None:
        """It is done."""
        self.words[ACTION] &= ~RUNNING


def told(words: Words) -> str:
    """What a rank is doing by its `words`, in ours: `in 2F3 of step 17`."""
    step, action = words
    number, phase = step >> 2, step & WITHIN
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


doing = Doing()
