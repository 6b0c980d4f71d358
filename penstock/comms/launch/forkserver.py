"""The server that ranks are forked from: a process that has imported torch once, and runs nothing else.

A plain fork of a program that has run a backward may hang. The server is up until the program that started it ends, and
`in_server` is what it does then.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.comms.preemption import PREEMPTION_SIGNALS, catches_preemption
from penstock.comms.system import DESCRIPTOR_TABLE_FULL
from penstock.errors import LostRankError, PenstockError

# The last two are what torch's first backward and first optimizer import: two seconds, once instead of on every rank.
PRELOAD = [
    *("penstock.comms.launch.forkserver_child", "penstock.pipeline", "penstock.checkpoint"),
    *("torch.fx.experimental.symbolic_shapes", "torch._dynamo"),
]
FORKSERVER_ENDED_EXIT_CODE = 255  # Python's exit code for a process whose server has ended
HELD_SIGNALS = {signal.SIGINT, *PREEMPTION_SIGNALS}
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under Windows


class ForkserverEndedError(LostRankError):
    """The server has ended before the program, and with it all ranks."""

    def __init__(self) -> None:
        super().__init__("the server process that the ranks were forked from was killed")


def start_forkserver_early() -> None:
    """Start the server, which imports torch while this process does: `launch` is up sooner.

    To be called before torch is imported, when it is clear that ranks will be launched. Does nothing under torchrun, which has
    ranks, and where there may be a GPU.
    """
    if (
        "RANK" not in os.environ
        and not any(map(os.path.exists, GPU_DEVICE_FILES))
        and "forkserver" in multiprocessing.get_all_start_methods()
    ):
        forkserver_context()


def forkserver_context() -> Any:
    """Processes forked from the server, which runs from now on. Ctrl-C never reaches it: it ends with this process."""
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server starts it too, and that would let signals through again
    try:
        with hold_signals():
            forkserver.ensure_running()
    except OSError as error:
        if error.errno in DESCRIPTOR_TABLE_FULL:
            raise
        told = f"ranks cannot be started: {error.strerror or error}"
        raise PenstockError(f"{told}; set TMPDIR to a folder that can be written to, with a short path") from error
    return context


@contextmanager
def hold_signals() -> Iterator[None]:
    """Processes started inside hold back the signals that are for their program: a rank until it knows what to do with them.

    Those that ask it to leave only where it catches them: the server forks the program's own processes too.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS if catches_preemption() else {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
