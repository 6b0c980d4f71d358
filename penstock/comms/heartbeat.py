"""The heartbeat: a thread that beats twice a second, and detects ranks that died or are suspended, as these report nothing.

The ranks of a machine monitor each other in a ring; the first rank of each machine also monitors that of the next machine:

    machine a: 0 -> 1 -> 0        machine b: 2 -> 3 -> 2        between them: 0 -> 2 -> 0

A rank on this machine that misses beats is lost if its process is suspended. If not, it is in a call that lets no other thread
run, and will continue. The state of a process on another machine cannot be read, so there many beats must be missed.

The thread also ends the process once its launcher is gone. A rank whose torchrun was killed would otherwise continue to train,
and to write checkpoints.
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
from penstock.comms.time_limits import HEARTBEAT_SECONDS, SILENT_AFTER_MISSED_BEATS, SUSPENDED_AFTER_MISSED_BEATS

LOST_KEY = "lost"  # set in the store once a rank is lost, after the reason has been published
IS_GONE, IS_SUSPENDED, IS_SILENT = "is gone", "is stopped (SIGSTOP)", "has given no heartbeat for"


def publish_process(store: Any, rank: int, process: ProcessRecord) -> None:
    """Write the record of this `rank`'s process into the store."""
    store.set(f"life-{rank}", json.dumps(process))


def have_published_processes(store: Any, ranks: Collection[int]) -> bool:
    """Return whether all of these `ranks` have called `publish_process`."""
    return bool(store.check([f"life-{rank}" for rank in ranks]))


def read_process_of_rank(store: Any, rank: int) -> ProcessRecord:
    """Return the record of the process of `rank`; UNKNOWN_PROCESS if it has not published one."""
    text = read_text(store, f"life-{rank}")
    return ProcessRecord(*json.loads(text)) if text else UNKNOWN_PROCESS


