"""Preemption: signals that ask the program to save and leave, where they would end it.

A handler only notes that one came; what the program waits for goes on. At the end of the step the ranks tell each other
(engine/report.py), so that all leave after the same one.
"""

import atexit
import os
import signal
import time
from contextlib import suppress
from types import FrameType

from penstock.errors import PenstockError

ASKING = {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}  # Windows has no SIGUSR1
SAME = 2.0  # seconds: a scheduler may tell all processes at once, and what started them tells them again

_process: int | None = None  # the one that catches; those that it forks do not
_came: dict[int, float] = {}  # each signal, when it came first
_followers: set[int] = set()  # processes that are told too: the ranks that this one has launched


def catch_preemption() -> None:
    """From now on SIGTERM and SIGUSR1 ask this program to save and leave; without this call they end it.

    Call it first of all, in the main thread: under torchrun in the script, where a program launches its ranks before `launch`,
    which hands the signal on. It is enough that one rank of many gets it. A second SIGTERM, two seconds later or more, ends the
    process at once.

        ps.comms.catch_preemption()
        for inputs, target in batches:
            loss = pipe.step(inputs, target=target)
            optimizer.step(), optimizer.zero_grad()
            if pipe.preempted:  # on every rank after the same step
                checkpoint.save(folder, pipe, optimizer)
                sys.exit(75)  # EX_TEMPFAIL: try again later

    A second call does nothing. Raises PenstockError outside the main thread.
    """
    global _process
    if _process == os.getpid():
        return
    try:
        for number in ASKING:
            signal.signal(number, _note)
            signal.siginterrupt(number, False)  # a call of the system that it interrupts goes on
    except ValueError as error:
        raise PenstockError(f"catch_preemption() must be called in the main thread: {error}") from None
    if _process is None:
        atexit.register(_leave)
    _process = os.getpid()
    _came.clear()
    _followers.clear()


def catches_preemption() -> bool:
    """Whether this process has called `catch_preemption`."""
    return _process == os.getpid()


def preempted() -> bool:
    """Whether this process has been asked to save and leave."""
    return catches_preemption() and bool(_came)


def tell_too(process: int) -> None:
    """Hand on to `process` what this one is asked, or has been asked already."""
    if catches_preemption():
        _followers.add(process)
        for number in list(_came):
            _send(process, number)


def tell_no_more(process: int) -> None:
    """That one has ended."""
    _followers.discard(process)


def _note(number: int, frame: FrameType | None) -> None:
    first, now = _came.setdefault(number, time.monotonic()), time.monotonic()
    for process in list(_followers) if catches_preemption() else ():
        _send(process, number)
    if not catches_preemption() or (number == signal.SIGTERM and now > first + SAME):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _leave() -> None:
    """At the exit of the program: it leaves already, and Python's handlers end before it does."""
    for number in ASKING if catches_preemption() else ():
        signal.signal(number, signal.SIG_IGN)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
