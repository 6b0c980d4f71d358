"""Emulate devices: ranks sleep instead of computing, and a process runs out of a limited memory.

Four ranks on a laptop with two cores would compete for the cores, which would hide the effect of the schedule. Ranks that
sleep do not compete, so their timeline is that of four devices.
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

DIM = 8  # of the activations; small, as emulated devices only sleep
CAN_LIMIT_MEMORY = os.path.exists("/proc/self/statm")  # Linux


class EmulatedDevice(nn.Module):
    """A stage that sleeps instead of computing: ranks that share a machine's cores then run in parallel, as devices do.

    F sleeps `forward` seconds, I `backward`, W `weights`, and B both; so does the first stage, whose input needs no gradient.
    The output shares the input's memory, so nothing but the sleep takes time. Its weight has `parameters` elements and gets a
    gradient. I sleeps in an autograd node of the input's gradient, W in a hook of the weight: once each, in any engine.
    """

    def __init__(self, forward: float, backward: float, weights: float = 0.0, parameters: int = 1) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(parameters))
        if weights:
            self.weight.register_hook(lambda _: time.sleep(weights))

    def forward(self, hidden: Tensor) -> Tensor:
        """Sleep. Return the same values in the same memory, (rows, ..)."""
        return _UseWeight.apply(self.busy(hidden), self.weight)

    def busy(self, hidden: Tensor) -> Tensor:
        """Sleep for the forward and, in the backward, for I. Return `hidden`; the weight takes no part."""
        if not any(self.seconds):
            return hidden
        is_batch = not hidden.requires_grad  # this is the first stage
        return _Sleep.apply(hidden.detach().requires_grad_() if is_batch else hidden, *self.seconds, is_batch)


class _Sleep(torch.autograd.Function):
    """Sleeps in the forward and in the backward; returns the memory it gets, and no gradient for a batch."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float, is_batch: bool) -> Tensor:
        ctx.seconds, ctx.is_batch = backward, is_batch
        time.sleep(forward)
        return hidden.data  # not a view, because torch's own pipeline cannot detach a view in I

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        time.sleep(ctx.seconds)
        # A new view of `gradient`: autograd would copy `gradient` itself into a leaf's `.grad`.
        return None if ctx.is_batch else gradient.view_as(gradient), None, None, None


class _UseWeight(torch.autograd.Function):
    """Returns `hidden`; gives the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.parameters = len(weight)
        return hidden.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient.view_as(gradient), gradient.flatten()[:1].repeat(ctx.parameters)


class EmulatedLayer(EmulatedDevice):
    """An emulated device that also multiplies by its weight, so that it keeps an activation and has a gradient to check.

    (rows, dim) -> (rows, dim). It sleeps `forward_seconds` in F, `backward_seconds` in I, `weight_seconds` in W.
    """

    def __init__(self, dim: int, forward_seconds: float, backward_seconds: float, weight_seconds: float = 0.0) -> None:
        super().__init__(forward_seconds, backward_seconds, weight_seconds, parameters=dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Sleep, and multiply by the weight: (rows, dim) -> (rows, dim)."""
        return self.busy(hidden * self.weight)  # so the backward sleeps first, then computes the weight's gradient


def emulated_step(table: Schedule, forward: float, backward: float, weights: float = 0.0) -> Timeline:
    """Run a step of `table` on emulated devices and return its measured timeline. Every rank calls this.

    A rank takes `forward`, `backward` (to the input) and `weights` (backward to the weights) seconds for a microbatch. Each of
    its V stages takes a V-th of them.
    """
    topology = ps.comms.init_distributed(backend="gloo")
    share = topology.world_size / table.num_stages
    stages = [EmulatedLayer(DIM, share * forward, share * backward, share * weights) for _ in range(table.num_stages)]
    return fastest_step(ps.Pipeline(stages, mse_loss, schedule=table))


def fastest_step(pipe: ps.Pipeline) -> Timeline:
    """Run steps for about a second, at least three, and return the timeline of the fastest: the one least disturbed."""
    batch = torch.randn(2, 2 * pipe.schedule.microbatches, DIM, generator=torch.Generator().manual_seed(0))
    inputs, target = batch  # two rows for each microbatch, the same on every rank
    pipe.step(inputs, target=target)  # not measured: in the first step the ranks also agree on shapes
    assert pipe.report is not None
    timelines = []
    for _ in range(max(3, int(1 / pipe.report.makespan))):  # the report, and so the number of steps, is equal on all ranks
        pipe.step(inputs, target=target)
        timelines.append(pipe.timeline())
    return min(timelines, key=lambda timeline: timeline.makespan)


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more than it has now; beyond that torch raises RuntimeError. Linux only."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])  # of data, which RLIMIT_DATA limits
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def warm_up(dim: int, rows: int) -> None:
    """Run one small training step, so that torch's own first allocations are made before memory or time is measured."""
    layer = nn.Linear(dim, dim)
    layer(torch.zeros(rows, dim)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()
