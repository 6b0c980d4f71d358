"""The fork server: a process that only imports torch. Ranks are forked from it.

A plain fork of a program that has run a backward may hang. The server ends when the program that started it ends
(`forkserver_child`).
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

# torch's first backward and first optimizer import the last two, in two seconds: here that is done once for all ranks.
PRELOAD = [
    *("penstock.launcher.forkserver_child", "penstock.pipeline", "penstock.checkpoint"),
    *("torch.fx.experimental.symbolic_shapes", "torch._dynamo"),
]
FORKSERVER_ENDED_EXIT_CODE = 255  # Python's code for a process whose fork server has ended
HELD_SIGNALS = {signal.SIGINT, *PREEMPTION_SIGNALS}
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under Windows


class ForkserverEndedError(LostRankError):
    """The fork server and all ranks have ended before the program."""

    def __init__(self) -> None:
        super().__init__("the server process that the ranks were forked from was killed")


def start_forkserver_early() -> None:
    """Start the fork server now, so that it imports torch while this process does, and `launch` starts ranks sooner.

    Call it before torch is imported, once it is clear that ranks will be launched. Does nothing under torchrun, which has
    started the ranks, or if there may be a GPU.
    """
    under_torchrun, may_have_gpu = "RANK" in os.environ, any(map(os.path.exists, GPU_DEVICE_FILES))
    if not under_torchrun and not may_have_gpu and "forkserver" in multiprocessing.get_all_start_methods():
        forkserver_context()


def forkserver_context() -> Any:
    """Start the server unless it runs; return the multiprocessing context whose processes are forked from it.

    Ctrl-C does not reach the server; it ends with this process.
    """
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # else the server would start it, with signals unblocked
    try:
        with block_signals_in_children():
            forkserver.ensure_running()
    except OSError as error:
        if error.errno in DESCRIPTOR_TABLE_FULL:
            raise
        problem = f"ranks cannot be started: {error.strerror or error}"
        raise PenstockError(f"{problem}; set TMPDIR to a folder that can be written to, with a short path") from error
    return context


@contextmanager
def block_signals_in_children() -> Iterator[None]:
    """Block signals in processes that the block starts: a rank unblocks them once it has set its handlers.

    Preemption signals are blocked only if this program catches them: the server also forks other processes of the program.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS if catches_preemption() else {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
