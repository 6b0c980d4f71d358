"""A rank that is stopped ends the step everywhere by name; one whose launcher is gone ends itself; nobody is blamed wrongly."""

import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_until

import penstock as ps
from penstock.comms import heartbeat, status
from penstock.comms.heartbeat import SILENT_AFTER_MISSED_BEATS, SUSPENDED_AFTER_MISSED_BEATS, MonitoredRank, ranks_to_monitor
from penstock.comms.process import (
    ALIVE,
    ENDED,
    SUSPENDED,
    Activity,
    Heartbeat,
    ProcessRecord,
    machine_id,
    publish_beat,
    read_beat,
    read_process,
)
from penstock.comms.status import (
    HANGING_KEY,
    RankStatus,
    explain_failure,
    publish,
    read,
    status_of_end,
)
from penstock.schedule.table import Action, Kind

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how another process is")


def test_each_rank_of_a_machine_is_watched_by_one_other_and_each_machine_by_another():
    assert [ranks_to_monitor(rank, ["a"] * 4) for rank in range(4)] == [[1], [2], [3], [0]]
    assert [ranks_to_monitor(rank, ["a", "a", "b", "b", "c"]) for rank in range(5)] == [[1, 2], [0], [3, 4], [2], [0]]
    assert [ranks_to_monitor(rank, ["a", "b"]) for rank in range(2)] == [[1], [0]]


def test_what_a_rank_is_doing_is_told_in_words():
    doing = Activity()
    assert doing.describe() == ""
    with doing.during_step(17, True):
        assert doing.describe() == "at the beginning of step 17"
        doing.now = "step 17", Action(Kind.W, 2, 3), True
        assert doing.describe() == "in 2W3 of step 17"
        doing.now = "step 17", Action(Kind.W, 2, 3), False
        assert doing.describe() == "after 2W3 of step 17"
    assert doing.describe() == "after step 17"
    with doing.during_step(17, False):
        doing.now = doing.now[0], Action(Kind.F, 0, 0), True
        assert doing.describe() == "in 0F0 of an evaluation"


@linux
def test_a_process_is_seen_alive_stopped_and_ended_from_outside_and_no_other_is_taken_for_it():
    assert read_process(os.getpid()).state() == ALIVE
    with subprocess.Popen(["sleep", "60"]) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        seen = ProcessRecord(machine_id(), child.pid, started)
        assert seen.state() == ALIVE
        child.send_signal(signal.SIGSTOP)
        while seen.state() == ALIVE:
            time.sleep(0.01)
        assert seen.state() == SUSPENDED
        assert seen._replace(start_ticks="0").state() == ENDED  # another has its number
        assert seen._replace(machine="elsewhere").state() == ""
        child.kill()
        while seen.state() != ENDED:
            time.sleep(0.01)
    assert seen.state() == ENDED


def test_a_store_that_is_gone_is_not_asked_again_and_one_that_fails_once_is(monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.01)
    errors, asked = iter([RuntimeError("once"), torch.distributed.DistNetworkError("gone")]), threading.Event()

    class FailingMonitor:
        def beat_and_check_peers(self):
            asked.set()
            raise next(errors)

    thread = heartbeat.HeartbeatThread()
    thread.monitor = FailingMonitor()
    while thread.monitor is not None:
        assert asked.wait(60)
    assert next(errors, None) is None
    assert thread._thread.is_alive()
    thread.stop()


class InState:
    """A process that is seen in these states, one a look, and then in the last one."""

    def __init__(self, *states: str) -> None:
        self._states = list(states)

    def state(self) -> str:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]


def beat(store, number):
    publish_beat(store, 1, Heartbeat(number, f"in 1F0 of step {number}"))


def watched(monkeypatch, store, *states):
    """Rank 1 of two, in these states, which has beaten once."""
    monkeypatch.setattr(heartbeat, "read_process_of_rank", lambda *_: InState(*states))
    beat(store, 1)
    found = MonitoredRank(store, 1, 2)
    found.check_and_publish_loss()
    return found


