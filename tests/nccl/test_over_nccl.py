"""Pipelines over emulated NCCL (emulated_nccl.py): no hang, the bits of one process, every fault told."""

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import emulated_nccl
import lagging_device
import pytest
import torch
import torch.distributed as dist
from emulated_nccl import MODES, install
from models import toy
from reference import OneProcess, accumulate, assert_as_one_process, data, make, stepped
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock.comms import backends, topology
from penstock.comms.topology import Topology
from penstock.comms.transport import channels
from penstock.comms.transport.channels import Channels, opening_order
from penstock.launcher import rank_processes

# Where a host that runs ahead waits, on the last stage's rank: at the end of a step, and behind the first one of a pipeline.
FOR_THE_LOSS = {"batch/pieces.py scalars_to_floats", "guards/loss_check.py _describe_mismatch"}
DEPTH = 15  # layers enough for 8 ranks with 2 stages each

# ---- which backend, and in which order lines are opened -------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "backend"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], "nccl"),
        (["GPU-a"], "nccl"),
        (["GPU-a", "GPU-b", "GPU-a"], "gloo"),  # NCCL refuses two ranks on one GPU
        (["GPU-a", backends.NO_GPU], "gloo"),
    ],
)
def test_nccl_carries_where_every_rank_has_a_gpu_of_its_own(message, backend):
    assert backends.choose_backend(message) == backend


def rank_of_gpus(message):
    """On which backend ranks agree that see the GPUs `told`, each as the only one of its process."""
    chosen, init = [], dist.init_process_group
    backends.gpu_uuid = lambda device: message[int(os.environ["RANK"])]
    dist.init_process_group = lambda carriers, **how: (chosen.append(carriers), init("gloo", **how))
    return ps.comms.init_distributed(device="cpu").backend, chosen


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("message", "backend"), [(["GPU-a", "GPU-b"], "nccl"), (["GPU-a", "GPU-a"], "gloo"), (["GPU-a", "none"], "gloo")]
)
def test_all_ranks_choose_the_same_backend_by_what_they_tell_each_other(message, backend):
    carriers = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}[backend]
    assert ps.launch(rank_of_gpus, 2, message) == [(backend, [carriers])] * 2


@pytest.mark.parametrize("message", [None, "2"])
def test_a_rank_on_a_gpu_knows_it_by_its_uuid_and_settles_nccl_where_the_user_has_not(message, monkeypatch):
    for name in backends.NCCL_DEFAULTS:
        monkeypatch.delenv(name, raising=False) if message is None else monkeypatch.setenv(name, message)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    driver = {
        "is_available": True,
        "device_count": 2,
        "set_device": None,
        "get_device_properties": SimpleNamespace(uuid="GPU-a"),
    }
    for name, answer in driver.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    joined = topology._connect_to_ranks(None, None, None)
    assert (joined.backend, joined.device, backends.gpu_uuid(joined.device)) == ("nccl", torch.device("cuda", 0), "GPU-a")
    assert {name: os.environ[name] for name in backends.NCCL_DEFAULTS} == {
        name: message or value for name, value in backends.NCCL_DEFAULTS.items()
    }


