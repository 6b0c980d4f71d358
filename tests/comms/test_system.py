"""What the system is asked for: how it schedules threads. What torchrun is told."""

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import penstock as ps
from penstock.comms import system


def rank_policies() -> tuple[int, set[int]]:
    """How the system schedules this thread, and the others of this process, once the ranks are connected."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    ps.comms.init_distributed(backend="gloo")
    return os.sched_getscheduler(0), {os.sched_getscheduler(int(number)) for number in os.listdir("/proc/self/task")}


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux tells how a thread is scheduled")
def test_what_waits_for_messages_does_not_preempt_what_computes() -> None:
    for this, policies in ps.launch(rank_policies, 2):
        assert this == os.SCHED_OTHER
        assert os.SCHED_BATCH in policies


def test_torchruns_table_gets_one_line_of_each_rank_and_the_one_where_the_error_began_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ps.StageError("rank 1, stage 1, action 1F0,\nmicrobatch 0: boom", [1])
    failures = []
    for rank in range(2):
        path = tmp_path / str(rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        system.report_error_to_torchrun(error, began_here=rank in error.ranks)
        failures.append(ProcessFailure(local_rank=rank, pid=0, exitcode=1, error_file=str(path)))
    system.report_error_to_torchrun(ValueError("later"), began_here=True)  # the first one stays
    told = ChildFailedError("train.py", dict(enumerate(failures)))
    assert told.get_first_failure()[0] == 1
    line = "traceback : StageError: rank 1, stage 1, action 1F0, microbatch 0: boom\n"
    assert str(told).count(line) == 2
    assert str(told).partition("Root Cause")[2].count(line) == 1
