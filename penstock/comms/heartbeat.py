"""The heartbeat: one thread of each rank that beats twice a second at the store, and watches another rank.

The ranks of a machine watch each other in a ring, and of each machine the first rank watches the first of the next one. A
rank that misses beats is lost if its machine says that its process is stopped. One that is not is held by a call that lets no
other thread run, and goes on after it. Of another machine nobody sees that, so many beats must be missed there. All is counted
in looks, not in clock time: where the whole job was stopped and goes on, or the computer slept, nobody has missed a look.

The thread also ends the process once what started it is gone: a rank whose torchrun was killed would train on, and write
checkpoints, for ever.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.distributed import DistNetworkError

from penstock.comms.process import ALIVE, ENDED, SUSPENDED, UNKNOWN_PROCESS, Activity, ProcessRecord, read_own_process
from penstock.comms.rendezvous import publish_departure, read_departures, read_text
from penstock.comms.system import print_notice

HEARTBEAT_SECONDS = 0.5
SUSPENDED_AFTER_MISSED_BEATS = (
    4  # looks in a row without a new beat, then a stopped rank is lost: the whole job would have been stopped with it
)
SILENT_AFTER_MISSED_BEATS = 240  # the same for a rank of which this machine does not see whether it is stopped
LOST = "lost"  # a key of the store: a rank is lost, and what became of it is told
GONE, STANDS, SILENT = "is gone", "is stopped (SIGSTOP)", "has given no heartbeat for"


def publish_process(store: Any, rank: int, process: ProcessRecord) -> None:
    """Say which process `rank`, this one, is."""
    store.set(f"life-{rank}", json.dumps(process))


def have_published_processes(store: Any, ranks: Collection[int]) -> bool:
    """Whether all of these have."""
    return bool(store.check([f"life-{rank}" for rank in ranks]))


def read_process_of_rank(store: Any, rank: int) -> ProcessRecord:
    """The process of `rank`; one that nobody can see, if it has not told."""
    told = read_text(store, f"life-{rank}")
    return ProcessRecord(*json.loads(told)) if told else UNKNOWN_PROCESS


def detect_departures(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """What became of those of `ranks` that have left. One whose process has ended without a word is told to all."""
    if store is None:
        return {}
    for rank in set(ranks) - read_departures(store, ranks).keys():
        if read_process_of_rank(store, rank).state() == ENDED:
            publish_departure(store, rank, GONE)
    return read_departures(store, ranks)


def select_lost(gone: Mapping[int, str]) -> dict[int, str]:
    """Those of the `gone` that did not leave by themselves."""
    return {rank: how for rank, how in gone.items() if how.startswith((GONE, STANDS, SILENT))}


def find_living_ranks(store: Any, ranks: Collection[int]) -> set[int]:
    """Those of `ranks` that certainly live: their processes run on this machine."""
    return {rank for rank in ranks if read_process_of_rank(store, rank).state() == ALIVE}


def describe_suspended_ranks(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """Those of `ranks` whose processes are stopped, in words."""
    lives = {rank: read_process_of_rank(store, rank) for rank in ranks}
    return {rank: f"{STANDS} {each.activity()}".strip() for rank, each in lives.items() if each.state() == SUSPENDED}


class HeartbeatThread:
    """The thread of this process."""

    def __init__(self) -> None:
        self._orphaned, self._over = _orphaned(), threading.Event()
        self._ring: PeerMonitor | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, ring: "PeerMonitor") -> None:
        """From now on beat as one of its ranks."""
        self._ring = ring

    def stop(self) -> None:
        """Beat no more."""
        self._over.set()
        self._thread.join(2 * HEARTBEAT_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            if self._orphaned():
                print_notice("what started this rank is gone, so it ends")
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


class PeerMonitor:
    """`rank` among `ranks` that have met at `store` and watch each other: once one of them is lost, `wake` this one.

    `at_each_look` is called at each look, with the store.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        activity: Activity,
        wake: Callable[[], None],
        at_each_look: Callable[[Any], None],
    ) -> None:
        self.store, self.rank, self.ranks, self._wake, self._at_each_look = store, rank, ranks, wake, at_each_look
        self._beats = 0
        self._watched: list[MonitoredRank] = []
        self._woken = False
        publish_process(store, rank, read_own_process(activity))

    def look(self) -> None:
        """Beat, and see how the others are."""
        self._beats += 1
        self.store.set(_key(self.rank), str(self._beats))
        if not self._watched and have_published_processes(self.store, range(self.ranks)):
            machines = [read_process_of_rank(self.store, rank).machine or str(rank) for rank in range(self.ranks)]
            self._watched = [MonitoredRank(self.store, rank, self.ranks) for rank in ranks_to_monitor(self.rank, machines)]
        for each in self._watched:
            each.look()
        if not self._woken and self.store.check([LOST]):
            self._wake()
            self._woken = True
        self._at_each_look(self.store)


def ranks_to_monitor(rank: int, machines: Sequence[str]) -> list[int]:
    """The ranks that `rank` watches, by the machine of each: the next on its own; if it is the first there, the next first."""
    here = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    firsts = [machines.index(machine) for machine in dict.fromkeys(machines)]
    rings = [ring for ring in (here, firsts) if rank in ring]
    return sorted({ring[(ring.index(rank) + 1) % len(ring)] for ring in rings} - {rank})


class MonitoredRank:
    """A rank that this one watches."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.process = read_process_of_rank(store, rank)
        self._beat, self._missed = "", 0  # the last one; looks in a row without a new one

    def look(self) -> None:
        """Look how it is; what became of it is told to all."""
        state, beat = self.process.state(), read_text(self.store, _key(self.rank))
        self._missed = self._missed + 1 if beat == self._beat else 0
        self._beat = beat
        if state == ENDED:
            detect_departures(self.store, [self.rank])
        elif self._missed >= SUSPENDED_AFTER_MISSED_BEATS and (
            lost := describe_suspended_ranks(self.store, range(self.ranks)) or self._silent(state)
        ):
            for rank, how in lost.items():
                publish_departure(self.store, rank, how)
            self.store.set(LOST, "")

    def _silent(self, state: str) -> dict[int, str]:
        """The rank, and that it has been silent for long, if nothing else is known of it."""
        if state or self._missed < SILENT_AFTER_MISSED_BEATS or detect_departures(self.store, [self.rank]):
            return {}
        return {self.rank: f"{SILENT} {self._missed * HEARTBEAT_SECONDS:g} s"}


def _key(rank: int) -> str:
    return f"beat-{rank}"
