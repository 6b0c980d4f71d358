"""Preemption: signals that by default end the program ask it to save and exit instead.

The handler only records the signal; waits continue. At the end of the step the ranks exchange it (engine/report.py), so that
all exit after the same step.
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

_catching_pid: int | None = None  # the process that catches them; its forked children do not
_first_arrival: dict[int, float] = {}  # signal -> time.monotonic() when it arrived first
_forward_pids: set[int] = set()  # processes that the signals are forwarded to: the ranks that this process has launched


def catch_preemption() -> None:
    """Set handlers so that SIGTERM and SIGUSR1 ask this program to save and exit, instead of ending it.

    Call it first, in the main thread. Under torchrun call it in the script; else before `launch`, which forwards the signal to
    the ranks. It is enough that one rank gets it. A second SIGTERM, two seconds later or more, ends the process at once.

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
            signal.siginterrupt(number, False)  # an interrupted system call is continued
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
    """Return whether a signal has asked this process to save and exit."""
    return bool(_first_arrival) and catches_preemption()


def forward_signals_to(pid: int) -> None:
    """Forward every preemption signal of this process to process `pid`, those that have arrived already too."""
    if catches_preemption():
        _forward_pids.add(pid)
        for number in list(_first_arrival):
            _send_signal(pid, number)


def stop_forwarding_to(pid: int) -> None:
    """Stop forwarding signals to process `pid`, which has ended."""
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
    """Ignore the signals at exit: Python removes its handlers before the process ends, so they would kill it."""
    for number in PREEMPTION_SIGNALS if catches_preemption() else ():
        signal.signal(number, signal.SIG_IGN)


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
