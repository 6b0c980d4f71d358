"""What the system is asked for: how it schedules threads."""

import os

import pytest

import penstock as ps


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
