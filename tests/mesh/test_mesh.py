"""Pipelines side by side: every axis of the mesh, against one process that runs the whole batch."""

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from error_text import error_text
from models import MLPBlock, has_auxiliary_loss, has_unused, toy
from reference import OneProcess, accumulate, assert_same
from runners import cases_on_ranks, on_ranks
from slow_cases import group_of, slow_except
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock import checkpoint
from penstock.guards.tensor_snapshot import TensorSnapshot
from penstock.launcher import rank_processes
from penstock.mesh.fsdp import FSDPHooks
from penstock.stage.dtensor import gather_full_tensor

pytestmark = pytest.mark.ranks

Shape = tuple[int, int, int]  # pp, dp, tp
ROWS, WIDTH = 13, 8
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")
SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
WAYS = ("ddp", "fsdp")
MESHES = {"pp2 dp2": (2, 2, 1), "pp2 tp2": (2, 1, 2), "dp2 tp2": (1, 2, 2), "pp2 dp2 tp2": (2, 2, 2)}
RUNS = {  # schedule and way on each mesh, to the number of steps
    "pp2 dp2": {(schedule, way): 2 for schedule in SCHEDULES for way in WAYS},
    "pp2 tp2": {(schedule, "ddp"): 2 for schedule in SCHEDULES},
    "dp2 tp2": {("1f1b", "ddp"): 2, ("zb-v", "ddp"): 10, ("zb-v", "fsdp"): 10},
    "pp2 dp2 tp2": {("interleaved-1f1b", "ddp"): 2, ("zb-v", "ddp"): 10, ("zb-v", "fsdp"): 10},
}


def model(depth: int = 4, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), *[MLPBlock(WIDTH, dropout) for _ in range(depth)], nn.Linear(WIDTH, 3)).double()


def plan(tp: int) -> dict[str, Any] | None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()} if tp > 1 else None


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator).double(), torch.randn(rows, 3, generator=generator).double()


def share(pipe: Any, tensors: tuple[Tensor, Tensor], sizes: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """This replica's rows: of `sizes`, or as equal as can be."""
    if isinstance(pipe, OneProcess):
        return tensors
    position = pipe.position
    inputs, target = (tensor.split(sizes) if sizes else tensor.tensor_split(position.replicas) for tensor in tensors)
    return inputs[position.replica], target[position.replica]


def gradients(pipe: Any) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else gather_full_tensor(p.grad).clone() for name, p in pipe.named_parameters()}


def built(
    shape: Shape | None, whole: nn.Module, schedule: str = "1f1b", pieces: int = 4, loss: Any = loss_fn, **options: Any
) -> Any:
    """A pipeline in a mesh, or where there is none one process with the whole batch."""
    if shape is None:
        return OneProcess(whole, loss)
    mesh = ps.comms.init_mesh(*shape)
    return ps.Pipeline(whole, loss, schedule, pieces, mesh=mesh, tensor_parallel=plan(shape[2]), **options)


