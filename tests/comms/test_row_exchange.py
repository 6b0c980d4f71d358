"""What rows travel over: pipes between ranks that share memory, else Gloo; all ranks get the same rows."""

import os
import signal

import pytest

import penstock as ps
from penstock.comms import control_group, shared_memory

RANKS = 3
LONG = "a value that does not fit into a row" * 100


def rank_exchanges(ranks_without_memory):
    topology = ps.comms.init_distributed(backend="gloo")
    if topology.rank in ranks_without_memory:
        shared_memory.CAN_SHARE = False
    control, rows = control_group.shared_control_group(topology), []
    with control.collective_call("exchange()"):
        for number in range(4):
            control.begin_all_gather_row([topology.rank, number], "to begin", bytes([topology.rank + 1]))
            rows.append(control.finish_all_gather_row("to begin"))
            assert [control.value_in_row(rank)[:1] for rank in range(RANKS)] == [bytes([rank + 1]) for rank in range(RANKS)]
        values = control.all_gather_value([topology.rank, LONG], "to exchange values")
    return rows, values, {peer: type(link).__name__ for peer, link in control._exchange._links.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_without_memory", [(), (2,), (0, 1)])
def test_rows_are_the_same_over_pipes_and_over_gloo(ranks_without_memory):
    for rank, (rows, values, links) in enumerate(ps.launch(rank_exchanges, RANKS, ranks_without_memory)):
        assert rows == [[[peer, number] for peer in range(RANKS)] for number in range(4)]
        assert values == [[peer, LONG] for peer in range(RANKS)]
        expected = {
            peer: "_GlooLink" if {rank, peer}.intersection(ranks_without_memory) else "_PipeLink"
            for peer in range(RANKS)
            if peer != rank
        }
        assert links == expected


def rank_is_lost_between_rows():
    topology = ps.comms.init_distributed(backend="gloo")
    control = control_group.shared_control_group(topology)
    with control.collective_call("exchange()"):
        control.all_gather_row([], "to begin")
        control.begin_all_gather_row([topology.rank], "to go on")
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        control.finish_all_gather_row("to go on")  # its row was sent before
        control.all_gather_row([], "to end")


@pytest.mark.ranks
def test_a_row_that_a_rank_has_sent_arrives_and_the_wait_for_the_next_ends_when_it_is_killed():
    with pytest.raises(ps.LostRankError, match=r"rank 1 was killed by SIGKILL .*: rank [02] waited for rank 1 to end"):
        ps.launch(rank_is_lost_between_rows, RANKS)
