"""Run a function on ranks of this machine, as a small torchrun in the program; restart them, or raise the failed rank's error.

Ranks are forked from the fork server (forkserver.py), or spawned if torch sees a GPU. They get the environment variables that
torchrun would set, and a rendezvous store in this process. When a rank fails, all are ended. If restarts are left, the others
are started again from the same server, with a new store: another attempt.
"""

import inspect
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from penstock.comms.preemption import catches_preemption, preempted
from penstock.comms.system import print_notice
from penstock.comms.wait_errors import convert_errors
from penstock.errors import PenstockError, format_count
from penstock.launcher.attempt import (
    UNGUARDED_EXIT_CODE,
    Attempt,
    LaunchResults,
    count_same_failures,
    diagnose_attempt,
    would_fail_again,
)
from penstock.launcher.forkserver import ForkserverEndedError, forkserver_context
from penstock.launcher.pickling import pickle_call
from penstock.launcher.rank_main import LaunchSpec
from penstock.launcher.rank_processes import collect_results_and_errors, join_finished_ranks, start_ranks

T = TypeVar("T")


class RankTraceback(Exception):
    """The cause of an error that `launch` raises: the traceback on the rank where it happened, as text."""

    def __str__(self) -> str:
        return str(self.args[0])


def launch(function: Callable[..., T], ranks: int, *args: Any, restarts: int = 0, least: int | None = None) -> LaunchResults[T]:
    """Run `function(*args)` on `ranks` processes of this machine; return the list of their results, by rank.

    `function`: runs on every rank. In a script, define it at the top level, and call `launch` under
    `if __name__ == "__main__":`, as ranks import the script. A function that was typed in a notebook or at a prompt, or given
    to `python -c`, is copied to the ranks with the globals that it uses. Arguments and results must pickle.
    `ranks`: the number of ranks, 1 or more.
    `restarts`: how often all ranks are started again after one has died, was suspended or raised. The others are ended, and
    the function is called again with the same arguments: it calls `init_distributed()`, builds its pipeline, and resumes from
    its last checkpoint (docs/howto/recovery.md).
    `least`: restart without the ranks that failed, but with at least this number; None restarts all of them.

        def work(steps):
            return ps.comms.init_distributed().rank * steps

        ps.launch(work, 4, 10)                                  # [0, 10, 20, 30]

    To debug, call `work(10)` under `python -m pdb`: it runs as the only rank. Ranks that `launch` starts have no terminal.

    Ranks have the environment variables and working directory that this process has now, and TORCHELASTIC_RESTART_COUNT. Each
    computes on one thread unless OMP_NUM_THREADS says otherwise, so that bits do not depend on the number of ranks. The list's
    `attempts` have `ranks`, `failed_ranks`, `error` and `steps_done` of each attempt. A failed attempt prints a line on stderr.

    Raises the error of the rank that failed first, with that rank's traceback as its cause; LostRankError if the rank died, or
    waits for one that has returned. With restarts the last attempt's error is raised, with `attempts` as an attribute. An error
    of the program that is raised twice at the same step is not tried again. No rank outlives the call.
    """
    _exit_if_imported_by_rank()
    _check_arguments(function, ranks, restarts, least)
    call, attempts, num_ranks = pickle_call(function, args), list[Attempt](), ranks
    while True:
        try:
            values, attempt = _run_attempt(call, num_ranks, len(attempts), may_restart=len(attempts) < restarts)
        except KeyboardInterrupt:  # from a wait in here, which is not where the user's program was
            raise KeyboardInterrupt(f"Ctrl-C has ended {format_count(num_ranks, 'rank')}") from None
        attempts.append(attempt)
        if attempt.error is None:
            return LaunchResults(values, attempts)
        if len(attempts) > restarts or preempted() or would_fail_again(attempts):
            _raise_last_error(attempts)

        num_ranks = ranks if least is None else max(least, num_ranks - len(attempt.failed_ranks))
        begin = "1 rank begins" if num_ranks == 1 else f"{num_ranks} ranks begin"
        print_notice(f"attempt {len(attempts)} of {restarts + 1} has ended: {attempt.error_in_one_line()}; {begin} again")


def _check_arguments(function: Any, ranks: Any, restarts: Any, min_ranks: Any) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise PenstockError(f"cannot launch {ranks!r} ranks: use a whole number of 1 or more")
    if multiprocessing.current_process().daemon:
        raise PenstockError("a daemonic process, as a Pool's worker is, may start no ranks: use a ProcessPoolExecutor")
    if not callable(function):
        raise PenstockError(f"cannot launch {function!r}: give a function, launch(train, 2), which each rank calls itself")
    if type(restarts) is not int or restarts < 0:
        raise PenstockError(f"cannot restart {restarts!r} times: use a whole number, 0 or more")
    if min_ranks is not None and (type(min_ranks) is not int or not 1 <= min_ranks <= ranks):
        raise PenstockError(f"cannot restart with {min_ranks!r} ranks at least: use 1 to {ranks}, or None for all of them")


@convert_errors(failure="ranks cannot be started")
def _run_attempt(call: bytes, ranks: int, number: int, may_restart: bool) -> tuple[list[Any], Attempt]:
    """Run `call` on all ranks once; return its results by rank (empty if a rank failed), and the attempt."""
    from torch.distributed import HashStore

    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # as in a script: pdb deletes it, multiprocessing reads it
    context = multiprocessing.get_context("spawn") if _sees_gpu() else forkserver_context()
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(number)}
    start_method = multiprocessing.get_start_method(allow_none=True)
    spec = LaunchSpec(call, ranks, environment, catches_preemption(), start_method)
    try:
        with start_ranks(spec, context, HashStore()) as (processes, receivers):
            results = collect_results_and_errors(processes, receivers, may_restart)
            join_finished_ranks([processes[rank] for rank in results])
    except ForkserverEndedError as error:
        return [], Attempt(ranks, error)

    attempt = diagnose_attempt(ranks, results)
    return [results[rank].value for rank in range(ranks)] if attempt.error is None else [], attempt


def _raise_last_error(attempts: Sequence[Attempt]) -> NoReturn:
    """Raise the error of the last attempt; print why it is not tried again if it is a mistake of the program."""
    last_attempt = attempts[-1]
    assert last_attempt.error is not None
    if isinstance(last_attempt.error, SystemExit) and isinstance(last_attempt.error.code, int):  # Python prints no other word
        ranks = "".join(f"rank {rank}" for rank in last_attempt.failed_ranks) or "several ranks"
        notes = getattr(last_attempt.error, "__notes__", ()) if last_attempt.failed_ranks else ()
        place = "".join([f", {note}" for note in notes])
        print_notice(f"{ranks} called sys.exit({last_attempt.error.code}) before the function was done{place}")
    if times := count_same_failures(attempts):
        moment = "before the first step" if last_attempt.steps_done is None else f"after {last_attempt.steps_done} steps"
        note = f"the same error ended {times} attempts {moment}: not tried again"
        last_attempt.error.add_note(note)
        print_notice(note)
    last_attempt.error.attempts = tuple(attempts)  # type: ignore[attr-defined]
    raise last_attempt.error from (RankTraceback(last_attempt.traceback) if last_attempt.traceback else None)


def _exit_if_imported_by_rank() -> None:
    """End this process if it is a rank, and the program that it imports launches ranks without a `__main__` guard."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(UNGUARDED_EXIT_CODE)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
