"""What the process of a rank runs: the function in the caller's environment; its outcome is sent home."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from penstock.comms.launch.forkserver import HELD_SIGNALS
from penstock.comms.launch.pickling import choose_dumps, unpickle_call
from penstock.comms.preemption import catch_preemption
from penstock.comms.rendezvous import FINISHED, publish_departure
from penstock.comms.system import explain_error
from penstock.errors import LostRankError, PenstockError

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends


class RankResult(NamedTuple):
    """What a rank came to."""

    well: bool
    value: Any  # the function's result, or the error
    traceback: str = ""
    lost_others: bool = False  # it failed only because of that
    ranks: tuple[int, ...] = ()  # those that its error says it comes from
    steps_done: int | None = None  # by its pipelines


class EarlyExitError(PenstockError):
    """A rank called `sys.exit()` as if all were well."""


class RankTask(NamedTuple):
    """What every rank of an attempt is started with."""

    work: bytes  # the function and its arguments, see work.py
    ranks: int
    environment: dict[str, str]  # of the launching process, at that moment; its working directory comes by itself
    preemptible: bool = False  # the launching process catches what asks it to save and leave


def rank_main(job: RankTask, rank: int, sender: Connection, store: Connection) -> None:
    """One rank: the caller's environment with torchrun's in it, the function, the outcome sent home; `store` leads there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launching process ends its ranks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the server's
    if job.preemptible:
        catch_preemption()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    _end_with_launcher()
    os.environ.clear()  # of the server that this rank was forked from
    os.environ.update(
        job.environment, RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.ranks),
        MASTER_ADDR="127.0.0.1",
    )  # fmt: skip
    import torch

    from penstock import torch_private
    from penstock.comms.launch.pipe_store import PipeStore
    from penstock.comms.topology import current_context, shutdown

    meeting_place = PipeStore(store)
    torch_private.set_env_rendezvous(meeting_place)
    os.register_at_fork(after_in_child=sender.close)  # a process that the rank forks would hide the rank's death
    gc.freeze()  # what torch's import made is here to stay: no collection need look at it again
    torch.set_num_threads(_threads())
    by_value = False
    try:
        function, args, by_value = unpickle_call(job.work)
        value = function(*args)
        data, how = _pickled_result(value, rank, by_value), FINISHED
    except BaseException as error:
        data, how = _pickled_error(error, rank, by_value), f"ended with {explain_error(error)}"
    if world := current_context():
        world.depart(how)
    publish_departure(meeting_place, rank, how)  # and those that it has not joined
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it, or there is none
            stream.flush()
    sender.send_bytes(data)  # from now on the launching process may end this one
    shutdown()


def _threads() -> int:
    """As many as the caller's environment says: torch has read that of the server."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else 1


def _pickled_result(value: Any, rank: int, by_value: bool) -> bytes:
    try:
        return choose_dumps(by_value)(RankResult(True, value, steps_done=_steps_done()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PenstockError(f"rank {rank} cannot send home what its function returned ({error}): it must pickle") from error


def _pickled_error(error: BaseException, rank: int, by_value: bool) -> bytes:
    from penstock.comms.process_groups import is_transport_error

    if isinstance(error, SystemExit) and not error.code:  # which would end the launching program too, as if all were well
        error = EarlyExitError(f"rank {rank} called sys.exit() before its function was done")
    text = f"\n\nrank {rank}:\n" + "".join(traceback.format_exception(error))
    causes = list(_causes(error))
    lost_others = any(isinstance(each, LostRankError) or is_transport_error(each) for each in causes)
    ranks = next((each.ranks for each in causes if isinstance(each, PenstockError) and each.ranks), ())
    try:
        data = choose_dumps(by_value)(RankResult(False, error, text, lost_others, ranks, _steps_done()))
        str(pickle.loads(data).value)
        return data
    except Exception:
        told = PenstockError(f"rank {rank}: {explain_error(error)}")
        return pickle.dumps(RankResult(False, told, text, lost_others, ranks, _steps_done()))


def _steps_done() -> int | None:
    from penstock.comms.topology import current_context

    world = current_context()
    return world.activity.steps_done() if world else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised because of."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _end_with_launcher() -> None:
    """This rank ends when the launching process does. On Linux one that is stopped too, with the server, its parent."""
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)
