"""The processes of one attempt: started, watched, and gone at its end."""

import os
import pickle
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from penstock.comms.heartbeat import HEARTBEAT_SECONDS
from penstock.comms.launch.attempt import RankDiedError, exit_error
from penstock.comms.launch.forkserver import FORKSERVER_ENDED_EXIT_CODE, ForkserverEndedError, hold_signals
from penstock.comms.launch.pickling import hide_missing_main_file
from penstock.comms.launch.rank_main import RankResult, RankTask, rank_main
from penstock.comms.preemption import forward_signals_to, stop_forwarding_to
from penstock.comms.process import ALIVE, SUSPENDED, ProcessRecord, read_parent_process, read_process
from penstock.comms.system import explain_error
from penstock.errors import PenstockError

RANK_EXIT_SECONDS = 0.2  # seconds in which ranks may let go of what the system keeps for them: semaphores, files in /tmp
ERROR_REPORT_SECONDS = 2.0  # seconds the other ranks have to tell what they know once one has failed
ERROR_REPORT_SECONDS_BEFORE_RESTART = 0.5  # the same where it is known which, and they are about to begin again
KILL_SUSPENDED_AFTER_LOOKS = (
    6  # looks in a row that see a rank stopped, then it is ended: no time, for the whole job may have been stopped
)


@contextmanager
def start_ranks(job: RankTask, context: Any, store: Any) -> Iterator[tuple[list[Any], list[Connection]]]:
    """The processes of all ranks and where their outcomes come from; they are gone afterwards, whatever happens.

    They meet at `store`, a HashStore of this process.
    """
    from penstock.comms.launch.pipe_store import serve_store  # imports torch

    processes, results = [], []
    try:
        for rank in range(job.ranks):
            receiver, sender = context.Pipe(duplex=False)
            results.append(receiver)
            ours, theirs = context.Pipe()
            serve_store(store, ours)
            process = context.Process(target=rank_main, args=(job, rank, sender, theirs), name=f"rank {rank}", daemon=False)
            processes.append(process)  # before a Ctrl-C, which is held back until it has started
            try:
                with hold_signals(), hide_missing_main_file():
                    process.start()
            except (EOFError, ConnectionError, FileNotFoundError) as error:
                raise ForkserverEndedError from error
            sender.close()
            theirs.close()
            forward_signals_to(process.pid)
        yield processes, results
    finally:
        with hold_signals():  # another Ctrl-C is to leave no rank behind
            begun = [process for process in processes if process.pid is not None]
            for process in begun:
                stop_forwarding_to(process.pid)
                if process.is_alive():  # else its number may be another's
                    process.kill()
            for process in begun:
                process.join()
            for receiver in results:
                receiver.close()


def join_finished_ranks(processes: Sequence[Any]) -> None:
    """Give ranks that are done a moment to end by themselves."""
    deadline = time.monotonic() + RANK_EXIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def collect_results(processes: Sequence[Any], results: Sequence[Connection], hurry: bool) -> dict[int, RankResult]:
    """What each rank came to, in the order in which that happened; a rank that never ended is absent.

    Once one rank has failed or died, the others have a short while to say why they did, shorter in a `hurry`. A rank that a
    signal has stopped is ended.
    """
    outcomes: dict[int, RankResult] = {}
    server, deadline = read_parent_process(processes[0].pid), float("inf")
    with _SuspendedRankKiller(processes) as stops, selectors.DefaultSelector() as pending:
        for rank, receiver in enumerate(results):
            pending.register(receiver, selectors.EVENT_READ, rank)
        while pending.get_map() and time.monotonic() < deadline:
            # epoll tells in the order in which it happened
            for key, _ in pending.select(None if deadline == float("inf") else deadline - time.monotonic()):
                rank = key.data
                pending.unregister(key.fileobj)
                try:
                    data = results[rank].recv_bytes()
                except (EOFError, OSError):  # OSError: in the middle of its outcome
                    processes[rank].join()
                    outcomes[rank] = RankResult(False, stops.ended.get(rank) or _death(rank, processes[rank].exitcode, server))
                else:
                    outcomes[rank] = _unpickled(data, rank)
                stop_forwarding_to(processes[rank].pid)
                if not outcomes[rank].well:
                    words = (
                        ERROR_REPORT_SECONDS_BEFORE_RESTART
                        if hurry and not outcomes[rank].lost_others
                        else ERROR_REPORT_SECONDS
                    )
                    deadline = min(deadline, time.monotonic() + words)
    return outcomes


def _unpickled(data: bytes, rank: int) -> RankResult:
    try:
        outcome: RankResult = pickle.loads(data)
    except Exception as error:  # a class that does not unpickle, of the program's own
        told = f"what rank {rank} returned does not unpickle ({explain_error(error)})"
        return RankResult(False, PenstockError(f"{told}: return values that do, such as numbers and tensors"))
    return outcome


def _death(rank: int, exitcode: int | None, server: ProcessRecord) -> PenstockError:
    ended = exitcode == FORKSERVER_ENDED_EXIT_CODE and server.state() != ALIVE
    return ForkserverEndedError() if ended else exit_error(rank, exitcode)


class _SuspendedRankKiller:
    """A thread that ends ranks which are stopped, as one may be while it sends its outcome."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self.seen = [read_process(each.pid) for each in processes]
        self.ended: dict[int, RankDiedError] = {}
        self._looks, self._over = [0] * len(processes), threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-stops", daemon=True)

    def __enter__(self) -> "_SuspendedRankKiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            self.look()

    def look(self) -> None:
        """End those that have been stopped for many looks in a row."""
        for rank, process in enumerate(self.seen):
            self._looks[rank] = self._looks[rank] + 1 if process.state() == SUSPENDED else 0
            if self._looks[rank] == KILL_SUSPENDED_AFTER_LOOKS:
                seconds = KILL_SUSPENDED_AFTER_LOOKS * HEARTBEAT_SECONDS
                self.ended[rank] = RankDiedError(f"rank {rank} was stopped by a signal for {seconds:g} s, and was ended")
                with suppress(ProcessLookupError):
                    os.kill(process.number, signal.SIGKILL)
