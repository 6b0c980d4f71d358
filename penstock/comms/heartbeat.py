"""The heartbeat: a thread that beats twice a second, and detects ranks that died or are suspended, as these report nothing.

The ranks of a machine monitor each other in a ring; the first rank of each machine also monitors that of the next machine:

    machine a: 0 -> 1 -> 0        machine b: 2 -> 3 -> 2        between them: 0 -> 2 -> 0

A rank on this machine that misses beats is lost if its process is suspended. If not, it is in a call that lets no other thread
run, and will continue. The state of a process on another machine cannot be read, so there many beats must be missed.

The thread also ends the process once its launcher is gone. A rank whose torchrun was killed would otherwise continue to train,
and to write checkpoints.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError

from penstock.comms.process import (
    ENDED,
    Activity,
    Heartbeat,
    have_published_processes,
    publish_beat,
    publish_process,
    read_beat,
    read_process_of_rank,
)
from penstock.comms.status import HANGING_KEY, publish_gone_and_read, publish_loss, publish_suspended
from penstock.comms.system import print_notice
from penstock.comms.time_limits import HEARTBEAT_SECONDS, SILENT_AFTER_MISSED_BEATS, SUSPENDED_AFTER_MISSED_BEATS

if TYPE_CHECKING:
    from torch.distributed import Store


class HeartbeatThread:
    """The heartbeat thread of this process. Until `start_beating` it only checks the launcher."""

    def __init__(self) -> None:
        self._launcher_is_gone, self._stopping = _make_launcher_check(), threading.Event()
        self.monitor: PeerMonitor | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)
        self._thread.start()

    def start_beating(self, monitor: "PeerMonitor") -> None:
        """Call `monitor.beat_and_check_peers()` twice a second from now on."""
        self.monitor = monitor

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(2 * HEARTBEAT_SECONDS)

    def exit_if_launcher_is_gone(self) -> None:
        """End this process if its launcher is gone: the other ranks end too, and none of them is at fault."""
        if self._launcher_is_gone():
            print_notice("what started this rank is gone, so it ends")
            os._exit(1)

    def _run(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self.exit_if_launcher_is_gone()
            if self.monitor is not None:
                try:
                    self.monitor.beat_and_check_peers()
                except DistNetworkError:  # the store's process is gone; torch would print that at each beat
                    self.monitor = None
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

    `activity`: of this rank, which its heartbeats carry.
    `abort_waits`: called once, when any rank is stopped or silent.
    `on_heartbeat`: called with the store at each beat.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        num_ranks: int,
        activity: Activity,
        abort_waits: Callable[[], None],
        on_heartbeat: Callable[[Any], None],
    ) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self._activity, self._abort_waits, self._on_heartbeat = activity, abort_waits, on_heartbeat
        self._beats = 0
        self._peers: list[MonitoredRank] = []  # once all ranks have published their processes
        self._has_aborted = False
        publish_process(store, rank)

    def beat_and_check_peers(self) -> None:
        """Write a beat, check the peers, and abort this rank's waits if a rank is stopped or silent."""
        self._beats += 1
        publish_beat(self.store, self.rank, Heartbeat(self._beats, self._activity.describe()))

        if not self._peers and have_published_processes(self.store, range(self.num_ranks)):
            machines = [read_process_of_rank(self.store, rank).machine or str(rank) for rank in range(self.num_ranks)]
            self._peers = [MonitoredRank(self.store, rank, self.num_ranks) for rank in ranks_to_monitor(self.rank, machines)]
        for peer in self._peers:
            peer.check_and_publish_loss()

        if not self._has_aborted and self.store.check([HANGING_KEY]):
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

    def __init__(self, store: "Store", rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self.process = read_process_of_rank(store, rank)
        self._last_beat, self._missed_beats = 0, 0

    def check_and_publish_loss(self) -> None:
        """Read the rank's last beat and its process's state. If it has ended or is lost, publish that for all ranks."""
        state, beat = self.process.state(), read_beat(self.store, self.rank).number
        self._missed_beats = self._missed_beats + 1 if beat == self._last_beat else 0
        self._last_beat = beat

        if state == ENDED:
            publish_gone_and_read(self.store, [self.rank])
        elif self._missed_beats >= SUSPENDED_AFTER_MISSED_BEATS and not publish_suspended(self.store, range(self.num_ranks)):
            is_silent = not state and self._missed_beats >= SILENT_AFTER_MISSED_BEATS  # of another machine
            if is_silent and not publish_gone_and_read(self.store, [self.rank]):
                seconds = self._missed_beats * HEARTBEAT_SECONDS
                text = f"has given no heartbeat for {seconds:g} s (does its machine run, and is the network up?)"
                publish_loss(self.store, self.rank, "silent", text)
