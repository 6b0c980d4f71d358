"""Find ranks that update their weights differently between two steps: by other multiples of their gradients, or not at all.

A list of parameters is this rank's, and so is their norm: if gradients are clipped by it, every rank trains with another
learning rate, and copies of a shared parameter drift apart. So some small gradients are remembered at the end of a step. When
the next one begins, a rank sends the number by which all of them were multiplied since; it must be the same on all ranks.

The first weight that has a gradient is remembered too: while it is unchanged, the gradients await the optimizer. So are some of
its values, since some optimizers change `.data`, without a new version of the tensor.

So are all weights, for some steps: those of an optimizer that are unchanged while another rank's change lack a call of
`optimizer.step()`. Two optimizers that take turns, as a GAN's, may have their weights on different ranks; so it is some steps.
"""

import gc
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.observers import ObservedStep, Observer, Rows
from penstock.errors import warn_user
from penstock.guards import is_power_of_two_or_zero
from penstock.guards.tensor_snapshot import RepeatedSnapshot, TensorSnapshot
from penstock.stage.dtensor import local_shard
from penstock.stage.stage import Stage
from penstock.torch_private import tensor_version

MAX_GRADIENTS, MAX_GRADIENT_ELEMENTS = 4, 2**16  # how many gradients are remembered, and up to which size
TOLERANCE = 0.02  # relative: bfloat16 has three digits
UNKNOWN = math.nan
MIN_STEPS_UNCHANGED = 8  # of weights that an optimizer has: more than the turns of a GAN's other optimizer


