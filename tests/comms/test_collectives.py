"""Collectives: every operation against its definition, ranks that disagree, groups, a world of one."""

import dataclasses
import mmap
import os
import resource
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patience import within
from torch import Tensor

import penstock as ps
from penstock.comms import point_to_point
from penstock.comms import topology as topology_module
from penstock.comms.collectives import checked_group
from penstock.comms.collectives.call import call_of
from penstock.comms.collectives.call_board import CallBoard
from penstock.comms.health import reports
from penstock.comms.starting import ranks

comms = ps.comms
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
MOVED_ONLY = (torch.int16, torch.bool, torch.complex64, torch.complex128)
OPS = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}


def test_what_is_no_header_of_ours_is_told_and_not_followed(monkeypatch):
    told = "all ranks must make the same calls"
    for index, dimensions, size in ((99, 1, 1), (-1, 1, 1), (0, 99, 1), (0, -1, 1), (0, 1, -1)):
        header = torch.tensor([index, dimensions, *[size] * 14])
        monkeypatch.setattr(point_to_point.dist, "recv", lambda tensor, src, header=header: tensor.copy_(header))
        monkeypatch.setattr(point_to_point, "current_topology", lambda: topology_module.Topology(0, 2))
        with pytest.raises(ps.MismatchError, match=told):
            comms.recv_tensor((1,), 1)


def mine(rank: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Rank's tensor: two rows for each rank, of three numbers; small enough for int8 and exact in bfloat16."""
    return (torch.arange(ranks * 6).view(ranks * 2, 3) % 5 + rank).to(dtype)


def reduced(op: str, everyone: Tensor) -> Tensor:
    return OPS[op](everyone.double(), dim=0).to(everyone.dtype)


def rank_all(way: str) -> int:
    """Every operation, root, op and dtype; returns how many checks there were."""
    if way == "headers":
        checked_group.shared_memory = lambda *_: None
    topology = comms.init_distributed(backend="gloo")
    rank, ranks, done = topology.rank, topology.world_size, 0

    def same(result: Tensor | None, expected: Tensor) -> None:
        nonlocal done
        assert result is not None
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected), (result, expected)
        done += 1

    for dtype in (*DTYPES, *MOVED_ONLY) if way == "table" else (torch.float32, torch.int16):
        everyone = torch.stack([mine(each, ranks, dtype) for each in range(ranks)])  # (ranks, 2 ranks, 3)
        x = everyone[rank]
        rows = slice(2 * rank, 2 * rank + 2)
        for root in range(ranks):
            whole = x.clone()
            assert comms.broadcast(whole, root) is whole
            same(whole, everyone[root])
            same(comms.scatter(torch.empty(2, 3, dtype=dtype), x if rank == root else None, root), everyone[root, rows])
            gathered = comms.gather(x, root)
            if rank == root:
                same(gathered, everyone.flatten(0, 1))
            else:
                assert gathered is None
        same(comms.all_gather(x), everyone.flatten(0, 1))
        same(comms.all_to_all(x), everyone[:, rows].flatten(0, 1))
        for op in OPS if dtype in DTYPES else ():
            expected = reduced(op, everyone)
            whole = x.clone()
            assert comms.all_reduce(whole, op) is whole
            same(whole, expected)
            same(comms.reduce_scatter(x, op), expected[rows])
            for root in range(ranks):
                added = comms.reduce(x.clone(), root, op)
                same(added if rank == root else expected, expected)
            same(comms.all_reduce(x.clone(), op, check=False), expected)
    return done


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "way"), [(2, "table"), (3, "table"), (4, "table"), (3, "headers")])
def test_every_operation_gives_what_its_definition_says(ranks, way):
    counts = ps.launch(rank_all, ranks, way)
    assert min(counts) > (200 if way == "table" else 30)


def test_what_ranks_compare_of_a_call_is_the_same_number_in_every_process():
    assert call_of("all_reduce", (3, 4), torch.float32, None, "sum").digest == 549305048957