@pytest.mark.parametrize(
    ("available", "asked", "words"),
    [
        (False, ("nccl", None), "this torch comes without NCCL: use 'gloo'"),
        (True, ("nccl", None), "NCCL carries tensors between GPUs, but this rank's device is cpu: use 'gloo'"),
        (True, ("nccl", "cpu"), "NCCL carries tensors between GPUs, but this rank's device is cpu: use 'gloo'"),
        (True, (None, "cuda"), "device 'cuda' was asked for, but torch finds no GPU here: use device='cpu'"),
        (True, ("mpi", None), "backend 'mpi' is not known: use 'gloo'"),
    ],
)
def test_what_this_machine_does_not_have_is_refused_in_a_sentence(available, asked, words, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend, device = asked
    with pytest.raises(ps.PenstockError, match=words):
        topology._connect_to_ranks(backend, None, device)


def test_what_is_told_to_nccl_is_on_its_page():
    page = (Path(__file__).parents[2] / "docs/howto/gpu.md").read_text()
    for name, value in backends.NCCL_DEFAULTS.items():
        assert f"| `{name}` | `{value}` |" in page


def rounds_of(channels):
    """When each is opened at the earliest, if every rank opens its own in this order."""
    free, begins = dict[int, int](), {}
    for source, destination in channels:
        begins[source, destination] = turn = max(free.get(source, 0), free.get(destination, 0))
        free[source] = free[destination] = turn + 1
    return max(begins.values()) + 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
def test_lines_along_a_pipeline_are_opened_in_four_turns_however_long_it_is(ranks):
    neighbours = [*pairwise(range(ranks)), *((after, before) for before, after in pairwise(range(ranks)))]
    assert sorted(opening_order(neighbours)) == sorted(neighbours)
    assert rounds_of(opening_order(neighbours)) == (2 if ranks == 2 else 4)
    if ranks > 8:
        assert rounds_of(sorted(neighbours)) > ranks  # one after the other


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_opens_its_lines_in_these_rounds(rank, monkeypatch):
    opened = []
    for end in ("open_sender", "open_receiver"):
        monkeypatch.setattr(channels, end, lambda groups, name, *_: opened.append(name))
    nothing = SimpleNamespace(wait=lambda: None)
    joined, everyone = Topology(rank, 4), SimpleNamespace(barrier=lambda: nothing)
    program = SimpleNamespace(links=[(a, b) for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4])
    Channels(program.links, joined, SimpleNamespace(topology=joined, world_group=everyone, channels_count=count()))
    assert opened == [f"0/{a}-{b}" for a, b in opening_order(program.links) if rank in (a, b)]


# ---- schedules ------------------------------------------------------------------------------------------------------


def rank_schedules(mode, kind, microbatches, names):
    """Two steps with each schedule, without an optimizer between."""
    install(mode)
    model, loss_fn = make(kind, depth=DEPTH)
    results = {}
    for name in names:
        pipe = ps.Pipeline(model, loss_fn, name, microbatches, seed=None)
        lagging_device.waits.clear()
        numbers = stepped(pipe, batches(kind, microbatches))
        results[name] = numbers, list(lagging_device.waits)
        model.zero_grad()
    return results


def batches(kind, microbatches):
    return [data(kind, 2 * microbatches + 1, seed) for seed in (3, 4)]


def assert_bits_of_one_process(mode, ranks, kind, microbatches, names):
    everyone = ps.launch(rank_schedules, ranks, mode, kind, microbatches, names)
    expected = stepped(OneProcess(*make(kind, depth=DEPTH), None, microbatches), batches(kind, microbatches))
    for name in names:
        assert_as_one_process([rank[name][0] for rank in everyone], expected)
        for rank in everyone:
            assert {place.partition(":")[0] for place in rank[name][1]} <= FOR_THE_LOSS, name


@pytest.mark.ranks
def test_interleaved_zb_whose_ranks_all_send_first_does_not_wait_on_the_host_for_ever():
    assert_bits_of_one_process("lazy", 4, "mlp", 8, ["interleaved-zb", "1f1b"])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_host_that_runs_ahead_of_its_device_has_the_bits_of_one_process_and_waits_for_the_loss_alone():
    assert_bits_of_one_process("ahead", 2, "gpt", 3, ["1f1b", "zb-v"])


TABLES = {  # kinds of models and M, by the number of ranks
    2: [("mlp", 1), ("mlp", 2), ("mlp", 5), ("gpt", 3), ("mixed", 3)],
    3: [("mlp", 3), ("mlp", 7), ("gpt", 4), ("mixed", 4)],
    4: [("mlp", 1), ("mlp", 4), ("mlp", 9)],
    8: [("mlp", 9)],
}


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [*((2, mode) for mode in MODES), (3, "eager"), (3, "ahead"), (4, "lazy"), (4, "ahead"), (8, "lazy")],
)
def test_every_schedule_has_the_bits_of_one_process(ranks, mode):
    for kind, microbatches in TABLES[ranks]:
        assert_bits_of_one_process(mode, ranks, kind, microbatches, ps.schedule.names())


def rank_replicas(way):
    """Steps of two pipelines, without and with autocast, and clipped gradients: where the host waited in each."""
    install("ahead")
    model, loss_fn = make("gpt", dropout=0.1)
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(model, loss_fn, "zb-h1", 4, mesh=mesh, data_parallel=way)
    found = []
    for casts in (False, True, True):
        inputs, target = (batch.chunk(2)[pipe.position.replica] for batch in data("gpt", 8))
        lagging_device.waits.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = pipe.step(inputs, target=target)
        found.append({place.partition(":")[0] for place in lagging_device.waits})
    lagging_device.waits.clear()
    norm = pipe.clip_grad_norm_(1.0)
    return found, lagging_device.waits, loss.isfinite().item() and norm.isfinite().item()


@pytest.mark.nccl
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_hosts_of_replicas_that_run_ahead_wait_for_the_loss_alone_and_once_to_clip(way):
    for found, clipping, finite in ps.launch(rank_replicas, 4, way):
        assert set().union(*found) <= FOR_THE_LOSS
        assert [place.partition(":")[0] for place in clipping] == ["stage/rank_parameters.py _copy_scalars"]
        assert finite


