"""Who breaks a group off ends what everybody waits for from there, and who gives one up what others would wait for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.comms.abort import abort_backend
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.rendezvous import wait_for_all
from penstock.comms.topology import Topology


def rank_aborts():
    """Rank 1 does; ranks 0 and 2 wait for that one and pass it on; rank 3 waits for rank 0 only."""
    topology = ps.comms.init_distributed()
    group, message = ProcessGroups(topology, "broken").world_group, ""
    if topology.rank != 1:
        with pytest.raises(RuntimeError) as error:
            group.recv([torch.empty(1)], 0 if topology.rank == 3 else 1, 0).wait()
        message = str(error.value)
    abort_backend(group)
    _ = ProcessGroups(topology, "afterwards").world_group  # until then nobody's group goes of itself
    return message


@pytest.mark.ranks
def test_whoever_is_waited_for_and_whoever_broke_off_first_nobody_waits_for_the_timeout():
    assert not [result for result in ps.launch(rank_aborts, 4) if "Timed out" in result]


@pytest.mark.parametrize(("is_over", "seconds", "message"), [(True, 60, "another rank has failed"), (False, 0, "timed out")])
def test_who_comes_last_where_another_has_given_up_does_not_go_on_to_connect_to_it(is_over, seconds, message):
    store = dist.HashStore()
    for over, patience in ((is_over, seconds), (False, 60)):
        with pytest.raises(dist.DistError, match=message):
            wait_for_all(store, 2, timedelta(seconds=patience), lambda over=over: over)


def test_in_a_group_that_connected_while_a_rank_was_found_lost_nobody_waits(monkeypatch):
    groups = ProcessGroups(Topology(store=dist.HashStore()), "late")

    class FoundMeanwhile(dist.ProcessGroupGloo):
        def __init__(self, *given: object) -> None:
            groups.abort_waits()
            super().__init__(*given)

    monkeypatch.setattr(dist, "ProcessGroupGloo", FoundMeanwhile)
    with pytest.raises(dist.DistError, match="another rank has failed"):
        groups.open_gloo_group("world", 0, 1)
    groups.close()