def rank_shapes() -> None:
    """Scalars, empty tensors, tensors that lie in memory otherwise, parameters."""
    topology = comms.init_distributed(backend="gloo")
    rank = topology.rank
    assert comms.all_gather(torch.tensor(rank + 1.0)).tolist() == [1, 2, 3]
    assert comms.all_reduce(torch.tensor(rank + 1.0)).tolist() == 6
    assert comms.scatter(torch.tensor(0), torch.tensor([4, 5, 6]) if rank == 0 else None).tolist() == 4 + rank
    gathered = comms.gather(torch.tensor(rank, dtype=torch.int16), root=2)
    assert gathered is None if rank != 2 else gathered.tolist() == [0, 1, 2]
    for turn in range(20):  # nobody waits in them, and yet nobody loses the others
        assert comms.all_reduce(torch.empty(0, 4)).shape == (0, 4)
        assert comms.all_gather(torch.empty(0, 4)).shape == (0, 4)
        assert comms.reduce_scatter(torch.empty(0, 4)).shape == (0, 4)
        assert comms.broadcast(torch.empty(0), turn % 3).shape == (0,)
    grid = torch.arange(12.0).view(3, 4) * (rank + 1)
    across = grid.t()  # (4, 3), not contiguous
    assert torch.equal(comms.all_gather(grid.t()[:3])[:3], torch.arange(12.0).view(3, 4).t()[:3])
    assert torch.equal(comms.all_to_all(grid.t()[:3])[2], torch.arange(12.0).view(3, 4).t()[rank] * 3)
    comms.all_reduce(across)
    assert torch.equal(grid, torch.arange(12.0).view(3, 4) * 6)  # in place means where it lies
    wide = torch.zeros(3, 4)
    comms.scatter(wide[:, 1], torch.arange(9.0) if rank == 0 else None)
    assert wide[:, 1].tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    assert wide[:, [0, 2, 3]].count_nonzero() == 0
    out = torch.empty(3, 2, dtype=torch.float64).t()  # not contiguous either
    assert comms.all_to_all(torch.ones(3, 2).double(), out=torch.empty(3, 2).double()).sum() == 6
    assert comms.reduce_scatter(torch.ones(6, 3).double(), out=out) is out
    assert out.tolist() == [[3, 3, 3], [3, 3, 3]]
    waves = torch.zeros(2, 2, dtype=torch.complex64)
    comms.scatter(waves[:, 1], torch.arange(6) + 1j if rank == 0 else None)
    assert waves[:, 1].tolist() == [2 * rank + 1j, 2 * rank + 1 + 1j]
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert comms.broadcast(weight, 1) is weight
    assert weight.requires_grad
    assert weight.tolist() == [1, 1]


@pytest.mark.ranks
def test_scalars_empty_and_non_contiguous_tensors_and_parameters_work():
    ps.launch(rank_shapes, 3)


