"""Start ranks on this machine for a function: a small torchrun inside the program, up in a tenth of a second.

Ranks are forked from a server (`server.py`). Where torch sees a GPU they are spawned instead. They get the environment that
torchrun would give them, and join through a store that this process holds. When a rank fails, all are ended, and if there are
restarts left the ranks that remain begin again, from the same server with a new store.
"""

import inspect
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from penstock.comms.launch.attempt import (
    UNGUARDED_EXIT_CODE,
    Attempt,
    LaunchResults,
    count_same_failures,
    diagnose_attempt,
    would_fail_again,
)
from penstock.comms.launch.forkserver import ForkserverEndedError, forkserver_context
from penstock.comms.launch.pickling import pickle_call
from penstock.comms.launch.rank_main import RankTask
from penstock.comms.launch.rank_processes import collect_results, join_finished_ranks, start_ranks
from penstock.comms.preemption import catches_preemption, preempted
from penstock.comms.system import convert_os_errors, print_notice
from penstock.errors import PenstockError

T = TypeVar("T")


class RankTraceback(Exception):
    """The cause of an error re-raised by `launch`: the traceback of the rank it happened on, as text."""

    def __str__(self) -> str:
        return str(self.args[0])


def launch(function: Callable[..., T], ranks: int, *args: Any, restarts: int = 0, least: int | None = None) -> LaunchResults[T]:
    """Run `function(*args)` on `ranks` processes of this machine at once; returns a list of their results, by rank.

    `function`: what every rank runs. A script's stands at its top level, and the script launches under
    `if __name__ == "__main__":`, since ranks import it. One that was typed, in a notebook or at a prompt, or given to
    `python -c`, is copied to the ranks with the globals it uses. Arguments and results pickle.
    `ranks`: how many, 1 or more.
    `restarts`: how often the ranks begin again after one of them has died, was stopped or raised. All others are ended, and the
    function is called anew with the same arguments: it finds its world by `init_distributed()`, makes its pipeline, and goes on
    from its last checkpoint (docs/howto/recovery.md).
    `least`: begin again without the ranks that failed, but with so many at least; None: with all of them.

        def work(steps):
            return ps.comms.init_distributed().rank * steps

        ps.launch(work, 4, 10)                                  # [0, 10, 20, 30]

    Ranks have the environment and working directory that this process has now, and TORCHELASTIC_RESTART_COUNT. Each computes on
    one thread unless OMP_NUM_THREADS says otherwise, so that bits do not depend on the number of ranks. The result's `attempts`
    tell what became of each start: `ranks`, `culprits` (the ranks that failed), `error`, `steps_done`; a line of each that
    failed goes to stderr.

    The error of the rank that failed first is raised here, its own traceback as the cause; LostRankError if the rank died, or
    waits for one that has returned. With restarts, that is the last attempt's, with the `attempts`; the program's own error
    that comes twice at the same step is not tried again. No rank outlives the call.
    """
    _end_if_imported_by_a_rank()
    _check(function, ranks, restarts, least)
    work, attempts, running = pickle_call(function, args), list[Attempt](), ranks
    while True:
        values, attempt = _attempt(work, running, len(attempts), may_restart=len(attempts) < restarts)
        attempts.append(attempt)
        if attempt.error is None:
            return LaunchResults(values, attempts)
        if len(attempts) > restarts or preempted() or would_fail_again(attempts):
            _raise(attempts)
        running = ranks if least is None else max(least, running - len(attempt.culprits))
        begin = "1 rank begins" if running == 1 else f"{running} ranks begin"
        print_notice(f"attempt {len(attempts)} of {restarts + 1} has ended: {attempt.end()}; {begin} again")


def _check(function: Any, ranks: Any, restarts: Any, least: Any) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise PenstockError(f"cannot launch {ranks!r} ranks: use a whole number of 1 or more")
    if multiprocessing.current_process().daemon:
        raise PenstockError("a daemonic process, as a Pool's worker is, may start no ranks: use a ProcessPoolExecutor")
    if not callable(function):
        raise PenstockError(f"cannot launch {function!r}: give a function, launch(train, 2), which each rank calls itself")
    if type(restarts) is not int or restarts < 0:
        raise PenstockError(f"cannot restart {restarts!r} times: use a whole number, 0 or more")
    if least is not None and (type(least) is not int or not 1 <= least <= ranks):
        raise PenstockError(f"cannot restart with {least!r} ranks at least: use 1 to {ranks}, or None for all of them")


@convert_os_errors("ranks cannot be started")
def _attempt(work: bytes, ranks: int, number: int, may_restart: bool) -> tuple[list[Any], Attempt]:
    """All ranks run once: what the function returned on each, if none has failed, and what became of them."""
    from torch.distributed import HashStore

    context = multiprocessing.get_context("spawn") if _sees_gpu() else forkserver_context()
    job = RankTask(work, ranks, {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(number)}, catches_preemption())
    try:
        with start_ranks(job, context, HashStore()) as (processes, results):
            outcomes = collect_results(processes, results, may_restart)
            join_finished_ranks([processes[rank] for rank in outcomes])
    except ForkserverEndedError as error:
        return [], Attempt(ranks, error)
    attempt = diagnose_attempt(ranks, outcomes)
    return [outcomes[rank].value for rank in range(ranks)] if attempt.error is None else [], attempt


def _raise(attempts: Sequence[Attempt]) -> NoReturn:
    """Raise what ended the last of the `attempts`, and say so if it is not tried again since it came before."""
    last = attempts[-1]
    assert last.error is not None
    if times := count_same_failures(attempts):
        where = "before the first step" if last.steps_done is None else f"after {last.steps_done} steps"
        note = f"the same error ended {times} attempts {where}: not tried again"
        last.error.add_note(note)
        print_notice(note)
    last.error.attempts = tuple(attempts)  # type: ignore[attr-defined]
    raise last.error from (RankTraceback(last.traceback) if last.traceback else None)


def _end_if_imported_by_a_rank() -> None:
    """A rank imports the program that launched it, under another name: without a guard, that launches ranks again."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(UNGUARDED_EXIT_CODE)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