def close(ours: Any, theirs: Any) -> None:
    """What a rank has is what one process has, but for the order of sums."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            close(value, theirs[name])
    elif isinstance(ours, list | tuple):
        for pair in zip(ours, theirs, strict=True):
            close(*pair)
    else:
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours - theirs).abs().max() < 1e-12, (ours - theirs).abs().max()


BLOCKS = 2  # enough for four stages, with the layers before and after
Record = list[tuple[Tensor, Tensor, dict[str, Tensor | None]]]  # of each step: loss, norm, gradients


def trained(shape: Shape | None, runs: dict[tuple[str, str], int]) -> dict[tuple[str, str], Record]:
    records = {}
    for (schedule, way), steps in runs.items():
        pipe = built(shape, model(BLOCKS), schedule, data_parallel=way)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        record: Record = []
        for step in range(steps):
            inputs, target = share(pipe, batch(step))
            loss = pipe.step(inputs, target=target)
            norm = pipe.clip_grad_norm_(0.5)
            record.append((loss, norm, gradients(pipe)))
            optimizer.step()
            optimizer.zero_grad()
        records[schedule, way] = record
    return records


@pytest.mark.parametrize("name", slow_except(("pp2 dp2", "pp2 tp2"), MESHES))
def test_it_has_the_gradients_of_one_process(name: str) -> None:
    shape, runs = MESHES[name], RUNS[name]
    everyone = on_ranks(trained, shape[0] * shape[1] * shape[2], shape, runs)
    [expected] = trained(None, {("", ""): max(runs.values())}).values()
    for run, steps in runs.items():
        for records in everyone:
            close(records[run], expected[:steps])
        for step in range(steps):
            assert {name for records in everyone for name in records[run][step][2]} == expected[step][2].keys()


def replicas(
    schedule: str, way: str, pieces: int, rows: int, dropout: float, steps: int, shape: Shape = (2, 2, 1)
) -> tuple[list[Tensor], dict]:
    pipe = built(shape, model(dropout=dropout), schedule, pieces, data_parallel=way)
    losses = []
    for step in range(steps):
        inputs, target = share(pipe, batch(step, rows))
        losses.append(pipe.step(inputs, target=target))
    return losses, gradients(pipe)


ONE_MICROBATCH_EACH = tuple(("1f1b", way, 1, 6, 0.0, 1) for way in WAYS)
REPLICAS = (
    *(("zb-h1", way, 2, 8, 0.5, 2) for way in WAYS),
    *((schedule, "ddp", 4, ROWS, 0.0, 3) for schedule in SPLIT),
)
QUICK_REPLICAS = tuple(case for case in REPLICAS if case[0] == "zb-v" or case[4])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_where_sums_have_the_same_order_the_bits_are_the_same(way: str) -> None:
    """Two replicas with a microbatch each add what one process adds with two microbatches."""
    everyone = cases_on_ranks(replicas, 4, ONE_MICROBATCH_EACH)["1f1b", way, 1, 6, 0.0, 1]
    whole = model()
    loss = accumulate(whole, loss_fn, batch(0, 6), 2)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for losses, ours in everyone:
        assert torch.equal(losses[0], loss)
        assert_same(ours, {name: expected[name] for name in ours})


@pytest.mark.parametrize("way", WAYS)
def test_replicas_draw_random_numbers_as_if_their_microbatches_were_of_one_pipeline(way: str) -> None:
    [expected] = on_ranks(replicas, 1, "1f1b", way, 4, 8, 0.5, 2, (1, 1, 1))
    for ours in cases_on_ranks(replicas, 4, QUICK_REPLICAS)["zb-h1", way, 2, 8, 0.5, 2]:
        close(ours, expected)


@pytest.mark.parametrize("schedule", slow_except(["zb-v"], SPLIT))
def test_with_split_backwards_replicas_stay_equal_to_the_bit(schedule: str) -> None:
    case = schedule, "ddp", 4, ROWS, 0.0, 3
    everyone = cases_on_ranks(replicas, 4, group_of(case, QUICK_REPLICAS, REPLICAS))[case]
    for first, second in ((0, 1), (2, 3)):  # ranks 0 and 1 are replicas, as 2 and 3 are
        assert everyone[first][1]
        assert_same(everyone[first][1], everyone[second][1])


# -- what is not alike on all replicas ----------------------------------------------------------------------------------


UNEVEN = {  # rows of the replicas, targets that count nothing
    "fewer microbatches": ([11, 2], slice(0)),
    "some count nothing": ([8, 5], slice(4, 6)),
    "one replica counts nothing": ([8, 5], slice(8, 13)),
}


def uneven(way: Any, case: str, shape: Shape | None = (2, 2, 1)) -> tuple[list[Tensor], dict]:
    sizes, ignored = UNEVEN[case]
    options = {"data_parallel": way, "loss_weight": lambda target: (~target.isnan()).sum()}
    pipe = built(shape, model(), "interleaved-zb", 4, masked_loss, **options)
    losses = []
    for step in range(2):
        inputs, target = batch(step)
        target[ignored] = torch.nan
        inputs, target = share(pipe, (inputs, target), sizes)
        losses.append(pipe.step(inputs, target=target))
    return losses, gradients(pipe)


def may_be_unused(module: nn.Module, mesh: Any, views: bool = False) -> nn.Module:
    group = mesh.get_group()
    return DistributedDataParallel(module, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=views)


def masked_loss(output: Tensor, target: Tensor) -> Tensor:
    counts = ~target.isnan()
    return ((output - target.nan_to_num()).square() * counts).sum() / counts.sum()


UNEVEN_WAYS = tuple(product((*WAYS, may_be_unused), UNEVEN))
QUICK_UNEVEN = tuple(zip((*WAYS, may_be_unused), UNEVEN, strict=True))


@pytest.mark.parametrize(("way", "case"), slow_except(QUICK_UNEVEN, UNEVEN_WAYS))
def test_replicas_may_have_fewer_rows_microbatches_or_targets_than_others(way: Any, case: str) -> None:
    group = group_of((way, case), QUICK_UNEVEN, UNEVEN_WAYS)
    for ours in cases_on_ranks(uneven, 4, group)[way, case]:
        close(ours, uneven(None, case, None))


def nothing_counts(way: str) -> tuple[Tensor, dict]:
    pipe = ps.Pipeline(model(), loss_fn, "1f1b", 2, loss_weight=lambda _: 0, mesh=ps.comms.init_mesh(2, 2), data_parallel=way)
    inputs, target = share(pipe, batch(0))
    return pipe.step(inputs, target=target), gradients(pipe)


@pytest.mark.parametrize("way", WAYS)
def test_where_nothing_counts_there_are_no_gradients(way: str) -> None:
    for loss, ours in cases_on_ranks(nothing_counts, 4, (("ddp",), ("fsdp",)))[way,]:
        assert loss == 0
        assert set(ours.values()) == {None}


def unused_output(way: str, seed: int | None, recompute: Any) -> tuple[dict, list[str]]:
    """Of stages on one rank with an output that no stage uses: gradients, and later calls of a hook of a stage."""
    table = ps.schedule.from_rows("in turn", [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]], "loop")
    torch.manual_seed(0)
    two_outputs = toy(lambda self, x: (self.used(x), self.unused(x)), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    first_of_two = toy(lambda self, used, unused: self.head(used), head=nn.Linear(4, 4))
    stages, options = [two_outputs, first_of_two], {"seed": seed, "recompute": recompute}
    pipe = ps.Pipeline(stages, loss_fn, table, mesh=ps.comms.init_mesh(1, 2), data_parallel=way, **options)
    inputs, _ = share(pipe, (torch.linspace(-1, 1, 32).view(8, 4),) * 2)
    pipe.step(inputs, target=inputs)
    ours, calls = gradients(pipe), list[str]()
    pipe.stages[1].register_forward_hook(lambda module, args, output: calls.append("hook"))
    pipe.step(inputs, target=inputs)
    return ours, calls


UNUSED_OUTPUT = tuple(product(WAYS, (0, None), (None, "block")))
QUICK_UNUSED = tuple(case for case in UNUSED_OUTPUT if (case[1] is None) == (case[2] is None))


@pytest.mark.parametrize(("way", "seed", "recompute"), slow_except(QUICK_UNUSED, UNUSED_OUTPUT))
def test_what_makes_an_output_that_no_stage_uses_has_no_gradient(way: str, seed: int | None, recompute: Any) -> None:
    case = way, seed, recompute
    for ours, calls in cases_on_ranks(unused_output, 2, group_of(case, QUICK_UNUSED, UNUSED_OUTPUT))[case]:
        assert {name for name, gradient in ours.items() if gradient is None} == {"unused.weight", "unused.bias"}
        assert calls == ["hook", "hook"]


# -- everyday use -------------------------------------------------------------------------------------------------------


def everyday(way: str, option: str, value: Any, shape: Shape | None = (2, 2, 1)) -> dict[str, Any]:
    """Two steps before the optimizer, an `eval` in between, and the first layer frozen from the third step on."""
    pipe = built(shape, model(), "zb-v", data_parallel=way, **{option: value})
    for step in range(2):
        inputs, target = share(pipe, batch(step))
        pipe.step(inputs, target=target)
        before = gradients(pipe)
        outputs, _ = pipe.eval(inputs, target=target)
        assert_same(before, gradients(pipe))
        assert (outputs is None) == (shape is not None and pipe.topology.rank != pipe.last_rank)
        assert outputs is None or len(outputs) == len(inputs)
    twice = gradients(pipe)
    for name, parameter in pipe.named_parameters():
        parameter.grad = None
        if name.startswith("0."):
            parameter.requires_grad_(False)
    inputs, target = share(pipe, batch(2))
    pipe.step(inputs, target=target)
    return {"twice": twice, "frozen": gradients(pipe)}


def everyday_alone() -> dict[str, Any]:
    return everyday("", "recompute", None, None)


OPTIONS = (("recompute", None), ("recompute", "stage"), ("recompute", "block"))
EVERYDAYS = tuple((way, *option) for way, option in product(WAYS, OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYDAYS, ids=str)
def test_steps_add_up_eval_changes_nothing_and_layers_can_be_frozen(case: tuple[str, str, Any]) -> None:
    for ours in cases_on_ranks(everyday, 4, EVERYDAYS)[case]:
        close(ours, everyday_alone())


def everyday_freed_early() -> dict[str, Any]:
    """`everyday` where another thread has freed a sharded stage's parameters before a check that follows its last backward."""
    begin, compare, averagings = FSDPHooks.after_last_backward, TensorSnapshot.has_other_values, list[Any]()

    def begin_and_note(hooks: FSDPHooks) -> None:
        begin(hooks)
        averagings.extend([hooks._averaging] if hooks._averaging is not None else [])

    def wait_and_compare(snapshot: TensorSnapshot) -> Tensor:
        for averaging in averagings:
            averaging.result()
        return compare(snapshot)

    with (
        mock.patch.object(FSDPHooks, "after_last_backward", begin_and_note),
        mock.patch.object(TensorSnapshot, "has_other_values", wait_and_compare),
    ):
        return everyday("fsdp", "recompute", "stage")