def rank_groups() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    topology = comms.init_distributed(backend="gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = mesh.get_group("tp"), mesh.get_group("dp")  # ranks 01, 23 and 02, 13
    number = torch.tensor([2.0**topology.rank])
    sums = [comms.all_reduce(number.clone(), group=group).item() for group in (rows, columns, None, dist.group.WORLD)]
    sums.append(comms.broadcast(number.clone(), root=1, group=columns).item())
    first = dist.new_group([0, 2, 3])
    if topology.rank == 1:
        with pytest.raises(ps.PenstockError, match="rank 1 is not in this group"):
            comms.all_reduce(number, group=first)
    else:
        assert comms.all_reduce(number.clone(), group=first).item() == 13
        with pytest.raises(ps.PenstockError, match="root 3 is not in this group of 3: its ranks are 0 to 2"):
            comms.broadcast(number, root=3, group=first)
        with pytest.raises(ps.MismatchError, match=r"ranks 0, 2 called .*\(1,\).*; rank 3 called .*\(2,\)"):
            comms.all_gather(number if topology.rank < 3 else number.repeat(2), group=first)
    return sums


@pytest.mark.ranks
def test_a_group_is_ranks_of_a_mesh_and_root_counts_in_it():
    assert ps.launch(rank_groups, 4) == [[3, 5, 15, 15, 4], [3, 10, 15, 15, 8], [12, 5, 15, 15, 4], [12, 10, 15, 15, 8]]


def told(call) -> tuple[str, str]:
    begin = time.monotonic()
    with pytest.raises(ps.PenstockError) as caught:
        call()
    assert within(time.monotonic() - begin, 3)
    return type(caught.value).__name__, str(caught.value)


def rank_disagrees(way: str) -> list[tuple[str, str]]:
    """Rank 1 comes late and with something else."""
    if way == "headers":
        checked_group.shared_memory = lambda *_: None
    rank = comms.init_distributed(backend="gloo").rank
    odd, large = rank == 1, 1 << 20
    x = torch.ones(3)
    calls = [
        lambda group: comms.all_reduce(torch.ones(4) if odd else x, group=group),
        lambda group: comms.all_reduce(torch.ones(large) if odd else x, group=group),  # a longer message would end a process
        lambda group: comms.all_reduce(x if odd else torch.ones(large), group=group),
        lambda group: comms.broadcast(x.int() if odd else x, root=2, group=group),  # rank 0 could be done
        lambda group: comms.broadcast(x, root=1 if odd else 0, group=group),
        lambda group: comms.gather(torch.ones(5) if odd else x, group=group),
        lambda group: comms.scatter(
            torch.empty(2) if odd else torch.empty(1), torch.ones(3) if rank == 0 else None, group=group
        ),
        lambda group: comms.reduce(x, op="max" if odd else "sum", group=group),
        lambda group: comms.all_gather(x, group=group) if odd else comms.all_to_all(x, group=group),
        lambda group: comms.reduce_scatter(torch.ones(3, 2) if odd else torch.ones(6), group=group),
    ]
    errors = []
    for number, call in enumerate(calls):
        group = dist.new_group([0, 1, 2])
        assert comms.all_reduce(torch.tensor([rank + 1.0]), group=group).item() == 6
        if odd and number % 2:
            time.sleep(0.05)
        errors.append(told(lambda: in_this_or_the_next(call, group)))  # noqa: B023
        assert told(lambda: comms.all_reduce(x, group=group)) == (errors[-1][0], f"this group has ended: {errors[-1][1]}")  # noqa: B023
        assert comms.all_reduce(torch.tensor([rank + 1.0])).item() == 6  # other groups go on
    return errors


def in_this_or_the_next(call, group) -> None:
    """A rank that was done before the others knew is told at its next call."""
    call(group)
    comms.all_reduce(torch.ones(1), group=group)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["table", "headers"])
def test_ranks_that_disagree_all_raise_the_same_error_and_the_group_has_ended(way):
    first, *others = ps.launch(rank_disagrees, 3, way)
    assert others == [first, first]
    assert {kind for kind, _ in first} == {"MismatchError"}
    assert first[0][1] == (
        "the ranks are in different calls: ranks 0, 2 called all_reduce of a (3,) float32 tensor, op sum; "
        "rank 1 called all_reduce of a (4,) float32 tensor, op sum"
    )
    assert first[4][1] == (
        "the ranks are in different calls: ranks 0, 2 called broadcast of a (3,) float32 tensor, root 0; "
        "rank 1 called broadcast of a (3,) float32 tensor, root 1"
    )


