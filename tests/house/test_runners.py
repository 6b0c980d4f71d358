"""Runners of tests: ranks that several tests share."""

import os
import signal
import time
from pathlib import Path

import pytest
from runners import cases_on_ranks, on_ranks

import penstock as ps

pytestmark = pytest.mark.ranks


def rank_fails(path: Path) -> None:
    path.write_text(path.read_text() + "started ")
    raise ValueError("of these ranks")


def test_a_launch_that_fails_is_made_once_and_fails_each_of_its_tests(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.write_text("")
    for _ in range(3):
        with pytest.raises(ValueError, match="of these ranks"):
            cases_on_ranks(rank_fails, 1, ((starts,),))
    assert starts.read_text() == "started "


def rank_pid(fault: str = "") -> int:
    if ps.comms.current_topology().rank == 1:
        if fault == "raises":
            raise ValueError("of rank 1")
        if fault == "hangs":
            time.sleep(1000)
    return os.getpid()


def test_functions_run_on_the_same_ranks_until_one_raises_an_error() -> None:
    first = on_ranks(rank_pid, 2)
    assert on_ranks(rank_pid, 2) == first
    with pytest.raises(ValueError, match="of rank 1"):
        on_ranks(rank_pid, 2, "raises")
    assert not {*first} & {*on_ranks(rank_pid, 2)}


def test_ranks_that_hang_end_with_the_test() -> None:
    pids = on_ranks(rank_pid, 2)

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(TimeoutError):
        on_ranks(rank_pid, 2, "hangs")
    signal.signal(signal.SIGALRM, before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