def test_no_check_reads_parameters_that_the_averaging_of_a_sharded_stage_has_freed() -> None:
    for ours in on_ranks(everyday_freed_early, 4):
        close(ours, everyday_alone())


def own_ways(schedule: str) -> list[dict[str, Tensor | None]]:
    from torch.distributed.fsdp import fully_shard

    def each_layer(module: nn.Module, mesh: Any) -> nn.Module:
        for layer in module.children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    ways = may_be_unused, partial(may_be_unused, views=True), each_layer
    return [own_way((2, 2, 1), schedule, way) for way in ways]


def own_way(shape: Shape | None, schedule: str = "", way: Any = None) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, WIDTH), has_unused(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    pipe = built(shape, whole, schedule, data_parallel=way)
    for step in range(2):
        inputs, target = share(pipe, batch(step))
        pipe.step(inputs, target=target)
    return gradients(pipe)


@pytest.mark.parametrize("schedule", slow_except(["zb-h1"], ["1f1b", "zb-h1"]))
def test_a_function_may_say_how_replicas_are_held_equal(schedule: str) -> None:
    for ways in on_ranks(own_ways, 4, schedule):
        close(ways, [own_way(None)] * 3)


class Mlp(nn.Module):
    """No Sequential: its parts are found along its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.second = nn.Linear(6, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(hidden)))
        return self.last(torch.tanh(self.second(hidden)))


def in_bfloat16(module: nn.Module, mesh: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def cast(schedule: str, recompute: Any) -> list[Any]:
    """Loss of a step, loss of an evaluation and gradients of the model cut in four ways, in this rank's order."""
    found = []
    for how in ("list", "sequential", "cuts", "example"):
        whole, options = Mlp(), dict[str, Any]()
        stages = [nn.Sequential(whole.first, nn.Tanh(), whole.dropout), nn.Sequential(whole.second, nn.Tanh(), whole.last)]
        given: Any = {"list": stages, "sequential": nn.Sequential(*stages[0], *stages[1])}.get(how, whole)
        if how != "list":
            options["cuts"] = ["3" if how == "sequential" else "second"]
        if how == "example":
            options["example_args"] = (torch.zeros(2, 6),)
        mesh = ps.comms.init_mesh(2, 2)
        options |= {"mesh": mesh, "data_parallel": in_bfloat16, "recompute": recompute}
        pipe = ps.Pipeline(given, loss_fn, schedule, 2, **options)
        inputs, target = (value.float() for value in share(pipe, batch(0, 8)))
        loss = pipe.step(inputs, target=target)
        found.append([loss, pipe.eval(inputs, target=target)[1], *gradients(pipe).values()])
    return found


CASTS = (("1f1b", None), ("1f1b", "block"), ("zb-h1", None), ("zb-h1", "stage"))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "recompute"), CASTS)
def test_parameters_may_be_cast_by_a_policy_of_fully_shard_however_the_model_is_cut(schedule: str, recompute: Any) -> None:
    inputs, target = (microbatch.float() for microbatch in batch(0, 8))
    expected = loss_fn(Mlp().eval().bfloat16()(inputs.bfloat16()).float(), target)
    for listed, *others in cases_on_ranks(cast, 4, CASTS)[schedule, recompute]:
        assert listed[0] != listed[1]  # there is dropout
        torch.testing.assert_close(listed[1], expected, rtol=1e-2, atol=0)
        assert len(others) == 3
        for ours in others:
            assert all(map(torch.equal, ours, listed))


