"""The main function of a rank's process: run the user's function, and send its result or error to the launching process."""

import bdb
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from penstock.comms.preemption import catch_preemption
from penstock.comms.status import RankStatus, publish, status_of_end
from penstock.comms.system import explain_error
from penstock.comms.wait_errors import is_transport_error
from penstock.errors import LostRankError, PenstockError
from penstock.launcher.forkserver import HELD_SIGNALS
from penstock.launcher.pickling import choose_pickle_dumps, unpickle_call

PR_SET_PDEATHSIG = 1  # Linux's prctl for the signal that a process gets when its parent ends


class RankResult(NamedTuple):
    """What a rank returned or raised, and the status that follows from it: its own, or that of a rank which its error names."""

    value: Any  # what the function returned, or the error, pickled while on its way; None if the process has ended without
    status: RankStatus
    traceback: str = ""
    steps_done: int | None = None  # training steps of its pipelines

    @classmethod
    def of_error(cls, rank: int, error: PenstockError) -> "RankResult":
        """Return the result of a rank that the launching process says has raised `error`."""
        return cls(error, RankStatus(rank, "raised", str(error)))

    @property
    def succeeded(self) -> bool:
        """Whether the function has returned."""
        return self.status.kind == "left"

    @property
    def crashed(self) -> bool:
        """Whether the process has ended by itself, without a result and not by a signal from outside."""
        return self.status.kind == "gone" and bool(self.status.error)


class EarlyExitError(PenstockError):
    """A rank called `sys.exit()` without an error code."""


class LaunchSpec(NamedTuple):
    """The input of `rank_main`, the same for every rank of an attempt."""

    call: bytes  # the function and its arguments, from `pickle_call`
    ranks: int
    environment: dict[str, str]  # of the launching process; its working directory is inherited
    catches_preemption: bool = False  # whether the launching process does
    start_method: str | None = None  # of multiprocessing, as set in the launching process; None for the platform's default


def rank_main(spec: LaunchSpec, rank: int, result_pipe: Connection, store_pipe: Connection) -> None:
    """Run the call of `spec` as this rank, with torchrun's environment variables; send its RankResult by `result_pipe`."""
    _set_up_process(spec, rank)
    import torch

    from penstock import torch_private
    from penstock.comms.topology import current_context, shutdown
    from penstock.launcher.pipe_store import PipeStore

    store = PipeStore(store_pipe)
    torch_private.set_env_rendezvous(store)
    os.register_at_fork(after_in_child=result_pipe.close)  # an open copy in a forked child would hide the rank's death
    gc.freeze()  # exclude what torch's import created, and is never deleted, from garbage collections
    torch.set_num_threads(_num_threads())

    by_value = False
    try:
        function, args, by_value = unpickle_call(spec.call)
        value = function(*args)
        status = status_of_end(rank, None)
        data = _pickle_value(value, status, by_value)
    except BaseException as error:
        data, status = _pickle_error(error, rank, by_value), status_of_end(rank, error)

    if context := current_context():
        context.publish_end(status)
    publish(store, status)  # also for ranks that wait in this store, before they have joined
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # its reader is gone, or there is none
            stream.flush()
    result_pipe.send_bytes(data)  # from now on the launching process may end this one
    shutdown()


def _set_up_process(spec: LaunchSpec, rank: int) -> None:
    """Set signal handlers and environment variables, and make this process end together with the launching one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launching process ends its ranks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # instead of the fork server's handler
    if spec.catches_preemption:
        catch_preemption()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)

    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    if sys.platform == "linux":  # also while suspended: the fork server, its parent, ends with the launching process
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # Start a DataLoader's workers as in a program without ranks. By this process's start method each would import torch again.
    multiprocessing.set_start_method(spec.start_method, force=True)

    os.environ.clear()  # the variables of the fork server
    os.environ.update(
        spec.environment, RANK=str(rank), WORLD_SIZE=str(spec.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(spec.ranks),
        MASTER_ADDR="127.0.0.1",
    )  # fmt: skip


def _exit_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


def _num_threads() -> int:
    """Return the launching process's OMP_NUM_THREADS, or 1. torch itself has read the fork server's."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) else 1


def _pickle_value(value: Any, status: RankStatus, by_value: bool) -> bytes:
    """Return the RankResult of a function that returned `value`, as bytes. Raises PenstockError if it does not pickle."""
    try:
        return pickle.dumps(RankResult(choose_pickle_dumps(by_value)(value), status, steps_done=_steps_done()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PenstockError(
            f"rank {status.rank} cannot send home what its function returned ({error}): it must pickle"
        ) from error


def _pickle_error(error: BaseException, rank: int, by_value: bool) -> bytes:
    """Return the RankResult of a function that raised `error`, as bytes. An error that does not pickle is sent as its text."""
    if isinstance(error, SystemExit) and not error.code:  # `launch` would raise it, and end the program without an error
        error = EarlyExitError(f"rank {rank} called sys.exit() before its function was done")

    if isinstance(error, bdb.BdbQuit):
        problem = f"rank {rank} came to a breakpoint, but ranks that `launch` starts have no terminal"
        error = PenstockError(
            f"{problem}: call the function itself, without launch, and it runs as the only rank"
        ).with_traceback(error.__traceback__)

    text = f"\n\nrank {rank}:\n" + "".join(traceback.format_exception(error))
    try:
        value = choose_pickle_dumps(by_value)(error)
    except Exception:
        value = b""
    return pickle.dumps(RankResult(value, _status_of_failure(error, rank), text, _steps_done()))


def _status_of_failure(error: BaseException, rank: int) -> RankStatus:
    """Return the status that `error` on `rank` tells: that it waited for others, or raised; or that the named rank raised."""
    causes = list(_error_and_causes(error))
    ranks = next((cause.ranks for cause in causes if isinstance(cause, PenstockError) and cause.ranks), ())
    lost_others = any(isinstance(cause, LostRankError) or is_transport_error(cause) for cause in causes)
    if lost_others and rank not in ranks:
        return RankStatus(rank, "waited", explain_error(error), time.time(), peers=ranks)
    return RankStatus(ranks[0] if ranks else rank, "raised", explain_error(error), time.time(), type(error).__name__)


def _steps_done() -> int | None:
    from penstock.comms.topology import current_context

    context = current_context()
    return context.activity.steps_done if context else None


def _error_and_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
