"""Preemption: signals that ask the program to save and leave, where they would end it.

The handler only notes that a signal came; waits go on. At the end of the step the ranks exchange it (engine/report.py), so that
all leave after the same step.
"""

import atexit
import os
import signal
import time
from contextlib import suppress
from types import FrameType

from penstock.comms.time_limits import REPEATED_SIGNAL_SECONDS
from penstock.errors import PenstockError

PREEMPTION_SIGNALS = {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}  # Windows has no SIGUSR1

_catching_pid: int | None = None  # the process that catches them; those that it forks do not
_first_arrival: dict[int, float] = {}  # signal -> time.monotonic() when it came first
_forward_pids: set[int] = set()  # processes that get the signals too: the ranks that this process has launched


def catch_preemption() -> None:
    """From now on SIGTERM and SIGUSR1 ask this program to save and leave; without this call they end it.

    Call it first, in the main thread: under torchrun in the script; in a program that launches its ranks before `launch`, which
    forwards the signal to them. It is enough that one rank of many gets it. A second SIGTERM, two seconds later or more, ends
    the process at once.

        ps.comms.catch_preemption()
        for inputs, target in batches:
            loss = pipe.step(inputs, target=target)
            optimizer.step(), optimizer.zero_grad()
            if pipe.preempted:  # on every rank after the same step
                checkpoint.save(folder, pipe, optimizer)
                sys.exit(75)  # EX_TEMPFAIL: try again later

    A second call does nothing. Raises PenstockError outside the main thread.
    """
    global _catching_pid
    if _catching_pid == os.getpid():
        return

    try:
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, _handle_signal)
            signal.siginterrupt(number, False)  # a system call that it interrupts goes on
    except ValueError as error:
        raise PenstockError(f"catch_preemption() must be called in the main thread: {error}") from None

    if _catching_pid is None:
        atexit.register(_ignore_preemption_signals)
    _catching_pid = os.getpid()
    _first_arrival.clear()
    _forward_pids.clear()


def catches_preemption() -> bool:
    """Return whether this process has called `catch_preemption`."""
    return _catching_pid == os.getpid()


def preempted() -> bool:
    """Return whether this process has been asked to save and leave."""
    return catches_preemption() and bool(_first_arrival)


def forward_signals_to(pid: int) -> None:
    """Send process `pid` every preemption signal that this process gets, and those that it has got already."""
    if catches_preemption():
        _forward_pids.add(pid)
        for number in list(_first_arrival):
            _send_signal(pid, number)


def stop_forwarding_to(pid: int) -> None:
    """Send process `pid`, which has ended, no more signals."""
    _forward_pids.discard(pid)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    first = _first_arrival.setdefault(number, now)
    for pid in list(_forward_pids) if catches_preemption() else ():
        _send_signal(pid, number)

    if not catches_preemption() or (number == signal.SIGTERM and now > first + REPEATED_SIGNAL_SECONDS):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _ignore_preemption_signals() -> None:
    """Ignore the signals: the program leaves already, and Python removes its handlers before the process ends."""
    for number in PREEMPTION_SIGNALS if catches_preemption() else ():
        signal.signal(number, signal.SIG_IGN)


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
