"""Gradients that each rank multiplies by a number of its own between two steps, as clipping by the norm of a list of them does.

A list of parameters is this rank's, and so is their norm: every rank would train with a learning rate of its own, and ranks
that share a parameter with others of it. So some small gradients are remembered when a step ends. When the next one begins, a
rank tells by what all of these were multiplied meanwhile; it must be the same number on all ranks.

The first weight that has a gradient is remembered too: while it is what it was, the gradients wait for the optimizer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.checks import is_power_of_two
from penstock.engine.checks.trained_elsewhere import sample
from penstock.stage.dtensor import local_shard
from penstock.stage.rank_parameters import RankParameters
from penstock.torch_private import tensor_version

COUNT, LARGEST = 4, 2**16  # how many gradients are remembered, of at most so many numbers
TOLERANCE = 0.02  # of a number in bfloat16, which has three digits
UNKNOWN = math.nan


class Remembered(NamedTuple):
    """A tensor, and what it was, or some of it."""

    tensor: Tensor
    version: int
    values: Tensor


class GradientFactor:
    """By what the gradients of `parameters` were multiplied since `remember`; where there are several `ranks`.

    Where they were changed, it looks the 1st, 2nd, 4th, .. time only: gradients that are on a GPU are waited for then.
    """

    def __init__(self, parameters: RankParameters, ranks: int) -> None:
        self._parameters, self._ranks, self._chosen = parameters, ranks, list[nn.Parameter]()
        self._remembered: list[Remembered] = []
        self._changes = 0
        self._weights: list[tuple[nn.Parameter, int]] = []  # those that had a gradient, if they are looked at
        self._steps = 0
        self._first: Remembered | None = None  # the first weight that has a gradient

    def remember(self) -> None:
        """The gradients are all ranks' alike: a step has ended, or the pipeline has clipped them."""
        weights = (each for each in self._parameters.parameters() if each.grad is not None and not each.is_inference())
        first = next(weights, None)
        self._first = None if first is None else Remembered(first, tensor_version(first), sample(first))
        if self._ranks == 1:
            return
        self._steps += 1
        trained = self._parameters.parameters() if is_power_of_two(self._steps) else ()
        self._weights = [(each, tensor_version(each)) for each in trained if each.grad is not None and not each.is_inference()]
        self._chosen = self._chosen or [each for each in self._parameters.parameters() if _is_small(each.grad)][:COUNT]
        gradients = [local_shard(each.grad) for each in self._chosen if _is_small(each.grad)]
        self._remembered = [Remembered(each, tensor_version(each), each.clone()) for each in gradients]

    def read(self) -> float:
        """The number; 1 if nothing has changed them, UNKNOWN where it was another change, or too few are remembered."""
        if len(self._remembered) < 2:
            return UNKNOWN
        if all(tensor_version(gradient) == version for gradient, version, _ in self._remembered):
            return 1.0
        self._changes += 1
        return self._measured() if is_power_of_two(self._changes) else UNKNOWN

    def is_pending(self) -> bool:
        """Whether gradients wait for the optimizer: the last step has left some, and no weight has changed since.

        Values are compared as well: some optimizers change `.data`, of which autograd does not know.
        """
        if self._first is None:
            return False
        weight, version, values = self._first
        return weight.grad is not None and tensor_version(weight) == version and torch.equal(sample(weight), values)

    def stepped(self) -> float:
        """1 if a weight that had a gradient has changed since, 0 if none has; UNKNOWN in steps that are not looked at."""
        if not self._weights:
            return UNKNOWN
        return float(any(tensor_version(weight) != version for weight, version in self._weights))

    def _measured(self) -> float:
        before = torch.cat([values.flatten().double() for _, _, values in self._remembered])
        now = torch.cat([gradient.flatten().double() for gradient, _, _ in self._remembered])
        largest = before.abs().argmax()
        factor = now[largest] / before[largest]
        parts = [values.numel() for _, _, values in self._remembered]
        alike = [
            (a - b * factor).abs().max() <= TOLERANCE * a.abs().max()
            for a, b in zip(now.split(parts), before.split(parts), strict=True)
        ]
        return factor.item() if all(alike) and factor > 0 and factor.isfinite() else UNKNOWN


def _is_small(gradient: Tensor | None) -> bool:
    if gradient is None or gradient.layout != torch.strided or gradient.is_inference():
        return False
    return gradient.is_floating_point() and 0 < local_shard(gradient).numel() <= LARGEST
