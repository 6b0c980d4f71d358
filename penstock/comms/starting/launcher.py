"""Start ranks on this machine for a function: a small torchrun inside the program, up in a tenth of a second.

Ranks are forked from a server (`server.py`). Where torch sees a GPU they are spawned instead. They get the environment that
torchrun would give them, and join through a store that this process holds. When a rank fails, all are ended, and if there are
restarts left the ranks that remain begin again, from the same server with a new store.
"""

import inspect
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NoReturn, TypeVar

from penstock.comms.health.signals import catches_preemption, preempted
from penstock.comms.starting.blame import UNGUARDED, Failure, blamed
from penstock.comms.starting.progress import Page
from penstock.comms.starting.rank_main import Job, Outcome
from penstock.comms.starting.ranks import outcomes_of, part, started
from penstock.comms.starting.restarts import Attempt, Results, furthest, is_final, repeated, said, told
from penstock.comms.starting.server import ServerEndedError, server_context
from penstock.comms.starting.work import pickled
from penstock.comms.system import named, say
from penstock.errors import PenstockError

T = TypeVar("T")


class RankTraceback(Exception):
    """The cause of an error re-raised by `launch`: the traceback of the rank it happened on, as text."""

    def __str__(self) -> str:
        return str(self.args[0])


def launch(function: Callable[..., T], ranks: int, *args: Any, restarts: int = 0, least: int | None = None) -> Results[T]:
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
    tell what became of each start, and where there were several a report goes to stderr.

    The error of the rank that failed first is raised here, its own traceback as the cause; LostRankError if the rank died, or
    waits for one that has returned. With restarts, that is the last attempt's, with the `attempts`; the program's own error
    that comes twice at the same step is not tried again. No rank outlives the call.
    """
    _end_if_imported_by_a_rank()
    _check(function, ranks, restarts, least)
    work = pickled(function, args)
    attempts, failures, running = list[Attempt](), list[Failure](), ranks
    while True:
        outcomes, failure, this = _attempt(work, running, attempts, may_restart=len(attempts) < restarts)
        attempts.append(this)
        if failure is None:
            _tell_all(attempts)
            return Results([outcomes[rank].value for rank in range(running)], attempts)
        failures.append(failure)
        if len(attempts) > restarts or preempted() or is_final(attempts, failures):
            _raise(failure, attempts, failures)
        running = ranks if least is None else max(least, running - len(failure.culprits))
        begin = "1 rank begins" if running == 1 else f"{running} ranks begin"
        say(f"attempt {len(attempts)} of {restarts + 1} has ended: {said(this)}; {begin} again")


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


@named("ranks cannot be started")
def _attempt(
    work: bytes, ranks: int, before: Sequence[Attempt], may_restart: bool
) -> tuple[dict[int, Outcome], Failure | None, Attempt]:
    """All ranks run once: what each came to, why they failed if they did, and what is told of it."""
    from torch.distributed import HashStore

    began, store = time.monotonic(), HashStore()
    context = multiprocessing.get_context("spawn") if _sees_gpu() else server_context()
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(len(before))}
    with closing(Page(ranks, furthest(before))) as page:
        try:
            job = Job(work, ranks, environment, page.address, catches_preemption())
            with started(job, context, store) as (processes, results):
                outcomes, ended = outcomes_of(processes, results, may_restart)
                part([processes[rank] for rank in outcomes])
            failure = blamed(outcomes)
        except ServerEndedError as error:
            outcomes, ended, failure = {}, time.monotonic(), Failure(error, ())
        why, culprits = (failure.error, failure.culprits) if failure else (None, ())
        return outcomes, failure, Attempt(ranks, began, ended, why, culprits, *page.read())


def _raise(failure: Failure, attempts: Sequence[Attempt], failures: Sequence[Failure]) -> NoReturn:
    _tell_all(attempts)
    if times := repeated(attempts, failures):
        steps = attempts[-1].steps_done
        where = "before the first step" if steps is None else f"after {steps} steps"
        note = f"the same error ended {times} attempts {where}: not tried again"
        failure.error.add_note(note)
        say(note)
    failure.error.attempts = tuple(attempts)  # type: ignore[attr-defined]
    raise failure.error from (RankTraceback(failure.traceback) if failure.traceback else None)


def _tell_all(attempts: Sequence[Attempt]) -> None:
    if len(attempts) > 1:
        say(told(attempts))


def _end_if_imported_by_a_rank() -> None:
    """A rank imports the program that launched it, under another name: without a guard, that launches ranks again."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(UNGUARDED)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