class UnequalUpdatesCheck(Observer):
    """Measures by what gradients of `stages` were multiplied since `record_gradients`, and whether weights have changed.

    With one rank nothing is compared. Changed gradients are compared the 1st, 2nd, 4th, .. time only: that waits for a GPU.
    """

    num_numbers = 2

    def __init__(self, stages: Collection[Stage], rank: int, num_ranks: int) -> None:
        self._stages, self._rank, self._num_ranks = stages, rank, num_ranks
        self._warned = set[str]()  # the warnings that have been given
        self._chosen = list[nn.Parameter]()  # whose gradients are remembered
        self._gradients: list[TensorSnapshot] = []
        self._num_changes = 0
        self._weight_versions: list[tuple[nn.Parameter, int]] = []  # of all that had a gradient, after steps 1, 9, 17, 33, ..
        self._num_steps = 0  # of training that have ended
        self._first_weight: nn.Parameter | None = None  # that has a gradient
        self._weight_snapshot = RepeatedSnapshot()  # of it

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Return the factor, and whether weights have changed."""
        if self._num_ranks == 1 or not step.call.is_training:
            return UNKNOWN, UNKNOWN
        return self.measure_factor(), self.weights_changed()

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Warn, once, if ranks have multiplied gradients by different numbers, or only some have changed their weights."""
        if self._num_ranks == 1:
            return
        factors = {rank: factor for rank, (factor, _) in enumerate(rows) if factor == factor}
        if factors and max(factors.values()) > min(factors.values()) * (1 + 2 * TOLERANCE):
            factor_list = ", ".join(f"by {factor:.3g} on rank {rank}" for rank, factor in factors.items())
            self._warn_once(
                "factors",
                f"since the last step gradients were multiplied {factor_list}, as clipping by the norm of a list of parameters "
                "does, which is one rank's: clip with pipe.clip_grad_norm_(max_norm), by the norm of the whole model",
            )
        flags = [flag for _, flag in rows]
        if 0.0 in flags and 1.0 in flags:
            changed, unchanged = (
                "/".join(str(rank) for rank, flag in enumerate(flags) if flag == value) for value in (1.0, 0.0)
            )
            self._warn_once(
                "steps",
                f"weights have changed on rank {changed}, but none of an optimizer on rank {unchanged}, in "
                f"{MIN_STEPS_UNCHANGED} steps or more: call optimizer.step(), and all but what prints and logs, on all ranks",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned and self._rank == 0:
            warn_user(text)
        self._warned.add(key)

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Record the gradients of a training step."""
        if step.call.is_training:
            self._num_steps += 1
            self.record_gradients()
            if self._num_steps == 1 or self._is_compared_after(self._num_steps - 1):
                weights = filter(_has_gradient, self._parameters())
                self._weight_versions = [(weight, tensor_version(weight)) for weight in weights]

    def _is_compared_after(self, num_steps: int) -> bool:
        """Whether ranks tell whether their weights have changed, when the step after this many begins."""
        return self._num_ranks > 1 and num_steps >= MIN_STEPS_UNCHANGED and is_power_of_two_or_zero(num_steps)

    def record_gradients(self) -> None:
        """Record gradients and weights. Called when a step has ended, or the pipeline has clipped the gradients."""
        if self._rank == 0:  # where `awaits_optimizer_step` is called
            self._first_weight = self._first_with_gradient()
            if self._first_weight is not None:
                self._weight_snapshot.take(self._first_weight)
        if self._num_ranks == 1:
            return

        if not self._chosen:
            small = [parameter for parameter in self._parameters() if _is_small(local_shard(parameter.grad))]
            self._chosen = list(dict.fromkeys(small))[:MAX_GRADIENTS]
        local_gradients = [local_shard(parameter.grad) for parameter in self._chosen]
        gradients = [gradient for gradient in local_gradients if _is_small(gradient)]
        self._gradients = [TensorSnapshot(gradient, tensor_version(gradient), gradient.clone()) for gradient in gradients]

    def _first_with_gradient(self) -> nn.Parameter | None:
        for stage in self._stages:
            for parameter in stage.parameters:
                if _has_gradient(parameter):
                    return parameter
        return None

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the last step; one that stages share several times."""
        return chain.from_iterable(stage.parameters for stage in self._stages)

    def measure_factor(self) -> float:
        """Return the factor; 1 if gradients are unchanged, UNKNOWN after another change, or if too few are remembered."""
        if len(self._gradients) < 2:
            return UNKNOWN
        versions = [tensor_version(snapshot.tensor) for snapshot in self._gradients]
        if versions == [snapshot.version for snapshot in self._gradients]:
            return 1.0
        self._num_changes += 1
        return self._compare_values() if is_power_of_two_or_zero(self._num_changes) else UNKNOWN

    def awaits_optimizer_step(self) -> bool:
        """Whether the last step has left gradients, and no optimizer has changed a weight since."""
        first = self._first_weight
        return first is not None and first.grad is not None and self._weight_snapshot.is_unchanged()

    def weights_changed(self) -> float:
        """Return 1 if a weight that had a gradient has changed, 0 if none of an optimizer has; else UNKNOWN."""
        if not self._weight_versions or not self._is_compared_after(self._num_steps):
            return UNKNOWN
        if any(tensor_version(weight) != version for weight, version in self._weight_versions):
            return 1.0
        return 0.0 if _an_optimizer_has_any_of([weight for weight, _ in self._weight_versions]) else UNKNOWN

    def _compare_values(self) -> float:
        """Return the number by which all remembered gradients were multiplied, read at the largest value, or UNKNOWN."""
        remembered = torch.cat([values.flatten().double() for _, _, values in self._gradients])
        current = torch.cat([gradient.flatten().double() for gradient, _, _ in self._gradients])
        largest = remembered.abs().argmax()
        factor = current[largest] / remembered[largest]

        sizes = [values.numel() for _, _, values in self._gradients]
        fits = [
            (current_values - remembered_values * factor).abs().max() <= TOLERANCE * current_values.abs().max()
            for current_values, remembered_values in zip(current.split(sizes), remembered.split(sizes), strict=True)
        ]
        return factor.item() if all(fits) and factor > 0 and factor.isfinite() else UNKNOWN


def _an_optimizer_has_any_of(weights: Sequence[nn.Parameter]) -> bool:
    """Whether the program has an optimizer of one of `weights`, however it was made. Looks at all objects of the process."""
    weight_ids = {id(weight) for weight in weights}
    optimizers: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    return any(id(weight) in weight_ids for group in groups for weight in group["params"])


def _has_gradient(weight: nn.Parameter) -> bool:
    return weight.grad is not None and not weight.is_inference()


def _is_small(gradient: Tensor | None) -> bool:
    if gradient is None or gradient.layout != torch.strided or gradient.is_inference():
        return False
    return gradient.is_floating_point() and 0 < gradient.numel() <= MAX_GRADIENT_ELEMENTS
