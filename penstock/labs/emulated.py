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

CAN_LIMIT_MEMORY = os.path.exists("/proc/self/statm")  # Linux


class EmulatedLayer(nn.Module):
    """A layer whose forward takes `forward_seconds` and whose backward `backward_seconds`, on no core.

    (rows, dim) -> (rows, dim): it multiplies by a weight of its own, so there is a gradient to check, and keeps its input
    for the backward, so there is an activation to count.
    """

    def __init__(self, dim: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.seconds = forward_seconds, backward_seconds

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return _Emulated.apply(hidden, self.weight, *self.seconds)


class _Emulated(torch.autograd.Function):
    """hidden x weight, slowly."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return gradient * weight, (gradient * hidden).sum(0), None, None


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
