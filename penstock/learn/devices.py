"""A device that is not there: its compute is a sleep, its memory a limit.

Four ranks on a laptop with two cores would compete for the cores and hide what the schedule does. Ranks that sleep do not
compete, so their timeline is that of four devices. A process with a memory limit runs out of memory as a device does.
"""

import os
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.schedule import Schedule, Timeline

DIM = 8  # of the activations; a device that sleeps does not mind
CAN_LIMIT_MEMORY = os.path.exists("/proc/self/statm")  # Linux


class EmulatedLayer(nn.Module):
    """A layer whose forward takes `forward_seconds`, and its backward `backward_seconds` and `weight_seconds`, on no core.

    (rows, dim) -> (rows, dim): it multiplies by a weight of its own, so there is a gradient to check, and keeps its input
    for the backward, so there is an activation to count. `weight_seconds` pass where the weight receives its gradient: at
    the end of a full backward, and in `W` if it is split.
    """

    def __init__(self, dim: int, forward_seconds: float, backward_seconds: float, weight_seconds: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.seconds = forward_seconds, backward_seconds
        if weight_seconds:
            self.weight.register_hook(lambda gradient: time.sleep(weight_seconds))

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return _Slow.apply(hidden * self.weight, *self.seconds)


class _Slow(torch.autograd.Function):
    """Its input, later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


def emulated_step(table: Schedule, forward: float, backward: float, weights: float = 0.0) -> Timeline:
    """The timeline of a step of `table`, measured: each rank is a device that takes these seconds for a microbatch.

    `backward` is to the input, `weights` to the weights. Where a rank has several stages, each has its part of the time.
    """
    topology = ps.comms.init_distributed(backend="gloo")
    part = topology.world_size / table.stages
    stages = [EmulatedLayer(DIM, part * forward, part * backward, part * weights) for _ in range(table.stages)]
    return fastest_step(ps.Pipeline(stages, mse_loss, schedule=table))


def fastest_step(pipe: ps.Pipeline) -> Timeline:
    """The timeline of the least disturbed of some steps: as many as fit into a second, but at least three."""
    inputs, target = torch.randn(2, 2 * pipe.schedule.microbatches, DIM)  # two rows for each microbatch
    pipe.step(inputs, target=target)  # the first one is slower: in it the ranks agree on the shapes
    assert pipe.report is not None
    timelines = []
    for _ in range(max(3, int(1 / pipe.report.makespan))):  # the report is the same on all ranks, so is the number of steps
        pipe.step(inputs, target=target)
        timelines.append(pipe.timeline())
    return min(timelines, key=lambda timeline: timeline.makespan)


def limit_memory(allowed: int) -> None:
    """From here on this process gets `allowed` bytes more than it has; then torch raises RuntimeError. Linux only."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])  # of data, what RLIMIT_DATA limits
    limit = pages * resource.getpagesize() + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def warm_up(dim: int, rows: int) -> None:
    """One small step, so that what torch sets up for itself at the first is there before memory or time is counted."""
    layer = nn.Linear(dim, dim)
    layer(torch.zeros(rows, dim)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()