# ---- what travels ---------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.int8, torch.bool, torch.complex64,
]  # fmt: skip


def casting():
    def cast(self, hidden):
        """Passes what it gets on in many dtypes, one of them not contiguous."""
        hidden = self.layer(hidden)
        return hidden.view(-1, 2, 2).transpose(1, 2), [hidden.detach().to(dtype) for dtype in DTYPES]

    def gather(self, values):
        hidden, others = values
        return hidden.transpose(1, 2).flatten(1) + sum(result.real.float() for result in others)

    torch.manual_seed(1)
    return (
        nn.Sequential(toy(cast, layer=nn.Linear(4, 4)), toy(gather)),
        nn.functional.mse_loss,
        (torch.randn(4, 4), torch.randn(4, 4)),
    )


def rank_travels():
    """What `send_tensor` and messages of many dtypes come to, and which groups were closed at the end."""
    install()
    rank = ps.comms.init_distributed().rank
    arrived = []
    for dtype in DTYPES:
        tensor = torch.arange(6).view(2, 3).to(dtype).t()
        if rank == 0:
            ps.comms.send_tensor(tensor, 1)
        else:
            arrived.append(torch.equal(ps.comms.recv_tensor((3, 2), 0, dtype), tensor))
    model, loss_fn, (inputs, target) = casting()
    pipe, other = (ps.Pipeline(value, loss_fn, "1f1b", 2, cuts=["1"]) for value in (model, casting()[0]))
    numbers = stepped(pipe, [(inputs, target)] * 2)
    other.step(inputs, target=target)
    ps.comms.shutdown()
    return arrived, numbers, list(emulated_nccl.shut_down_groups)


@pytest.mark.ranks
def test_tensors_of_all_dtypes_travel_and_groups_are_closed_in_the_order_they_were_opened_in():
    everyone = ps.launch(rank_travels, 2)
    model, loss_fn, batch = casting()
    assert_as_one_process([numbers for _, numbers, _ in everyone], stepped(OneProcess(model, loss_fn, None, 2), [batch] * 2))
    for arrived, _, closed in everyone:
        assert all(arrived)
        assert len(closed) == 4  # of two pipelines
        assert closed == sorted(closed)


# ---- faults: tests/engine/test_faults.py has more, which `make nccl` runs over NCCL too ------------------------------


class FaultyNcclLayer(nn.Module):
    """Passes its input on, until it is told to fail."""

    fault = late = None
    count = 0

    def forward(self, hidden):
        self.count = self.count + 1 if self.late else 0
        if self.fault == "raises" or self.count == 3:
            raise ValueError("boom")
        if self.fault == "assert":
            raise torch.AcceleratorError(lagging_device.BROKEN)
        if self.fault == "index":
            return hidden + hidden[torch.tensor([9])]  # on a device that lags the host does not see it
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            time.sleep(600)
        return hidden


def faulty():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), FaultyNcclLayer(), nn.Linear(4, 4)), nn.functional.mse_loss


BATCH = torch.ones(4, 4), torch.zeros(4, 4)


def rank_fails(mode, *faults, timeout=600.0):
    """Steps on three ranks, each with a fault on rank 1: what is raised, the loss of the step without."""
    install(mode)
    ps.comms.init_distributed(timeout=timeout)
    model, loss_fn = faulty()
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 4, cuts=["1", "3"])
    inputs, target = BATCH
    results = [pipe.step(inputs, target=target)]
    for fault in faults:
        if pipe.topology.rank == 1:
            model[2].fault = fault
        try:
            results.append(pipe.step(inputs, target=target))
        except ps.PenstockError as error:
            results.append((type(error).__name__, str(error)))
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mode", [pytest.param("lazy", marks=pytest.mark.slow), pytest.param("eager", marks=pytest.mark.nccl), "ahead"]
)
def test_an_error_ends_the_step_on_all_ranks_the_next_works_and_a_device_assert_is_a_lost_rank(mode):
    model, loss_fn = faulty()
    loss = accumulate(model, loss_fn, BATCH, 4)
    raised = ("StageError", "rank 1, stage 1, action 1F0, microbatch 0: ValueError: boom")
    broken = "rank 1 has lost its GPU: AcceleratorError: CUDA error: device-side assert triggered"
    for first, boom, second, lost, after in ps.launch(rank_fails, 3, mode, "raises", None, "assert", None):
        assert torch.equal(first, loss)
        assert torch.equal(second, loss)
        assert boom == raised
        assert lost[0] == after[0] == "LostRankError"
        assert lost[1] == broken
        assert after[1].startswith("this pipeline ended when ")


