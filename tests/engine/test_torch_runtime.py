"""Our tables in PyTorch's own runtime, through CSV: the gradients are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps

pytestmark = pytest.mark.ranks

RANKS, MICROBATCHES, ROWS = 2, 5, 2
# torch 2.11's runtime has a rank send to itself before the first step of these.
IN_A_V = {"zb-v", "v-half", "v-min", "dualpipe-v"}
NAMES = [name for name in ps.schedule.names() if name not in IN_A_V or not torch.__version__.startswith("2.11.")]


def model() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(4)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    rows = MICROBATCHES * ROWS
    return nn.Sequential(*layers).double(), torch.randn(rows, 6).double(), torch.randn(rows, 6).double()


def rank_peer(folder: Path) -> dict[str, dict[str, Any]]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    topology = ps.comms.init_distributed(backend="gloo")
    results = {}
    for name in NAMES:
        table = ps.schedule.build(name, RANKS, MICROBATCHES)
        whole, inputs, target = model()
        pieces = ps.partition.split(whole, table.stages)
        stages = [PipelineStage(pieces[i], i, table.stages, topology.device) for i in table.stages_of(topology.rank)]
        runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        placement = dict(enumerate(table.placement))
        runtime.stage_index_to_group_rank = placement
        for stage in stages:
            stage.stage_index_to_group_rank = placement
        runtime._load_csv(folder / f"{name}.csv")
        runtime.step(*[inputs] if topology.rank == 0 else [], target=target, losses=[], return_outputs=False)
        results[name] = {n: p.grad for stage in stages for n, p in stage.submod.named_parameters()}
    return results


def test_our_tables_run_in_pytorchs_runtime_with_the_same_gradients(tmp_path: Path) -> None:
    for name in NAMES:
        ps.schedule.build(name, RANKS, MICROBATCHES).to_csv(tmp_path / f"{name}.csv")
    everyone = on_ranks(rank_peer, RANKS, tmp_path)
    whole, inputs, target = model()
    nn.functional.mse_loss(whole(inputs), target).backward()
    for name in NAMES:
        theirs = {n: grad for result in everyone for n, grad in result[name].items()}
        for n, parameter in whole.named_parameters():
            assert torch.allclose(theirs[n], parameter.grad, rtol=1e-12, atol=1e-15), (name, n)