def test_a_rank_that_goes_on_at_the_moment_of_proof_is_not_lost_and_one_whose_proof_could_not_be_told_is(monkeypatch):
    store = torch.distributed.HashStore()
    seen = watched(monkeypatch, store, SUSPENDED)
    found = iter([set(), RuntimeError("the store"), {1}])

    def suspended(*_: object) -> set[int]:
        if isinstance(now := next(found), Exception):
            raise now
        return now

    monkeypatch.setattr(status, "ranks_in_state", suspended)
    for _ in range(SUSPENDED_AFTER_MISSED_BEATS):
        seen.check_and_publish_loss()
    assert not store.check([HANGING_KEY])
    beat(store, 2)
    seen.check_and_publish_loss()
    for number in range(SUSPENDED_AFTER_MISSED_BEATS + 1):
        with pytest.raises(RuntimeError) if number == SUSPENDED_AFTER_MISSED_BEATS - 1 else nullcontext():
            seen.check_and_publish_loss()
    assert store.check([HANGING_KEY])
    assert read(store, [1])[1].kind == "stopped"


def test_a_rank_that_beats_no_more_but_is_not_stopped_is_not_lost(monkeypatch):
    store = torch.distributed.HashStore()
    seen = watched(monkeypatch, store, ALIVE)
    for _ in range(10 * SILENT_AFTER_MISSED_BEATS):
        seen.check_and_publish_loss()
    assert not store.check([HANGING_KEY])
    assert read(store, [1]) == {}


def test_a_rank_of_another_machine_is_lost_once_it_has_missed_many_looks_in_a_row(monkeypatch):
    store = torch.distributed.HashStore()
    seen = watched(monkeypatch, store, "")
    for number in (2, 3):
        for _ in range(SILENT_AFTER_MISSED_BEATS - 1):
            seen.check_and_publish_loss()
        assert not store.check([HANGING_KEY])
        beat(store, number)
        seen.check_and_publish_loss()
    for _ in range(SILENT_AFTER_MISSED_BEATS):
        seen.check_and_publish_loss()
    assert store.check([HANGING_KEY])
    wait = RankStatus(0, "waited", "for the output of 1F0 from rank 1", peers=[1])
    diagnosis = explain_failure(store, torch.distributed.PrefixStore("call", store), range(2), wait)
    hint = "does its machine run, and is the network up?"
    last_seen = f"rank 1 has given no heartbeat for 120 s ({hint}), last seen in 1F0 of step 3"
    assert str(diagnosis) == f"{last_seen}: rank 0 waited for the output of 1F0 from rank 1"


def test_a_rank_of_another_machine_that_has_left_is_silent_by_right(monkeypatch):
    store = torch.distributed.HashStore()
    seen = watched(monkeypatch, store, "")
    publish(store, status_of_end(1, None))
    for _ in range(2 * SILENT_AFTER_MISSED_BEATS):
        seen.check_and_publish_loss()
    assert not store.check([HANGING_KEY])


def rank_holds_its_interpreter(folder):
    """Rank 1 computes in one call of C that lets no other thread run, until rank 0 has looked at it often enough."""
    topology = ps.comms.init_distributed()
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, microbatches=1)
    inputs = torch.ones(2, 4)
    pipe.step(inputs, target=inputs)
    with (Path(folder) / "lock").open("w") as lock:
        if topology.rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        pipe.step(inputs, target=inputs)  # rank 0 has the lock
        if topology.rank == 0:
            missed, check = threading.Semaphore(0), MonitoredRank.check_and_publish_loss

            def counted(monitored):
                check(monitored)
                if monitored._missed_beats:
                    missed.release()

            MonitoredRank.check_and_publish_loss = counted
            for _ in range(2 * SUSPENDED_AFTER_MISSED_BEATS):
                missed.acquire()
        else:
            ctypes.PyDLL(None).flock(lock.fileno(), fcntl.LOCK_EX)
    pipe.step(inputs, target=inputs)
    return pipe.step_count


