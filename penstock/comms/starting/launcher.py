"""Start ranks on this machine for a function: a small torchrun inside the program, up in a tenth of a second.

Ranks are forked from a server process that has imported torch once, and runs nothing else (a plain fork of a program that
has run a backward may hang). Where torch sees a GPU they are spawned instead. They get the environment torchrun would give
them, and join through a store that this process holds.
"""

import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from penstock.comms.starting.meeting import FINISHED, depart
from penstock.comms.system import reason
from penstock.errors import LostRankError, PenstockError

T = TypeVar("T")
# The last two are what torch's first backward and first optimizer import: two seconds, once instead of on every rank.
PRELOAD = ["penstock.pipeline", "penstock.checkpoint", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"]
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under Windows
UNGUARDED = 86  # the exit code of a rank that launches ranks while it imports the program
PARTING = 0.2  # seconds in which ranks may let go of what the system keeps for them: semaphores, files in /tmp
LAST_WORDS = 2.0  # seconds the other ranks have to tell what they know once one has failed


class Outcome(NamedTuple):
    """What a rank came to."""

    well: bool
    value: Any  # the function's result, or the error
    traceback: str = ""


class _Job(NamedTuple):
    """What every rank is started with."""

    work: bytes  # the function and its arguments, pickled
    ranks: int
    environment: dict[str, str]  # of the launching process, at that moment; its working directory comes by itself


class _Died(LostRankError):
    """A rank's process ended without an outcome."""


class RankTraceback(Exception):
    """The cause of an error re-raised by `launch`: the traceback of the rank it happened on, as text."""

    def __str__(self) -> str:
        return str(self.args[0])


def launch(function: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """Run `function(*args)` on `ranks` processes of this machine at once; returns their results, by rank.

    `function`: what every rank runs. It pickles, so it stands at the top level of a module, and a script that launches does so
    under `if __name__ == "__main__":`. Arguments and results pickle too.
    `ranks`: how many, 1 or more.

        def work(steps):
            return ps.comms.init_distributed().rank * steps

        ps.launch(work, 4, 10)                                  # [0, 10, 20, 30]

    Ranks have the environment and working directory that this process has now. Each computes on one thread unless
    OMP_NUM_THREADS says otherwise, so that bits do not depend on the number of ranks. The first error of any rank is raised
    here, its own traceback as the cause; LostRankError if a rank died, or waits for one that has returned. No rank outlives
    the call.
    """
    _end_if_imported_by_a_rank()
    if not isinstance(ranks, int) or ranks < 1:
        raise PenstockError(f"cannot launch {ranks!r} ranks: use a whole number of 1 or more")
    if not callable(function):
        raise PenstockError(f"cannot launch {function!r}: give a function, launch(train, 2), which each rank calls itself")
    job = _Job(_pickled(function, args), ranks, dict(os.environ))
    return _results(_run(job), ranks)


def _run(job: _Job) -> dict[int, Outcome]:
    store = _store()
    with _started(job, store.port) as (processes, results):
        return _outcomes(processes, results, store)


def _end_if_imported_by_a_rank() -> None:
    """A rank imports the program that launched it, under another name: without a guard, that launches ranks again."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(UNGUARDED)


def start_ahead() -> None:
    """Start the server that ranks are forked from, which imports torch while this process does: `launch` is up sooner.

    To be called before torch is imported, when it is clear that ranks will be launched. Does nothing under torchrun, which has
    ranks, and where there may be a GPU.
    """
    if (
        "RANK" not in os.environ
        and not any(map(os.path.exists, GPUS))
        and "forkserver" in multiprocessing.get_all_start_methods()
    ):
        _server_context()


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _server_context() -> Any:
    """Processes forked from the server, which runs from now on. Ctrl-C never reaches it: it ends with this process."""
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server starts it too, and that would let signals through again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise PenstockError(
            f"cannot send {name} to other processes ({error}): "
            "define it at the top level of a module, and pass arguments that pickle"
        ) from error


def _store() -> Any:
    """The store the ranks meet at, in this process, which only this machine reaches."""
    from torch.distributed import TCPStore

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextmanager
def _started(job: _Job, port: int) -> Iterator[tuple[list[Any], list[Connection]]]:
    """The processes of all ranks and where their outcomes come from; they are gone afterwards, whatever happens."""
    context = multiprocessing.get_context("spawn") if _sees_gpu() else _server_context()
    processes, results = [], []
    try:
        for rank in range(job.ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(job, rank, port, sender), name=f"rank {rank}", daemon=False)
            process.start()
            sender.close()
            processes.append(process)
            results.append(receiver)
        yield processes, results
        deadline = time.monotonic() + PARTING
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for receiver in results:
            receiver.close()


def _outcomes(processes: Sequence[Any], results: Sequence[Connection], store: Any) -> dict[int, Outcome]:
    """What each rank came to. A rank that never ended is absent.

    Once one rank has failed or died, the others have a short while to say why they did. Those that wait for one that has
    ended before it joined them find that in the `store`.
    """
    outcomes: dict[int, Outcome] = {}
    pending: dict[Any, int] = {receiver: rank for rank, receiver in enumerate(results)}
    deadline: float | None = None
    while pending:
        ready = wait(list(pending), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = pending.pop(receiver)
            try:
                outcomes[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # OSError: in the middle of its outcome
                processes[rank].join()
                outcomes[rank] = Outcome(False, _death(rank, processes[rank].exitcode))
            if outcomes[rank].well:
                depart(store, rank, FINISHED)
            else:
                deadline = deadline or time.monotonic() + LAST_WORDS
    return outcomes


def _results(outcomes: dict[int, Outcome], ranks: int) -> list[Any]:
    """The results by rank, or the error to raise: a rank's own before those that only lost a peer."""
    failed = [outcome for _, outcome in sorted(outcomes.items()) if not outcome.well]
    deaths = [str(each.value) for each in failed if isinstance(each.value, _Died)]
    told = [each for each in failed if not isinstance(each.value, _Died)]
    own = [each for each in told if not isinstance(each.value, LostRankError)]
    for _, error, text in own or told:
        if deaths and not own:
            error = LostRankError("; ".join([str(error), *deaths]))
        raise error from (RankTraceback(text) if text else None)
    if deaths:
        raise LostRankError("; ".join(deaths))
    return [outcomes[rank].value for rank in range(ranks)]


def _death(rank: int, exitcode: int | None) -> PenstockError:
    if exitcode == UNGUARDED:
        where = "this program launches ranks wherever it is imported, and every rank imports it"
        return PenstockError(f'{where}: put what launches under `if __name__ == "__main__":`')
    if exitcode is not None and exitcode < 0:
        return _Died(f"rank {rank} was killed by {signal.Signals(-exitcode).name}")
    return _Died(f"rank {rank} ended with exit code {exitcode} before it was done")


def _rank_main(job: _Job, rank: int, port: int, sender: Connection) -> None:
    """One rank: the caller's environment with torchrun's in it, the function, the outcome sent home."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launching process ends its ranks
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.clear()  # of the server that this rank was forked from
    os.environ.update(
        job.environment, RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    import torch

    from penstock.comms.topology import shutdown, tell_departure

    os.register_at_fork(after_in_child=sender.close)  # a process that the rank forks would hide the rank's death
    gc.freeze()  # what torch's import made is here to stay: no collection need look at it again
    torch.set_num_threads(_threads())
    try:
        function, args = pickle.loads(job.work)
        value = function(*args)
        data = _pickled_result(value, rank)
        tell_departure(FINISHED)
    except BaseException as error:
        data = _pickled_error(error, rank)
        tell_departure(f"ended with {reason(error)}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it, or there is none
            stream.flush()
    sender.send_bytes(data)  # from now on the launching process may end this one
    shutdown()


def _threads() -> int:
    """As many as the caller's environment says: torch has read that of the server."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else 1


def _pickled_result(value: Any, rank: int) -> bytes:
    try:
        return pickle.dumps(Outcome(True, value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PenstockError(f"rank {rank} cannot send home what its function returned ({error}): it must pickle") from error


def _pickled_error(error: BaseException, rank: int) -> bytes:
    if isinstance(error, SystemExit) and not error.code:  # which would end the launching program too, as if all were well
        error = PenstockError(f"rank {rank} called sys.exit() before its function was done")
    text = f"\n\nrank {rank}:\n" + "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(Outcome(False, error, text))
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(Outcome(False, PenstockError(f"rank {rank}: {type(error).__name__}: {error}"), text))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
