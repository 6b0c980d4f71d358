"""A stage that sleeps in the place of a device that is not there."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class EmulatedDevice(nn.Module):
    """A stage that takes its time on no core, so that ranks that share the cores of one machine run as devices of their own do.

    F sleeps `forward` seconds, I `backward` and W `weights`, a full B both; the first stage too. It hands on the memory it
    gets, so a message of any size costs nothing else. Its weight, of `parameters` numbers, gets a gradient.
    I sleeps in a node that only the input's gradient passes, W in a hook of the weight: once each, in any engine.
    """

    def __init__(self, forward: float, backward: float, weights: float = 0.0, parameters: int = 1) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(parameters))
        if weights:
            self.weight.register_hook(lambda _: time.sleep(weights))

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, ..) -> the same values, in the same memory, later."""
        return _Weighted.apply(self.busy(hidden), self.weight)

    def busy(self, hidden: Tensor) -> Tensor:
        """`hidden` later: what a device does without its weight. One that takes no time at all does nothing."""
        if not any(self.seconds):
            return hidden
        first = not hidden.requires_grad
        return _Busy.apply(hidden.detach().requires_grad_() if first else hidden, *self.seconds, first)


class _Busy(torch.autograd.Function):
    """Sleeps and hands on the memory it got, in both directions; nothing to the batch, before the first stage."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float, first: bool) -> Tensor:
        ctx.seconds, ctx.first = backward, first
        time.sleep(forward)
        return hidden.data  # not a view, which torch's own pipeline cannot detach in I

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        time.sleep(ctx.seconds)
        # A new view, not `gradient` itself: an engine that reads it from a leaf's `.grad` then gets it without a copy.
        return None if ctx.first else gradient.view_as(gradient), None, None, None


class _Weighted(torch.autograd.Function):
    """Where the weight comes in."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.parameters = len(weight)
        return hidden.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient.view_as(gradient), gradient.flatten()[:1].repeat(ctx.parameters)
