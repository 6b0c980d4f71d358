"""A step in which the first half of the layers is frozen, beside one in which all are trained; the cut is measured.

python benchmarks/frozen.py          # half a minute

24 layers that sleep, 5 ms each for F, I and W, over 4 ranks. Steps of the pipelines alternate.
"""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
import tyro
from tables import Row, show
from torch import Tensor, nn

import penstock as ps

LAYERS, RANKS, MICROBATCHES, DIM = 24, 4, 8, 8
SECONDS = 0.005  # of F, of I and of W of a layer


class _Sleep(torch.autograd.Function):
    """Multiplies by a weight. Sleeps in F, in I if its input needs a gradient, in W if its weight does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        time.sleep(SECONDS)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (hidden, weight), (needs_input, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        time.sleep(SECONDS * (needs_input + needs_weight))
        return gradient * weight if needs_input else None, (gradient * hidden).sum(0) if needs_weight else None


class SleepingLayer(nn.Module):
    """(rows, DIM) -> (rows, DIM)."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM), requires_grad=is_trained)

    def forward(self, hidden: Tensor) -> Tensor:
        """Sleep and multiply."""
        return _Sleep.apply(hidden, self.weight)


def make_model(frozen: int) -> nn.Sequential:
    """The first `frozen` of all layers are frozen."""
    return nn.Sequential(*[SleepingLayer(number >= frozen) for number in range(LAYERS)])


def run(steps: int) -> list[Row]:
    """What every rank runs."""
    torch.manual_seed(0)
    inputs, target = torch.randn(2, 2 * MICROBATCHES, DIM)
    build = partial(ps.Pipeline, loss_fn=nn.functional.mse_loss, microbatches=MICROBATCHES)
    measured: dict[str, Any] = {"example_args": (inputs[:2],)}
    even = [str(start) for start in range(LAYERS // RANKS, LAYERS, LAYERS // RANKS)]
    pipes = {
        "all trained": build(make_model(0), schedule="1f1b", cuts=even),
        "half frozen, its backwards run": build(
            make_model(12), schedule=ps.schedule.build("1f1b", RANKS, MICROBATCHES), cuts=even
        ),
        "half frozen, even cut": build(make_model(12), schedule="1f1b", cuts=even),
        "half frozen, measured cut": build(make_model(12), schedule="1f1b", **measured),
    }
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for step in range(steps + 1):
        for name, pipe in pipes.items():
            pipe.step(inputs, target=target)
            if step:  # the first one agrees on shapes
                assert pipe.report is not None
                seconds[name].append(pipe.report.makespan)
    timelines = {name: pipe.timeline() for name, pipe in pipes.items()}
    full = median(seconds["all trained"])
    return [
        {
            "step": name,
            "ms": 1000 * median(seconds[name]),
            "of all trained": median(seconds[name]) / full,
            "spread": f"{min(seconds[name]) / full:.2f} to {max(seconds[name]) / full:.2f}",
            "cut": "/".join(pipe.cuts),
            "actions": len(timelines[name].events),
            "in flight": "/".join(map(str, timelines[name].peak_in_flight)),
            "bytes": "/".join(f"{amount:.0f}" for amount in timelines[name].peak_memory),
        }
        for name, pipe in pipes.items()
    ]


def main(steps: int = 7) -> None:
    """Measure. `steps`: of each pipeline."""
    show(ps.launch(run, RANKS, steps)[0], "step", "ms", "of all trained", "spread", "cut", "actions", "in flight", "bytes")


if __name__ == "__main__":
    tyro.cli(main)