def with_auxiliary(shape: Shape | None) -> tuple[Tensor, dict]:
    whole = model()
    whole.insert(2, has_auxiliary_loss(lambda hidden: 0.1 * hidden.square().mean()))
    pipe = built(shape, whole, "1f1b", 2)
    inputs, target = share(pipe, batch(0, 8))
    return pipe.step(inputs, target=target), gradients(pipe)


@pytest.mark.parametrize("name", ["pp2 dp2", "pp2 tp2"])
def test_auxiliary_losses_count_once(name: str) -> None:
    for ours in cases_on_ranks(with_auxiliary, 4, ((MESHES["pp2 dp2"],), (MESHES["pp2 tp2"],)))[MESHES[name],]:
        close(ours, with_auxiliary(None))


def normalised() -> tuple[dict[str, Tensor], dict]:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)).double()
    pipe = built((2, 2, 1), whole, "1f1b", 2)
    inputs, target = share(pipe, batch(pipe.position.replica, 8))
    pipe.step(inputs, target=target)
    return {name: value for name, value in pipe.state_dict().items() if "running" in name or "num" in name}, gradients(pipe)


def test_statistics_are_those_of_the_first_replica_and_count_its_microbatches() -> None:
    everyone = on_ranks(normalised, 4)
    assert [value for statistics, _ in everyone for name, value in statistics.items() if "num" in name] == [2, 2]
    for first, second in ((0, 1), (2, 3)):
        assert_same(everyone[first][0], everyone[second][0])
        assert_same(everyone[first][1], everyone[second][1])


def tied(way: str, shape: Shape | None) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5, bias=False)).double()
    whole[2].weight = whole[0].weight
    pipe = built(shape, whole, "zb-h1", 2, nn.functional.cross_entropy, data_parallel=way)
    tokens = torch.arange(8) % 5
    for _ in range(2):
        inputs, target = share(pipe, (tokens, tokens.flip(0)))
        pipe.step(inputs, target=target)
    found = gradients(pipe)
    return found if shape else found | {"2.weight": found["0.weight"]}


