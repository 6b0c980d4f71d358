"""The heartbeat: one thread of each rank that tells the others twice a second that it lives, and watches another rank.

The ranks of a machine watch each other in a ring, and of each machine the first rank watches the first of the next one. A
process that is stopped is known for sure on its machine: that ends the step on all ranks. One that is silent or slow may come
back; it is named on the error output, and the error comes at the timeout. All is counted in looks, not in clock time: where
the whole job was stopped and goes on, or the computer slept, nobody has missed a look.

The thread also ends the process once what started it is gone: a rank whose torchrun was killed would train on, and write
checkpoints, for ever.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistNetworkError

from penstock.comms.health.doing import doing, running, told
from penstock.comms.health.lives import gone, have_told, life, stopped, tell_life
from penstock.comms.health.process import ENDED, STOPPED, TRACED
from penstock.comms.starting.meeting import depart, said
from penstock.comms.system import say
from penstock.schedule.table import Action, Kind

LOOK = 0.5  # seconds
PROOF = 5  # looks in a row that see a process stopped: then it is not the whole job that was stopped, and goes on
SILENCE = 8  # looks in a row without a new beat: then a rank is named
SLOW = 10  # looks, and times the longest before: then an action is
LOST = "lost"  # a key of the store: a rank is stopped, and what became of it is told


class Heartbeat:
    """The thread of this process."""

    def __init__(self) -> None:
        self._orphaned, self._over = _orphaned(), threading.Event()
        self._ring: Ring | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, store: Any, rank: int, ranks: int, wake: Callable[[], None], beside: Callable[[Any], None]) -> None:
        """From now on beat as `rank` of `ranks`, which have met at `store`; once one of them is lost, `wake` this one.

        `beside` is called at each look, with a connection to the store.
        """
        self._ring = Ring(store.clone(), rank, ranks, wake, beside)  # others may block the connection

    def stop(self) -> None:
        """Beat no more."""
        self._over.set()
        self._thread.join(2 * LOOK)

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            if self._orphaned():
                say("what started this rank is gone, so it ends")
                os._exit(1)
            if self._ring is not None:
                try:
                    self._ring.look()
                except DistNetworkError:  # the store is gone, with the process that had it; torch would tell it at each look
                    self._ring = None
                except RuntimeError:  # a look that could not be finished, which the next one can
                    pass


def _orphaned() -> Callable[[], bool]:
    """Tells whether what started this rank is gone. Not asked of a program started by hand, which may outlive its shell."""
    if (parent := multiprocessing.parent_process()) is not None:  # `launch`, spawn
        return lambda: not parent.is_alive()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent
        agent = os.getppid()
        return lambda: os.getppid() != agent
    return lambda: False


class Ring:
    """A rank among those that watch each other."""

    def __init__(self, store: Any, rank: int, ranks: int, wake: Callable[[], None], beside: Callable[[Any], None]) -> None:
        self.store, self.rank, self.ranks, self._wake, self._beside = store, rank, ranks, wake, beside
        self._looks = 0
        self._watched: list[Watched] = []
        self._woken = False
        self._pace = Pace()
        tell_life(store, rank)

    def look(self) -> None:
        """Beat, and see how the others are."""
        self._looks += 1
        self.store.set(beat_key(self.rank), json.dumps([self._looks, *doing.words]))
        if not self._watched and have_told(self.store, range(self.ranks)):
            machines = [life(self.store, rank).machine or str(rank) for rank in range(self.ranks)]
            self._watched = [Watched(self.store, rank, self.ranks) for rank in watched_by(self.rank, machines)]
        for each in self._watched:
            each.look()
        if not self._woken and self.store.check([LOST]):
            self._wake()
            self._woken = True
        self._beside(self.store)
        if slow := self._pace.look(others_wait=any(not each.is_busy for each in self._watched)):
            say(f"rank {self.rank} is slow: {slow}")


def watched_by(rank: int, machines: Sequence[str]) -> list[int]:
    """The ranks that `rank` watches, by the machine of each: the next on its own; if it is the first there, the next first."""
    here = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
    rings = [ring for ring in (here, firsts) if rank in ring]
    return sorted({ring[(ring.index(rank) + 1) % len(ring)] for ring in rings} - {rank})


class Watched:
    """A rank that this one watches."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.process = life(store, rank)
        self.beat: list[int] = []  # its number, and what the rank was doing
        self.stopped = self.silent = 0  # looks in a row

    @property
    def is_busy(self) -> bool:
        """Whether it was in an action when it beat last, not waiting for others."""
        return bool(self.beat) and running(self.beat[1:]) is not None

    def look(self) -> None:
        """Look how it is: what is proof is told to all, what is not to the user."""
        state = self.process.state()
        beat = json.loads(said(self.store, beat_key(self.rank)) or "[]")
        self.silent = self.silent + 1 if beat == self.beat else 0
        self.stopped = self.stopped + 1 if state == STOPPED else 0
        self.beat = beat
        if state == ENDED:
            gone(self.store, [self.rank])
        elif self.stopped >= PROOF and (found := stopped(self.store, range(self.ranks))):  # it may go on this moment
            for rank, how in found.items():
                depart(self.store, rank, how)
            self.store.set(LOST, "")
        elif self.silent == SILENCE and not self.stopped and not gone(self.store, [self.rank]):
            why = f": it is {TRACED}" if state == TRACED else ""
            last = told(beat[1:]) if beat else "before it began to beat"
            say(f"rank {self.rank} has been silent for {SILENCE * LOOK:g} s, last heard of {last}{why}")


class Pace:
    """How long this rank's actions take, in looks: enough to see one that takes much longer than any like it before."""

    def __init__(self) -> None:
        self._longest: dict[tuple[Kind, int], int] = {}
        self._now: tuple[int, Action] | None = None
        self._looks, self._first = 0, 0  # at the action that runs; the first step seen, whose actions may take long
        self._named: tuple[int, Action] | None = None

    def look(self, others_wait: bool) -> str:
        """What is slow, in words, once for each action."""
        now = running(doing.words)
        if now != self._now:
            if self._now is not None:
                like = self._now[1][:2]
                self._longest[like] = max(self._looks, self._longest.get(like, 0))
            self._now, self._looks = now, 0
        if now is None:
            return ""
        step, action = now
        self._first = self._first or step
        self._looks += 1
        before = self._longest.get(action[:2], 1)
        if self._looks < SLOW * before or step == self._first or not others_wait or self._named == now:
            return ""
        self._named = now
        return f"{told(doing.words)} for {self._looks * LOOK:g} s, where such an action took {before * LOOK:g} s at most"


def beat_key(rank: int) -> str:
    """Where a rank's beats are in the store."""
    return f"beat-{rank}"