def rank_alone_at_fault() -> None:
    """What one rank can see is refused before anything is sent."""
    x = torch.ones(4)
    rank, ranks = comms.init_distributed(backend="gloo").rank, comms.init_distributed().world_size
    faults = [
        (
            lambda: comms.broadcast(x, root=ranks),
            f"root {ranks} is not in this group of {ranks}: its ranks are 0 to {ranks - 1}",
        ),
        (lambda: comms.broadcast(x, root=-1), "root -1 is not in this group"),
        (lambda: comms.all_reduce(x, op="mean"), "all_reduce knows no op 'mean': use sum, product, min, max"),
        (lambda: comms.all_reduce(x > 0), "all_reduce cannot take the sum of torch.bool: convert it first, as with .float()"),
        (lambda: comms.all_gather(x.to(torch.float8_e4m3fn)), "cannot carry a tensor of 1 dimensions and torch.float8_e4m3fn"),
        (lambda: comms.all_gather(torch.ones([1] * 15)), "cannot carry a tensor of 15 dimensions"),
        (lambda: comms.scatter(x, root=rank), f"rank {rank} is the root of this scatter: give it rows of shape ({4 * ranks},)"),
        (lambda: comms.scatter(x, torch.ones(5), rank), f"needs rows of shape ({4 * ranks},): these are (5,) torch.float32"),
    ]
    short = torch.empty(3)
    faults.append((lambda: comms.all_gather(x, out=short), f"out is (3,) torch.float32, but the result is ({4 * ranks},)"))
    if ranks > 1:
        faults += [
            (lambda: comms.reduce_scatter(torch.ones(ranks + 1, 2)), f"{ranks + 1} rows do not divide into pieces for {ranks}"),
            (lambda: comms.all_to_all(torch.tensor(1.0)), "a scalar does not divide into pieces"),
        ]
    for call, text in faults:
        kind, message = told(call)
        assert kind in ("PenstockError", "MismatchError")
        assert text in message, message
    assert comms.all_reduce(x.clone()).tolist() == [ranks] * 4


@pytest.mark.ranks
def test_what_one_rank_can_see_is_refused_with_numbers():
    ps.launch(rank_alone_at_fault, 2)
    ps.launch(rank_alone_at_fault, 1)


def rank_alone() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert comms.broadcast(x) is comms.reduce(x) is comms.all_reduce(x) is x
    for copy in (comms.gather(x), comms.all_gather(x), comms.reduce_scatter(x), comms.all_to_all(x.t().contiguous().t())):
        assert torch.equal(copy, x)
        assert copy.data_ptr() != x.data_ptr()
    assert torch.equal(comms.scatter(torch.empty(2, 3), x), x)
    assert comms.all_gather(torch.tensor(7)).tolist() == [7]


@pytest.mark.ranks
def test_a_world_of_one_needs_no_process_group():
    rank_alone()
    ps.launch(rank_alone, 1)


def rank_lost(how: str) -> tuple[str, str]:
    reports.GRACE = 0.2
    topology = comms.init_distributed(backend="gloo")
    topology_module._current = dataclasses.replace(topology, timeout=timedelta(seconds=30 if how == "dies" else 1))
    rank = topology.rank
    comms.all_reduce(torch.ones(1))
    if rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
    error = told(lambda: comms.all_reduce(torch.ones(2)))
    assert told(lambda: comms.all_reduce(torch.ones(2)))[0] == "LostRankError"  # and so from now on
    if rank == 0 and how == "dies":
        raise ps.LostRankError(error[1])
    return error


@pytest.mark.ranks
@pytest.mark.timed
def test_a_lost_rank_is_an_error_on_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "LAST_WORDS", 60.0)  # however busy the machine is, rank 0 is heard
    with pytest.raises(ps.LostRankError, match=r"rank [02] waited in all_reduce of a \(2,\) float32 tensor, op sum: .*"):
        ps.launch(rank_lost, 3, "dies")
    errors = ps.launch(rank_lost, 3, "is silent")
    assert {kind for kind, _ in errors} == {"LostRankError"}
    assert "no answer within 1 s" in errors[0][1]


def boards(size: int) -> list[CallBoard]:
    """As its ranks have them, in one process."""
    memory = mmap.mmap(-1, CallBoard.bytes(size))
    return [CallBoard(memory, rank, size) for rank in range(size)]