def test_tied_parameters_may_be_in_replicas() -> None:
    for ours in on_ranks(tied, 4, "ddp", (2, 2, 1)):
        close(ours, tied("", None))
    with pytest.raises(ps.MismatchError, match=r"\(0.weight, 2.weight\) can be neither sharded .*: use data_parallel='ddp'"):
        ps.launch(tied, 4, "fsdp", (2, 2, 1))


def times_told(shape: Shape) -> tuple[dict[str, float], tuple[float, ...]]:
    pipe = built(shape, model(), "zb-v", 4, data_parallel="fsdp")
    inputs, target = share(pipe, batch(0, 16))
    for _ in range(2):
        pipe.step(inputs, target=target)
    assert "averaging gradients" in str(pipe.timeline().explain()) or shape[1] == 1
    return pipe.metrics(), pipe.timeline().averaging


def test_what_averaging_takes_beyond_the_table_is_told() -> None:
    for metrics, averaging in on_ranks(times_told, 4, MESHES["pp2 dp2"]):
        assert len(averaging) == 2
        assert all(0 < metrics[f"averaging_seconds/rank{rank}"] < 5 for rank in range(2))
        assert metrics["makespan_seconds"] > 0
    for metrics, averaging in on_ranks(times_told, 2, (2, 1, 1)):
        assert averaging == ()
        assert not any(name.startswith("averaging") for name in metrics)


# -- tensor parallel ----------------------------------------------------------------------------------------------------


def sequences() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), MLPBlock(WIDTH), MLPBlock(WIDTH), nn.Linear(WIDTH, 3)).double()


def sequence_parallel(way: str, dp: int) -> dict[str, Tensor | None]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    styles = {
        "*.norm": SequenceParallel(),
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1)),
        "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "3": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }
    mesh = ps.comms.init_mesh(2, dp, 2)
    pipe = ps.Pipeline(sequences(), loss_fn, "zb-h1", 2, mesh=mesh, data_parallel=way, tensor_parallel=styles)
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 4, 6, generator=generator).double(), torch.randn(4, 4, 3, generator=generator).double()
    inputs, target = share(pipe, tensors)
    pipe.step(inputs, target=target)
    placed = {name: p for name, p in pipe.named_parameters() if "norm" in name}
    assert all(getattr(p.grad, "placements", None) == getattr(p, "placements", None) for p in placed.values())
    return gradients(pipe)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "dp"), [("ddp", 1), ("fsdp", 2)])
def test_norms_may_run_on_parts_of_a_sequence(way: str, dp: int) -> None:
    whole = sequences()
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(4, 4, 6, generator=generator).double(), torch.randn(4, 4, 3, generator=generator).double()
    loss_fn(whole(inputs), target).backward()
    for ours in on_ranks(sequence_parallel, 4 * dp, way, dp):
        close(ours, {name: p.grad for name, p in whole.named_parameters()})


