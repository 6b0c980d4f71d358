"""The records of how ranks ended: the first one stays, and one table says which of them explain an error."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from penstock.comms.rendezvous import CURRENT_RUN_KEY, agree_on_run_id
from penstock.comms.status import RankStatus, collect, diagnose, error_of, publish, read, status_of_end


def wait(rank: int, *peers: int, timeout: float = 0.0) -> RankStatus:
    return RankStatus(rank, "waited", f"for the output of {peers}", peers=peers, timeout=timeout)


RAISED = RankStatus(3, "raised", "rank 3, stage 3: boom", error="StageError")
GONE, STOPPED = RankStatus(2, "gone", "is gone"), RankStatus(2, "stopped", "is stopped (SIGSTOP)", activity="in 2F0 of step 1")
LEFT, LEFT_BY_ERROR = status_of_end(2, None), status_of_end(2, ValueError("own"))


@pytest.mark.parametrize(
    ("statuses", "alive", "ranks", "text"),
    [
        ([RAISED, GONE, wait(1, 2)], [], (3,), "rank 3, stage 3: boom"),
        (
            [GONE, RAISED, wait(1, 2)], [], (2,),
            "rank 2 is gone: rank 1 waited for the output of (2,): the connection is closed",
        ),
        (
            [wait(0, 1), wait(1, 2), STOPPED], [3], (2,),
            "rank 2 is stopped (SIGSTOP), last seen in 2F0 of step 1: rank 1 waited for the output of (2,)",
        ),
        (
            [wait(0, 1), wait(1, 2), LEFT], [3], (2,),
            "rank 1 waited for the output of (2,), but rank 2 has finished: every rank must make the same calls",
        ),
        ([wait(1, 2), LEFT_BY_ERROR], [3], (2,), "rank 1 waited for the output of (2,), but rank 2 ended with ValueError: own"),
        (
            [wait(0, 1), wait(1, 2, timeout=5.0)._replace(activity="in 2F0 of step 1")], [2, 3], (2,),
            "rank 2 does not answer, last seen in 2F0 of step 1: rank 1 waited for the output of (2,): no answer within 5 s "
            "(init_distributed(timeout=..))",
        ),
        (
            [wait(0, 1), wait(1, 2)], [3], (2,),
            "rank 2 is gone (its output and its exit code may say why): "
            "rank 1 waited for the output of (2,): the connection is closed",
        ),
        (
            [wait(0), wait(1), wait(2)], [], (3,),
            "rank 3 is gone (its output and its exit code may say why): "
            "rank 0 waited for the output of (): the connection is closed",
        ),
        (
            [wait(0), wait(1), wait(2)], [3], (),
            "the ranks lost each other: rank 0 waited for the output of (): the connection is closed",
        ),
    ],
)  # fmt: skip
def test_the_first_line_of_the_table_that_applies_is_the_error(
    statuses: list[RankStatus], alive: list[int], ranks: tuple[int, ...], text: str
) -> None:
    error = error_of(*diagnose(statuses, range(4), alive))
    assert str(error) == text
    assert error.ranks == ranks


def test_the_first_record_of_a_rank_stays() -> None:
    store = torch.distributed.HashStore()
    assert read(store, range(4)) == {}
    publish(store, LEFT)
    publish(store, STOPPED)
    assert {rank: status.kind for rank, status in read(store, range(4)).items()} == {2: "left"}


class StandsStill:
    """A store whose reader stands still once it has seen that `key` is not there, while something is done."""

    def __init__(self, store: torch.distributed.Store, key: str, meanwhile: Callable[[], None]) -> None:
        self._store, self._key, self._meanwhile = store, key, meanwhile
        self.get, self.set = store.get, store.set

    def check(self, keys: list[str]) -> bool:
        seen = self._store.check(keys)
        if keys == [self._key] and not seen:
            self._meanwhile()
        return seen


def test_a_rank_that_leaves_once_it_has_told_all_is_heard_by_who_looked_just_before() -> None:
    job = torch.distributed.HashStore()
    call, mine = torch.distributed.PrefixStore("call", job), RankStatus(0, "waited", "in a scatter", 0.0)

    def tell_and_leave() -> None:
        publish(call, RankStatus(1, "waited", "in a broadcast", 1.0))
        publish(job, status_of_end(1, None))

    publish(call, mine)
    statuses = collect(job, StandsStill(call, "status-1", tell_and_leave), range(2), mine)
    assert [status.text for status in statuses] == ["in a scatter", "in a broadcast"]


def test_a_start_of_which_a_rank_has_left_as_soon_as_all_were_ready_is_a_start() -> None:
    job = torch.distributed.HashStore()

    def start_and_leave() -> None:
        job.set("here/ready", json.dumps([job.get("here/rank-1").decode()]))
        publish(job, status_of_end(0, None))

    job.set(CURRENT_RUN_KEY, "here")
    assert agree_on_run_id(StandsStill(job, "here/ready", start_and_leave), 1, 2, timedelta(seconds=60)) == "here"
