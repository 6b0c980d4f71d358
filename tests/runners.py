"""Runners: a function on ranks that the tests of a file share, once for several tests, or on ranks that torchrun starts.

To start a rank and to end it takes a tenth of a second of a processor.
"""

import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import torch
from prompt import torchrun

import penstock as ps

RUNNING: dict[int, "SharedRanks"] = {}  # by their number
START_CHECK_SECONDS = 0.2


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Return the result of `function(*args)` by rank, as `ps.launch`, from ranks that ran what the file asked for before.

    What a function changes in its process is there for the next one: use `ps.launch` for one that ends its rank, patches it for
    good, or is to begin in a new process. After an error, which is raised, the next call starts other ranks.
    """
    if ranks not in RUNNING:
        RUNNING[ranks] = SharedRanks(ranks)
    try:
        return RUNNING[ranks].run(function, args)
    except BaseException:
        RUNNING.pop(ranks).kill()
        raise


def on_ranks_once(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Return `on_ranks(function, ranks, *args)`, or raise its error; it runs for the first test that asks."""
    return _first_run(function, ranks, args).result()


def cases_on_ranks(
    function: Callable[..., Any], ranks: int, cases: tuple[tuple[Any, ...], ...]
) -> dict[tuple[Any, ...], list[Any]]:
    """Return the results of `function(*case)`, by case and rank; all cases run in one `on_ranks_once`."""
    return _by_case(cases, on_ranks_once(rank_runs_cases, ranks, function, cases))


def cases_under_torchrun(
    function: Callable[..., Any], ranks: int, cases: Sequence[tuple[Any, ...]], folder: Path
) -> dict[tuple[Any, ...], list[Any]]:
    """Return the results as `cases_on_ranks`, from interpreters that torchrun starts. `function` is of a test module."""
    module = function.__module__
    script = (
        f"import sys; sys.path[:0] = {[path for path in sys.path if 'tests' in path]}\n"
        f"import torch, penstock as ps, {module}\n"
        "rank = ps.comms.init_distributed().rank\n"
        f"results = [{module}.{function.__name__}(*call) for call in {[*cases]!r}]\n"
        "torch.save(results, f'{sys.argv[1]}/{rank}.pt')\n"
    )
    (folder / "script.py").write_text(script)
    ended = torchrun(ranks, folder / "script.py", folder)
    assert ended.returncode == 0, ended.stderr
    return _by_case(cases, [torch.load(folder / f"{rank}.pt") for rank in range(ranks)])


@cache
def _first_run(function: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> Future[list[Any]]:
    """Return the results or the error: a run that takes minutes to fail would else do so in each of its tests."""
    future = Future[list[Any]]()
    try:
        future.set_result(on_ranks(function, ranks, *args))
    except BaseException as error:  # pytest's own for a timeout is no Exception
        future.set_exception(error)
    return future


def rank_runs_cases(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*case) for case in cases]


def _by_case(cases: Sequence[tuple[Any, ...]], results_by_rank: Sequence[Sequence[Any]]) -> dict[tuple[Any, ...], list[Any]]:
    return {case: [results[number] for results in results_by_rank] for number, case in enumerate(cases)}


def end_shared_ranks() -> None:
    while RUNNING:
        RUNNING.popitem()[1].end()


class SharedRanks:
    """Ranks of one `ps.launch`, which a thread waits for; they read functions from connections until these are closed."""

    def __init__(self, ranks: int) -> None:
        self.launch, self.connections, self.pids = Future[list[Any]](), list[Connection](), list[int]()
        with tempfile.TemporaryDirectory() as folder, socket(AF_UNIX) as listener:
            listener.bind(str(Path(folder) / "calls"))
            listener.listen(ranks)
            listener.settimeout(START_CHECK_SECONDS)
            self.thread = threading.Thread(target=self._launch, args=(ranks, listener.getsockname()), daemon=True)
            self.thread.start()
            while len(self.connections) < ranks and not self.launch.done():
                with suppress(TimeoutError):
                    self.connections.append(Connection(listener.accept()[0].detach()))

    def _launch(self, ranks: int, address: str) -> None:
        try:
            self.launch.set_result(ps.launch(rank_serves, ranks, address))
        except BaseException as error:
            self.launch.set_exception(error)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        try:
            return self._run(pickle.dumps((function, args)))
        except (EOFError, ConnectionError):  # a rank has raised an error or is gone: those that wait for a function return
            self.end()
            self.launch.result()  # raises it
            raise

    def _run(self, call: bytes) -> list[Any]:
        self.pids = [connection.recv() for connection in self.connections]
        for connection in self.connections:
            connection.send_bytes(call)
        results, waiting = dict[int, Any](), [*self.connections]
        while waiting:
            for connection in wait(waiting):
                rank, result = pickle.loads(connection.recv_bytes())
                results[rank] = result
                waiting.remove(connection)
        return [results[rank] for rank in range(len(results))]

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        self.thread.join()

    def kill(self) -> None:
        """End ranks that may hang: pytest's timeout or Ctrl-C has come while they ran a function."""
        for pid in self.pids if self.thread.is_alive() else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()


def rank_serves(address: str) -> None:
    rank = ps.comms.init_distributed().rank
    with Client(address, "AF_UNIX") as connection:
        while True:
            try:
                connection.send(os.getpid())
                call = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            torch.manual_seed(0)
            function, args = pickle.loads(call)
            result = pickle.dumps((rank, function(*args)))
            with suppress(ConnectionError):  # of which the next call tells
                connection.send_bytes(result)
            del function, args
            gc.collect()  # the pipelines of this call, and what they hold open
