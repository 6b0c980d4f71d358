"""torch's schedules and ours, run on ranks under torch.profiler, each into a folder of traces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps

RANKS, MICROBATCHES, WIDTH, WARMUP, STEPS = 2, 4, 16, 1, 3
IN_A_V = {"zb-v", "dualpipe-v"}
SINGLE_STAGE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
NAMES = [*SINGLE_STAGE, "interleaved-1f1b"]
if not torch.__version__.startswith("2.11."):  # whose runtime has a rank send to itself before the first step of these
    NAMES += sorted(IN_A_V)
CLASSES = SINGLE_STAGE | {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def rank_profiled(folder: Path) -> None:
    """Run all schedules, a folder for each; `ours` is a Pipeline's."""
    topology = ps.comms.init_distributed(backend="gloo")
    for name in NAMES:
        _profile(folder / name, topology.rank, _torch_step(name, topology.rank))
    pipe = ps.Pipeline(nn.Sequential(*_stages(4)), nn.functional.mse_loss, "zb-h1", MICROBATCHES)
    batch = torch.randn(2 * MICROBATCHES, WIDTH)
    _profile(folder / "ours", topology.rank, lambda: pipe.step(batch, target=batch))


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def _torch_step(name: str, rank: int) -> Callable[[], Any]:
    from torch.distributed import pipelining

    count = RANKS if name in SINGLE_STAGE else 2 * RANKS
    own = [rank] if name in SINGLE_STAGE else [rank, count - 1 - rank if name in IN_A_V else rank + RANKS]
    modules = _stages(count)
    stages = [pipelining.PipelineStage(modules[stage], stage, count, torch.device("cpu")) for stage in own]
    schedule = getattr(pipelining, CLASSES[name])(
        stages[0] if name in SINGLE_STAGE else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    batch = torch.randn(2 * MICROBATCHES, WIDTH)
    inputs = (batch,) if 0 in own else ()

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(*inputs, **({"target": batch, "losses": losses} if count - 1 in own else {}))

    return step


def _profile(folder: Path, rank: int, step: Callable[[], Any]) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{rank}.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=WARMUP, active=STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(WARMUP + STEPS):
            step()
            profiler.step()