class GroupedQueryAttention(nn.Module):
    """Four heads, whose queries are normed, and which look at the keys and values of two or three."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = 2
        self.q, self.kv, self.o = nn.Linear(8, 8), nn.Linear(8, 2 * kv_heads), nn.Linear(8, 8)
        self.norm = nn.RMSNorm(2)

    def forward(self, hidden: Tensor) -> Tensor:
        q, kv = (value(hidden).unflatten(-1, (-1, self.head_dim)) for value in (self.q, self.kv))
        return self.o((self.norm(q) * kv.repeat_interleave(q.shape[1] // kv.shape[1], 1)).flatten(1))


def heads(kv_heads: int, shares_norm: bool = True) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradient of the norm on the ranks that have it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    torch.manual_seed(0)
    styles: dict[str, Any] = {"0.q": ColwiseParallel(), "0.kv": ColwiseParallel(), "0.o": RowwiseParallel()}
    styles |= {"0.norm": SequenceParallel(use_local_output=True)} if shares_norm else {}
    whole = nn.Sequential(GroupedQueryAttention(kv_heads), nn.Linear(8, 3)).double()
    pipe = ps.Pipeline(whole, loss_fn, "1f1b", 2, mesh=ps.comms.init_mesh(2, 1, 2), tensor_parallel=styles)
    inputs = torch.ones(4, 8).double()
    loss = pipe.step(inputs, target=torch.zeros(4, 3).double())
    return loss, [gather_full_tensor(p.grad) for name, p in pipe.named_parameters() if name == "0.norm.weight"]


def heads_refused() -> tuple[str, str]:
    return error_text(lambda: heads(3)), error_text(lambda: heads(2, shares_norm=False))


def test_heads_that_ranks_cannot_share_out_and_norms_of_some_heads_are_refused() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(GroupedQueryAttention(2), nn.Linear(8, 3)).double()
    expected = loss_fn(whole(torch.ones(4, 8).double()), torch.zeros(4, 3).double())
    expected.backward()
    weight: Any = whole[0].norm.weight
    for loss, gradients in on_ranks(heads, 4, 2):
        assert abs(loss - expected) < 1e-12
        assert all((gradient - weight.grad).abs().max() < 1e-12 for gradient in gradients)
    [(uneven, unshared)] = {*on_ranks(heads_refused, 4)}
    assert uneven.endswith(
        "0.kv makes 3 heads of 2 features, which 2 ranks along tp cannot share: each needs as many whole heads; use a mesh "
        "with tp of 1, 3"
    )
    assert "0.norm norms heads, of which 0.q gives each rank along tp some, so its gradient would be of these alone" in unshared


def mixed_groups() -> list[str]:
    results = []
    for kind, options in ((torch.optim.AdamW, "foreach"), (torch.optim.SGD, "foreach"), (torch.optim.Adam, "fused")):
        pipe = built((1, 1, 2), model(1))
        pipe.step(batch(0)[0], target=batch(0)[1])
        parameters = list(pipe.parameters())
        shared = [parameter for parameter in parameters if hasattr(parameter, "placements")]
        others = [parameter for parameter in parameters if not hasattr(parameter, "placements")]
        kind(parameters, lr=0.1, foreach=False).step()
        kind([{"params": shared}, {"params": others}], lr=0.1, **{options: True}).step()
        with pytest.raises(ps.MismatchError) as caught:
            kind(parameters, lr=0.1, **{options: True}).step()
        results.append(str(caught.value))
    return results


def test_an_optimizer_is_told_that_torch_does_not_update_tensors_and_dtensors_at_once() -> None:
    for result in on_ranks(mixed_groups, 2):
        for kind, text in zip(("AdamW", "SGD", "Adam"), result, strict=True):
            assert text.startswith(f"group 0 of the {kind} has tensors and DTensors, since tensor_parallel shares some")
            assert "foreach=False" in text


# -- checkpoints --------------------------------------------------------------------------------------------------------


def state_of(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    state = {name: gather_full_tensor(value).clone() for name, value in pipe.state_dict().items()}
    for parameter, values in optimizer.state.items():
        state |= {f"{names[id(parameter)]} {key}": gather_full_tensor(value).clone() for key, value in values.items()}
    return state


def saved(folder: Path, shape: Shape, way: str) -> dict[str, Tensor]:
    pipe = built(shape, model(), data_parallel=way)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(2):
        inputs, target = share(pipe, batch(step, 12))
        pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, pipe, optimizer, wait=False).wait()
    checkpoint.export(pipe, folder / "model.safetensors")
    return state_of(pipe, optimizer)


def resumed(folder: Path, shape: Shape, way: str) -> dict[str, Tensor]:
    pipe = built(shape, model(), data_parallel=way)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    checkpoint.resume(folder, pipe, optimizer)
    state = state_of(pipe, optimizer)
    checkpoint.import_weights(pipe, folder / "model.safetensors")
    assert_same(state_of(pipe, optimizer), state)
    return state


@pytest.mark.parametrize(
    ("shape", "kind", "others"),
    [
        ((2, 2, 1), "fsdp", [(1, 1, 1)]),
        pytest.param((2, 2, 1), "fsdp", [(4, 1, 1), (2, 1, 2)], marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "ddp", [(1, 1, 1)], marks=pytest.mark.slow),
    ],
    ids=["fsdp", "fsdp, to other meshes", "tp"],
)
def test_checkpoints_move_between_meshes_to_the_bit(shape: Shape, kind: str, others: list[Shape], tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    for part in on_ranks(saved, 4, tmp_path, shape, kind):
        expected |= part
    assert any("exp_avg" in name for name in expected)
    for other in [*others, shape]:
        whole: dict[str, Tensor] = {}
        for part in on_ranks(resumed, other[0] * other[1] * other[2], tmp_path, other, "fsdp"):
            whole |= part
        assert_same(whole, expected)


# -- models that are not used alike -------------------------------------------------------------------------------------


def choices() -> nn.Sequential:
    """A model of two layers, of which the sign of the batch chooses one; a third is never used."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(6, WIDTH), "never": nn.Linear(2, 2)}
    choice = toy(lambda self, inputs: self.a(inputs) if inputs[0, 0] > 0 else self.b(inputs), **layers)
    return nn.Sequential(choice, nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def signed(step: int) -> tuple[Tensor, Tensor]:
    """The first replica has positive rows, the other one negative ones, and in the last step both the same."""
    inputs, target = batch(step, 8)
    signs = torch.tensor([1.0, -1.0] if step < 2 else [1.0, 1.0]).repeat_interleave(4)
    return inputs.abs() * signs[:, None], target


def chosen(way: str, schedule: str, shape: Shape | None = (2, 2, 1)) -> list[dict[str, Tensor | None]]:
    pipe, found = built(shape, choices(), schedule, 2, data_parallel=way), []
    if shape is None:
        pipe.microbatches = 2  # one of each sign
    for step in range(3):
        inputs, target = share(pipe, signed(step))
        pipe.step(inputs, target=target)
        found.append(gradients(pipe))
    return found


CHOSEN = tuple(product(WAYS, ("1f1b", "zb-h1")))
QUICK_CHOSEN = ("ddp", "1f1b"), ("fsdp", "zb-h1")


@pytest.mark.parametrize(("way", "schedule"), slow_except(QUICK_CHOSEN, CHOSEN))
def test_replicas_need_not_use_the_same_parameters(way: str, schedule: str) -> None:
    for found in cases_on_ranks(chosen, 4, group_of((way, schedule), QUICK_CHOSEN, CHOSEN))[way, schedule]:
        close(found, chosen("", "", None))


def without_parameters() -> list[str]:
    whole = [nn.Linear(6, 3).double(), nn.Tanh()]
    return [name for name, p in built((2, 2, 1), whole, data_parallel="fsdp").named_parameters() if p.numel()]


def test_a_stage_may_have_no_parameters() -> None:
    everyone = on_ranks(without_parameters, 4)
    assert [len(names) for names in everyone] == [2, 2, 0, 0]


# -- what does not fit, and what fails ----------------------------------------------------------------------------------


def refused() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    rank, shared = ps.comms.init_distributed().rank, model()
    shared[2].up.weight = shared[1].up.weight

    def pipeline(**options: Any) -> ps.Pipeline:
        return ps.Pipeline(model(), loss_fn, **options)

    tries: dict[str, Callable[[], Any]] = {
        "axes": lambda: pipeline(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("data",))),
        "size": lambda: ps.comms.init_mesh(pp=3, dp=2),
        "none": lambda: ps.comms.init_mesh(dp=0),
        "no plan": lambda: pipeline(mesh=ps.comms.init_mesh(1, 2, 2)),
        "name": lambda: pipeline(mesh=ps.comms.init_mesh(1, 2, 2), tensor_parallel={"*.upp": None}),
        "no mesh": lambda: pipeline(tensor_parallel=plan(2)),
        "no axis": lambda: pipeline(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), tensor_parallel=plan(2)),
        "way": lambda: pipeline(mesh=ps.comms.init_mesh(1, 2, 2), tensor_parallel=plan(2), data_parallel="zero"),
        "nothing": lambda: pipeline(mesh=ps.comms.init_mesh(2, 2), data_parallel=lambda module, mesh: module),
        "meshes": lambda: ps.comms.init_mesh(*((2, 2, 1) if rank % 2 else (4, 1, 1))),
        "ways": lambda: pipeline(mesh=ps.comms.init_mesh(2, 2), data_parallel="fsdp" if rank == 3 else "ddp"),
        "models": lambda: ps.Pipeline(model().float() if rank == 3 else model(), loss_fn, mesh=ps.comms.init_mesh(2, 2)),
        "tied": lambda: ps.Pipeline(shared, loss_fn, mesh=ps.comms.init_mesh(1, 2, 2), tensor_parallel=plan(2)),
    }
    return {name: error_text(attempt) for name, attempt in tries.items()}