@linux
@pytest.mark.ranks
def test_a_rank_that_lets_no_thread_of_its_own_run_for_longer_than_a_stopped_one_may_is_not_lost(tmp_path):
    assert ps.launch(rank_holds_its_interpreter, 2, str(tmp_path)) == [3, 3]


def write(path: Path, text: str) -> None:
    """Whole, or not at all: whoever writes may be stopped, and who reads does not wait."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def rank_trains(folder: str) -> None:
    """Until somebody writes the file `end`."""
    topology = ps.comms.init_distributed()
    write(Path(folder) / f"pid-{topology.rank}", str(os.getpid()))
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), nn.functional.mse_loss, microbatches=2)
    inputs = torch.ones(4, 8)
    try:
        while not (Path(folder) / f"end-{pipe.step_count}").exists():
            pipe.step(inputs, target=inputs)
            if read_beat(topology.store, topology.rank).activity:  # a heartbeat has carried it
                write(Path(folder) / f"step-{topology.rank}", str(pipe.step_count))
            if topology.rank == 0 and (Path(folder) / "end").exists():
                (Path(folder) / f"end-{pipe.step_count + 1}").touch()  # the others see it before they have done that one
    except ps.LostRankError as error:
        write(Path(folder) / f"error-{topology.rank}", str(error))
        raise


@contextmanager
def training(folder, *launcher):
    """Ranks that train, started by this file in a group of their own; which is killed at the end."""
    command = [sys.executable, *launcher, __file__, str(folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # for what this file imports
    )
    try:
        wait_until(lambda: (folder / "step-0").exists() and (folder / "step-1").exists())
        yield process, [int((folder / f"pid-{rank}").read_text()) for rank in (0, 1)]
    finally:
        for group in {process.pid, *[int(path.read_text()) for path in folder.glob("pid-?")]}:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()
        process.stdout.close()


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@linux
@pytest.mark.ranks
@pytest.mark.fresh
def test_under_torchrun_a_stopped_rank_is_named_with_its_step(tmp_path):
    with training(tmp_path, *TORCHRUN) as (_, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        wait_until((tmp_path / "error-0").exists)
        step = int((tmp_path / "step-1").read_text())
        words = (tmp_path / "error-0").read_text()
        moment = r"(?:(?:in|after) 1[FB][01] of|at the beginning of|after)"
        last_seen = re.match(rf"rank 1 is stopped \(SIGSTOP; to pause a job, .*\), last seen {moment} step (\d+): ", words)
        assert last_seen is not None, words
        assert int(last_seen[1]) <= step + 1


@pytest.mark.slow
@linux
@pytest.mark.ranks
@pytest.mark.fresh
def test_ranks_whose_torchrun_was_killed_end_themselves_and_blame_none_of_them(tmp_path):
    with training(tmp_path, *TORCHRUN) as (agent, ranks):
        agent.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks))
        assert not list(tmp_path.glob("error-*"))


def is_running(process):
    return Path(f"/proc/{process}/stat").exists() and Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"


@pytest.mark.slow
@linux
@pytest.mark.ranks
def test_nobody_is_blamed_when_the_whole_job_was_stopped_and_goes_on(tmp_path):
    with training(tmp_path) as (process, _):
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(heartbeat.HEARTBEAT_SECONDS * (heartbeat.SUSPENDED_AFTER_MISSED_BEATS + 2))
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(heartbeat.HEARTBEAT_SECONDS * 3)
        (tmp_path / "end").touch()
        output, _ = process.communicate()
        assert "penstock: " not in output
        assert "LostRankError" not in output
        assert process.returncode == 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_trains(sys.argv[1])
    else:
        ps.launch(rank_trains, 2, sys.argv[1])