def test_who_is_in_the_next_call_already_tells_of_the_one_in_which_ranks_differ_or_do_not_come():
    first, same, odd = boards(3)
    assert [each.arrive(1, 60) for each in (first, same, odd)] == [True] * 3
    assert [each.arrive(digest, 60) for each, digest in ((first, 2), (same, 2), (odd, 3))] == [True, True, False]
    assert not first.arrive(4, 60)  # before the odd one has closed anything
    assert first.differ
    assert first.close(first.count) == 2
    first, same, silent = boards(3)
    assert [each.arrive(1, 60) for each in (first, same, silent)] == [True] * 3
    assert [each.arrive(2, 60) for each in (first, same)] == [True] * 2
    with pytest.raises(RuntimeError, match="timed out"):
        first.arrive(4, 0.01)
    assert not first.differ
    assert first.close(first.count) == 2


def rank_silent(way: str, where: str) -> tuple[str, str]:
    """Rank 2 stands still, before a call or in it; rank 0 has done its part of that, and is in another."""
    if way == "headers":
        checked_group.shared_memory = lambda *_: None
    topology = comms.init_distributed(backend="gloo")
    topology_module._current = dataclasses.replace(topology, timeout=timedelta(seconds=1))
    comms.all_reduce(torch.ones(1))
    if topology.rank == 2 and where == "before":
        time.sleep(3)
    elif topology.rank == 2:
        compare = checked_group.CheckedGroup._compare
        checked_group.CheckedGroup._compare = lambda self, call: (compare(self, call), time.sleep(3))[0]
    with pytest.raises(ps.PenstockError) as caught:
        comms.gather(torch.ones(1), root=1), comms.all_reduce(torch.ones(2))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.ranks
@pytest.mark.timed
@pytest.mark.parametrize(("way", "where"), [("table", "before"), ("table", "in"), ("headers", "in")])
def test_ranks_of_which_one_was_done_before_another_fell_silent_are_in_no_different_calls(way, where):
    first, second, late = ps.launch(rank_silent, 3, way, where)
    assert {kind for kind, _ in (first, second, late)} == {"LostRankError"}
    assert first[1].startswith("rank 2 does not answer: rank ")
    assert second == first


def rank_without_descriptors() -> str:
    """Rank 1 has none for another group."""
    rank, held = comms.init_distributed(backend="gloo").rank, []
    for _ in range(6):
        group = dist.new_group([0, 1, 2])
        assert comms.all_reduce(torch.ones(1), group=group).item() == 3
        dist.destroy_process_group(group)
        del group
        held.append(len(os.listdir("/proc/self/fd")))
    assert held[-1] < held[1] + 6, held  # a group that has ended holds nothing; the heartbeat looks into files now and then
    group = dist.new_group([0, 1, 2])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    kind, error = told(lambda: comms.all_reduce(torch.ones(2), group=group))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert comms.all_reduce(torch.ones(1)).item() == 3  # other groups go on
    return f"{kind}: {error}"


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux tells what a process holds")
def test_what_one_ranks_system_refuses_is_the_same_error_on_all():
    (error,) = set(ps.launch(rank_without_descriptors, 3))
    assert error.startswith(
        "ResourceError: rank 1 could not connect for the all_reduce of a (2,) float32 tensor, op sum: no file"
    )


def rank_policies() -> tuple[int, set[int]]:
    """How the system schedules this thread, and the others of this process, once the ranks are connected."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    comms.init_distributed(backend="gloo")
    return os.sched_getscheduler(0), {os.sched_getscheduler(int(number)) for number in os.listdir("/proc/self/task")}


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux tells how a thread is scheduled")
def test_what_waits_for_messages_does_not_preempt_what_computes() -> None:
    for this, policies in ps.launch(rank_policies, 2):
        assert this == os.SCHED_OTHER
        assert os.SCHED_BATCH in policies