def test_what_does_not_fit_is_told_with_what_does() -> None:
    for result in on_ranks(refused, 4):
        assert result.pop("models").startswith("stage 1 is not the same on all ranks that have it: ")
        assert result.pop("name").startswith("tensor_parallel has '*.upp', but the model has no such part; it has ")
        assert result == {
            "axes": "the mesh has axes ('data',): use any of 'pp', 'dp', 'cp' and 'tp', or init_mesh",
            "size": "a mesh of pp=3, dp=2, tp=1 has 6 ranks, but 4 are running: start that many, or give other numbers",
            "none": "the mesh's axis dp cannot have 0 ranks: use a whole number of 1 or more",
            "no plan": "the mesh has 2 ranks along tp: say by tensor_parallel= which products they share",
            "no mesh": "tensor_parallel= needs a mesh with an axis 'tp': give mesh=, for instance of init_mesh(tp=2)",
            "no axis": result["no mesh"],
            "way": "data_parallel='zero': use 'ddp', 'fsdp' or a function of (stage, mesh) that returns the stage",
            "nothing": result["nothing"],
            "meshes": "the ranks do not make the same mesh: rank 0 makes one of pp=4, dp=1, tp=1, rank 1 "
            "makes one of pp=2, dp=2, tp=1",
            "ways": "the ranks do not build the same pipeline: rank 0 has data_parallel=ddp, rank 3 has data_parallel=fsdp",
            "tied": result["tied"],
        }
        assert result["nothing"].startswith(
            "data_parallel=<lambda> gave Sequential, no DistributedDataParallel and not sharded: "
        )
        assert "make several parameters of one (1.up.weight, 2.up.weight)" in result["tied"]