def publish_and_read_departures(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """Return rank -> reason for those of `ranks` that have left; first publish those whose process ended without a reason."""
    if store is None:
        return {}
    for rank in set(ranks) - read_departures(store, ranks).keys():
        if read_process_of_rank(store, rank).state() == ENDED:
            publish_departure(store, rank, IS_GONE)
    return read_departures(store, ranks)


def select_lost(departures: Mapping[int, str]) -> dict[int, str]:
    """Return those `departures` (rank -> reason) whose rank was lost, and did not exit by itself."""
    return {rank: reason for rank, reason in departures.items() if reason.startswith((IS_GONE, IS_SUSPENDED, IS_SILENT))}


def find_living_ranks(store: Any, ranks: Collection[int]) -> set[int]:
    """Return those of `ranks` that are known to be alive: processes of this machine that run."""
    return {rank for rank in ranks if read_process_of_rank(store, rank).state() == ALIVE}


def describe_suspended_ranks(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """Return rank -> text for those of `ranks` whose processes are suspended: `is stopped (SIGSTOP) in 2F3 of step 17`."""
    processes = {rank: read_process_of_rank(store, rank) for rank in ranks}
    return {
        rank: f"{IS_SUSPENDED} {process.activity()}".strip()
        for rank, process in processes.items()
        if process.state() == SUSPENDED
    }


class HeartbeatThread:
    """The heartbeat thread of this process. Until `start_beating` it only checks the launcher."""

    def __init__(self) -> None:
        self._launcher_is_gone, self._stopping = _make_launcher_check(), threading.Event()
        self._monitor: PeerMonitor | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)
        self._thread.start()

    def start_beating(self, monitor: "PeerMonitor") -> None:
        """Call `monitor.beat_and_check_peers()` twice a second from now on."""
        self._monitor = monitor

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(2 * HEARTBEAT_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            if self._launcher_is_gone():
                print_notice("what started this rank is gone, so it ends")
                os._exit(1)
            if self._monitor is not None:
                try:
                    self._monitor.beat_and_check_peers()
                except DistNetworkError:  # the store's process is gone; torch would print that at each beat
                    self._monitor = None
                except RuntimeError:  # the store failed once; the next beat may succeed
                    pass


def _make_launcher_check() -> Callable[[], bool]:
    """Return a function that returns whether this rank's launcher is gone; always False for a program started by hand."""
    if (parent := multiprocessing.parent_process()) is not None:  # `launch`, spawn
        return lambda: not parent.is_alive()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent
        agent = os.getppid()
        return lambda: os.getppid() != agent
    return lambda: False  # started by hand: it may outlive its shell


class PeerMonitor:
    """Beats for `rank`, and monitors its peers. `num_ranks`: of the job. `store`: shared by all ranks.

    `abort_waits`: called once, when any rank is lost.
    `on_heartbeat`: called with the store at each beat.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        activity: Activity,
        abort_waits: Callable[[], None],
        on_heartbeat: Callable[[Any], None],
    ) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self._abort_waits, self._on_heartbeat = abort_waits, on_heartbeat
        self._beats = 0
        self._peers: list[MonitoredRank] = []  # once all ranks have published their processes
        self._has_aborted = False
        publish_process(store, rank, read_own_process(activity))

    def beat_and_check_peers(self) -> None:
        """Write a beat, check the peers, and abort this rank's waits if a rank is lost."""
        self._beats += 1
        self.store.set(_beat_key(self.rank), str(self._beats))

        if not self._peers and have_published_processes(self.store, range(self.num_ranks)):
            machines = [read_process_of_rank(self.store, rank).machine or str(rank) for rank in range(self.num_ranks)]
            self._peers = [MonitoredRank(self.store, rank, self.num_ranks) for rank in ranks_to_monitor(self.rank, machines)]
        for peer in self._peers:
            peer.check_and_publish_loss()

        if not self._has_aborted and self.store.check([LOST_KEY]):
            self._abort_waits()
            self._has_aborted = True
        self._on_heartbeat(self.store)


def ranks_to_monitor(rank: int, machines: Sequence[str]) -> list[int]:
    """Return the ranks that `rank` monitors: see the module's text. `machines`: by rank."""
    same_machine = [peer for peer, machine in enumerate(machines) if machine == machines[rank]]
    first_ranks = [machines.index(machine) for machine in dict.fromkeys(machines)]
    rings = [ring for ring in (same_machine, first_ranks) if rank in ring]
    return sorted({ring[(ring.index(rank) + 1) % len(ring)] for ring in rings} - {rank})


class MonitoredRank:
    """A rank that this one monitors."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self.process = read_process_of_rank(store, rank)
        self._last_beat, self._missed_beats = "", 0

    def check_and_publish_loss(self) -> None:
        """Read the rank's last beat and its process's state. If it has ended or is lost, publish that for all ranks."""
        state, beat = self.process.state(), read_text(self.store, _beat_key(self.rank))
        self._missed_beats = self._missed_beats + 1 if beat == self._last_beat else 0
        self._last_beat = beat

        if state == ENDED:
            publish_and_read_departures(self.store, [self.rank])
        elif self._missed_beats >= SUSPENDED_AFTER_MISSED_BEATS:
            lost_ranks = describe_suspended_ranks(self.store, range(self.num_ranks)) or self._describe_silence(state)
            for rank, reason in lost_ranks.items():
                publish_departure(self.store, rank, reason)
            if lost_ranks:
                self.store.set(LOST_KEY, "")

    def _describe_silence(self, state: str) -> dict[int, str]:
        """Return {rank: text} if the rank is on another machine, has missed many beats, and has not left; else {}."""
        if state or self._missed_beats < SILENT_AFTER_MISSED_BEATS or publish_and_read_departures(self.store, [self.rank]):
            return {}
        return {self.rank: f"{IS_SILENT} {self._missed_beats * HEARTBEAT_SECONDS:g} s"}


def _beat_key(rank: int) -> str:
    return f"beat-{rank}"
