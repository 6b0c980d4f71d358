"""A stage that sleeps instead of computing, in place of a device."""

import time
from typing import Any

import torch
from torch import Tensor, nn


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