def failing(how: str, shape: Shape) -> tuple[str, str]:
    pipe = built(shape, model(), "1f1b", 4)
    rank = pipe.position.world.rank
    inputs, target = share(pipe, batch(0, 16))
    pipe.step(inputs, target=target)
    if how == "rows" and rank == 1:
        inputs, target = inputs[1:], target[1:]
    if how == "raises" and rank == 3:
        next(iter(pipe.stages.values()))[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    if how == "ends" and rank == 3:
        os._exit(1)
    with pytest.raises(ps.PenstockError) as caught:
        pipe.step(inputs, target=target)
    with pytest.raises(ps.PenstockError) as after:
        pipe.step(inputs, target=target)
    return str(caught.value), str(after.value)


@pytest.mark.parametrize("name", slow_except(["pp2 tp2"], ["pp2 dp2", "pp2 tp2", "dp2 tp2"]))
def test_an_error_on_one_rank_ends_the_step_on_all_pipelines(name: str) -> None:
    for result, after in on_ranks(failing, 4, "raises", MESHES[name]):
        assert result.startswith("rank 3, stage ")
        assert result.endswith("ZeroDivisionError: division by zero")
        assert after == f"this pipeline ended when {result}: start the ranks again"


def again(way: str, shape: Shape, folder: Path) -> tuple[list[float], list[str]]:
    """The losses of two pipelines, each on a mesh of its own, the first of which has ended by an error; what was saved."""
    losses = []
    for fails in (True, False):
        pipe = built(shape, model(BLOCKS), "1f1b", 4, data_parallel=way)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for step in range(2):
            inputs, target = share(pipe, batch(step))
            losses.append(pipe.step(inputs, target=target).item())
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if fails:
            if pipe.position.world.rank == 3:
                next(iter(pipe.stages.values()))[-1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ps.StageError):
                pipe.step(inputs, target=target)
    checkpoint.save(folder, pipe, optimizer)
    return losses, sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("name", "way"),
    [*(pytest.param(name, "ddp", marks=pytest.mark.slow) for name in ("pp2 tp2", "dp2 tp2")), ("pp2 dp2", "fsdp")],
)
def test_after_an_error_a_pipeline_on_a_new_mesh_of_the_same_shape_trains(name: str, way: str, tmp_path: Path) -> None:
    for losses, saved in on_ranks(again, 4, way, MESHES[name], tmp_path):
        assert losses[:2] == losses[2:]
        assert saved == ["step-00000002"]


def after_errors() -> list[str]:
    """The error of the next step on an old mesh, for an axis of all ranks; on a new mesh it works."""
    inputs, refusals = torch.randn(4, 4, WIDTH), []
    for axis in ("dp", "cp"):
        for _ in range(2):
            mesh = ps.comms.init_mesh(1, **{axis: 2})
            layer = nn.Linear(WIDTH, WIDTH)
            pipe = ps.Pipeline(layer, nn.functional.mse_loss, microbatches=2, mesh=mesh)
            pipe.step(inputs, target=inputs)
            layer.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ps.StageError):
                pipe.step(inputs, target=inputs)
        with pytest.raises(ps.MismatchError) as caught:
            ps.Pipeline(nn.Linear(WIDTH, WIDTH), nn.functional.mse_loss, microbatches=2, mesh=mesh)
        refusals.append(str(caught.value))
    return refusals


def test_after_an_error_a_new_mesh_has_groups_of_its_own_for_all_ranks_too_and_the_old_mesh_is_refused() -> None:
    for refusals in on_ranks(after_errors, 2):
        for refusal in refusals:
            assert refusal.startswith("this mesh ended when rank ")
            assert refusal.endswith("ZeroDivisionError: division by zero: make another, mesh = ps.comms.init_mesh(..)")


@pytest.mark.parametrize("name", slow_except(["pp2 dp2"], ["pp2 dp2", "pp2 tp2"]))
def test_a_lost_rank_ends_all_pipelines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank_processes, "ERROR_REPORT_SECONDS", 1000.0
    )  # seconds: the launcher ends no rank that does not end itself
    with pytest.raises(ps.PenstockError, match="rank 3"):
        ps.launch(failing, 4, "ends", MESHES[name])


def test_ranks_that_share_products_must_have_the_same_rows() -> None:
    for result, _ in on_ranks(failing, 4, "rows", MESHES["pp2 tp2"]):
        assert result == "ranks along tp and cp are given one batch, but it has 16 rows on rank 0, 15 rows on rank 1"


# -- a world of one, and the main job -----------------------------------------------------------------------------------


def one_of_everything() -> dict[str, Tensor | None]:
    pipe = ps.Pipeline(model(), loss_fn, "1f1b", 4, mesh=ps.comms.init_mesh())
    inputs, target = batch(0)
    pipe.step(inputs, target=target)
    return gradients(pipe)


def test_a_mesh_of_one_is_one_process() -> None:
    whole = model()
    accumulate(whole, loss_fn, batch(0), 4)
    (ours,) = on_ranks(one_of_everything, 1)
    assert_same(ours, {name: p.grad for name, p in whole.named_parameters()})
