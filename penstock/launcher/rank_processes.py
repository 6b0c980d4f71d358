"""The processes of the ranks of one attempt: start them, collect their results and errors, kill the remaining ones."""

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

from penstock.comms.preemption import forward_signals_to, stop_forwarding_to
from penstock.comms.process import ALIVE, SUSPENDED, ProcessRecord, read_parent_process, read_process
from penstock.comms.status import PAUSE_ADVICE, RankStatus
from penstock.comms.system import explain_error
from penstock.comms.time_limits import (
    ERROR_REPORT_SECONDS,
    ERROR_REPORT_SECONDS_BEFORE_RESTART,
    HEARTBEAT_SECONDS,
    KILL_SUSPENDED_AFTER_CHECKS,
    RANK_EXIT_SECONDS,
)
from penstock.errors import PenstockError
from penstock.launcher.attempt import exit_result
from penstock.launcher.forkserver import FORKSERVER_ENDED_EXIT_CODE, ForkserverEndedError, block_signals_in_children
from penstock.launcher.pickling import hide_missing_main_file
from penstock.launcher.rank_main import LaunchSpec, RankResult, rank_main


@contextmanager
def start_ranks(spec: LaunchSpec, context: Any, store: Any) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Start the processes of all ranks for the block; afterwards kill those that still run.

    `context`: of multiprocessing. `store`: a HashStore of this process, for the ranks' rendezvous.
    Yields the processes, and the connections that receive their results.
    """
    from penstock.launcher.pipe_store import serve_store  # imports torch

    processes, receivers = [], []
    try:
        for rank in range(spec.ranks):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            own_end, rank_end = context.Pipe()
            serve_store(store, own_end)

            args = (spec, rank, sender, rank_end)
            process = context.Process(target=rank_main, args=args, name=f"rank {rank}", daemon=False)
            processes.append(process)  # before it starts: a Ctrl-C during the start is blocked until it has
            try:
                with block_signals_in_children(), hide_missing_main_file():
                    process.start()
            except (EOFError, ConnectionError, FileNotFoundError) as error:
                raise ForkserverEndedError from error
            sender.close()
            rank_end.close()
            forward_signals_to(process.pid)
        yield processes, receivers
    finally:
        with block_signals_in_children():  # so that a second Ctrl-C leaves no rank behind
            _kill_ranks([process for process in processes if process.pid is not None])
            for receiver in receivers:
                receiver.close()


def _kill_ranks(processes: Sequence[Any]) -> None:
    for process in processes:
        stop_forwarding_to(process.pid)
        if process.is_alive():  # else another process may have its pid
            process.kill()
    for process in processes:
        process.join()


def join_finished_ranks(processes: Sequence[Any]) -> None:
    """Wait up to RANK_EXIT_SECONDS for ranks that have sent their results to end by themselves."""
    deadline = time.monotonic() + RANK_EXIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def collect_results_and_errors(
    processes: Sequence[Any], receivers: Sequence[Connection], may_restart: bool
) -> dict[int, RankResult]:
    """Wait for the results of all ranks; return rank -> result in the order in which they arrived.

    Once one rank has failed or died, the others have ERROR_REPORT_SECONDS to send theirs; less if the failed rank is known and
    the ranks `may_restart`. A rank that has not ended in that time is missing in the result. A suspended rank is killed.
    """
    results: dict[int, RankResult] = {}
    server, deadline = read_parent_process(processes[0].pid), float("inf")
    with _SuspendedRankKiller(processes) as killer, selectors.DefaultSelector() as selector:
        for rank, receiver in enumerate(receivers):
            selector.register(receiver, selectors.EVENT_READ, rank)

        while selector.get_map() and time.monotonic() < deadline:
            timeout = None if deadline == float("inf") else deadline - time.monotonic()
            for key, _ in selector.select(timeout):  # epoll returns them in the order in which they became readable
                rank = key.data
                selector.unregister(key.fileobj)
                try:
                    data = receivers[rank].recv_bytes()
                except (EOFError, OSError):  # OSError if it ended while it sent its result
                    processes[rank].join()
                    results[rank] = _result_of_ended_process(rank, processes[rank].exitcode, killer, server)
                else:
                    results[rank] = _unpickle_result(data, rank)
                stop_forwarding_to(processes[rank].pid)

                if not results[rank].succeeded:
                    is_known = may_restart and results[rank].status.kind != "waited"
                    seconds = ERROR_REPORT_SECONDS_BEFORE_RESTART if is_known else ERROR_REPORT_SECONDS
                    deadline = min(deadline, time.monotonic() + seconds)
    return results


def _unpickle_result(data: bytes, rank: int) -> RankResult:
    """Return the result that `rank` has sent. An error that does not unpickle, or has no text, becomes a PenstockError.

    A returned value that does not unpickle makes it a failed one.
    """
    result: RankResult = pickle.loads(data)
    try:
        value = pickle.loads(result.value)
        if not result.succeeded:
            str(value)
    except Exception as error:  # of any class: unpickling runs code of the program
        if not result.succeeded:
            return result._replace(value=PenstockError(f"rank {rank}: {result.status.text}"))
        problem = f"what rank {rank} returned does not unpickle ({explain_error(error)})"
        text = f"{problem}: return values that do, such as numbers and tensors"
        return RankResult.of_error(rank, PenstockError(text))
    return result._replace(value=value)


def _result_of_ended_process(
    rank: int, exitcode: int | None, killer: "_SuspendedRankKiller", server: ProcessRecord
) -> RankResult:
    """Return the result of a rank that has sent none; with ForkserverEndedError if the server has ended."""
    if rank in killer.statuses:
        return RankResult(None, killer.statuses[rank])
    if exitcode == FORKSERVER_ENDED_EXIT_CODE and server.state() != ALIVE:
        return RankResult.of_error(rank, ForkserverEndedError())
    return exit_result(rank, exitcode)


class _SuspendedRankKiller:
    """A thread that kills suspended ranks: one may be suspended while it sends its result.

    It counts checks, not seconds, as the whole job may have been suspended.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self.records = [read_process(process.pid) for process in processes]
        self.statuses: dict[int, RankStatus] = {}  # of ranks that were killed
        self._checks_suspended, self._stopping = [0] * len(processes), threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-stops", daemon=True)

    def __enter__(self) -> "_SuspendedRankKiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self.check()

    def check(self) -> None:
        """Kill ranks that were found suspended in KILL_SUSPENDED_AFTER_CHECKS checks in a row."""
        for rank, record in enumerate(self.records):
            self._checks_suspended[rank] = self._checks_suspended[rank] + 1 if record.state() == SUSPENDED else 0
            if self._checks_suspended[rank] == KILL_SUSPENDED_AFTER_CHECKS:
                seconds = KILL_SUSPENDED_AFTER_CHECKS * HEARTBEAT_SECONDS
                text = f"was stopped by a signal for {seconds:g} s, and was ended ({PAUSE_ADVICE})"
                self.statuses[rank] = RankStatus(rank, "stopped", text)
                with suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