def looking_up():
    """A first stage that fails at its third microbatch, and a second one that looks up what the first one tells."""
    torch.manual_seed(3)
    return nn.Sequential(FaultyNcclLayer(), nn.Embedding(3, 4), nn.Linear(4, 2)), nn.functional.cross_entropy


def rank_looks_up():
    install("ahead")
    model, loss_fn = looking_up()
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 4, cuts=["1"])
    results = []
    for late in (None, "raises", None):
        model[0].late = late
        try:
            results.append(pipe.step(TOKENS, target=TOKENS % 2))
        except ps.PenstockError as error:
            results.append(str(error))
    return results


TOKENS = torch.tensor([2, 0, 1, 2])


@pytest.mark.ranks
def test_what_never_came_is_not_looked_up_by_a_device_that_would_break():
    loss = accumulate(*looking_up(), (TOKENS, TOKENS % 2), 4)
    for first, error, after in ps.launch(rank_looks_up, 2):
        assert error == "rank 0, stage 0, action 0F2, microbatch 2: ValueError: boom"
        assert torch.equal(first, loss)
        assert torch.equal(after, loss)


def rank_loses_another(how):
    """Rank 1 dies, or leaves, while others wait for it, in a step or in other ways."""
    if how in MODES:
        *_, (_, text) = rank_fails(how, "dies")
        raise ps.LostRankError(text)
    install()
    rank = ps.comms.init_distributed().rank
    if rank == 1 and how == "leaves":
        return
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    ps.comms.recv_tensor((2,), 1)


@pytest.mark.ranks
@pytest.mark.parametrize("how", slow_except(["ahead", "leaves"], ["lazy", "ahead", "recv_tensor", "leaves"]))
def test_who_waits_for_a_rank_that_dies_or_leaves_is_told(how, monkeypatch):
    monkeypatch.setattr(
        rank_processes, "ERROR_REPORT_SECONDS", 1000.0
    )  # seconds: the launcher ends no rank that does not end itself
    with pytest.raises(ps.LostRankError, match=r"rank 1 (is gone|was killed by SIGKILL|has finished)"):
        ps.launch(rank_loses_another, 3, how)


@pytest.mark.nccl
def test_a_rank_that_lives_and_does_not_go_on_is_given_up_at_the_timeout():
    with pytest.raises(ps.LostRankError):
        ps.launch(_rank_waits_in_vain, 3)


def _rank_waits_in_vain():
    *_, result = rank_fails("lazy", "hangs", timeout=3.0)
    raise ps.LostRankError(result[1])


# ---- the communicator itself ----------------------------------------------------------------------------------------


def rank_breaks_rules(mode):
    """What arrives where a tensor is used too early, changed too early, or let go too early; what is refused."""
    install(mode)
    joined = ps.comms.init_distributed()
    group = emulated_nccl.EmulatedNccl(dist.PrefixStore("rules", joined.store), joined.rank, 2, timedelta(seconds=60))
    layer, byte = nn.Linear(3, 1), torch.zeros(1)
    (group.send([byte], 1, 0) if joined.rank == 0 else group.recv([byte], 0, 0)).wait()  # connects them
    with (
        lagging_device.ahead(lagging_device.LaggingStream(), [layer]) if mode == "ahead" else nullcontext(),
        torch.no_grad(),
    ):
        if joined.rank == 0:
            changed, gone, kept = (layer.weight[0] * 0 + 1 for _ in range(3))
            works = [group.send([value], 1, 0) for value in (changed, gone, kept)]
            changed.add_(1)
            del gone
            lagging_device.compute_stream().synchronize()
            joined.store.set("told", "")
            works[-1].wait()
            return None
        joined.store.wait(["told"])
        arrived = []
        for _ in range(3):
            buffer = torch.zeros(3)
            work = group.recv([buffer], 0, 0)
            early = buffer.isnan().all().item()
            work.wait()
            arrived.append((early, buffer.tolist()))
    for refused in (torch.ones(2, dtype=torch.int16), torch.ones(2, 3).t()):
        with pytest.raises((TypeError, ValueError)):
            group.send([refused], 0, 0)
    return str(arrived)


@pytest.mark.nccl
@pytest.mark.parametrize("mode", MODES)
def test_what_breaks_nccls_rules_is_seen(mode):
    nan = [float("nan")] * 3
    assert ps.launch(rank_breaks_rules, 2, mode)[1] == str([(True, nan), (True, nan), (True, [1.0] * 3)])
