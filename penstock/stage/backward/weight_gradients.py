"""The weight gradients that `W` computes: which parameters get theirs together, and their sums, to the bit as autograd's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.deferred import PendingUse, add_to_sum
from penstock.stage.backward.parameter_slot import ParameterSlot
from penstock.torch_private import foreach_add, has_gradient_hooks, run_backward

GROUP_BYTES = 1 << 21  # of weights whose gradients are computed before any is added; more would only take memory
LARGE_GRADIENT_BYTES = 1 << 18  # from here on a gradient that becomes a parameter's first `.grad` is not copied for it


class WeightGradientGroup:
    """Parameters that get their gradients together: the targets of some pending uses, and those that `I` left gradients of.

    It depends on the targets of the uses only, so it serves all microbatches whose uses have the same targets.

    `use_numbers`: the positions of its uses in `pending`. `leftovers`: indices of parameters, as `slots` counts them.
    """

    def __init__(
        self,
        pending: Sequence[PendingUse],
        use_numbers: Sequence[int],
        leftovers: Sequence[int],
        slots: Sequence[ParameterSlot],
    ) -> None:
        targets = [target for number in use_numbers for target in pending[number][0].targets]
        self._use_numbers = use_numbers
        self._has_target = [target is not None for target in targets]  # which of the computed gradients are wanted
        self._targets = [target for target in targets if target is not None]
        self._parameters = {index: slots[index].parameter for index in (*leftovers, *self._targets)}
        self._needs_sums = bool(leftovers) or len(self._parameters) < len(self._targets)
        self.parameters: list[nn.Parameter] = list(self._parameters.values())
        self._edges = list(map(get_gradient_edge, self.parameters))
        self._large = [parameter for parameter in self.parameters if parameter.nbytes >= LARGE_GRADIENT_BYTES]

    def copies_no_large_gradient(self) -> bool:
        """Return whether `accumulate` makes no copy of a large gradient.

        It would copy one that becomes a parameter's first `.grad`, because this function's caller still refers to it.
        """
        return all(parameter.grad is not None for parameter in self._large)

    def compute(self, pending: Sequence[PendingUse], leftovers: dict[int, Tensor]) -> list[Tensor]:
        """Return the gradients of the parameters, in their order. What it uses of `leftovers` is removed from there."""
        uses = [pending[number] for number in self._use_numbers]
        computed: Any = chain.from_iterable([use.compute(gradient) for use, gradient in uses])
        gradients = list(compress(computed, self._has_target))
        return self._sum_by_parameter(gradients, leftovers) if self._needs_sums else gradients

    def _sum_by_parameter(self, gradients: Sequence[Tensor], leftovers: dict[int, Tensor]) -> list[Tensor]:
        """Sum in the order of the uses, as autograd does.

        Where autocast has cast a weight, its gradients are summed in the dtype of the cast; this sum is one summand of the
        parameter's, in the place of the last of them. The parameter's summands are in its `grad_dtype`.
        """
        sums, cast_sums = dict[int, Tensor](), dict[int, Tensor]()
        pairs = list(zip(self._targets, gradients, strict=True))
        is_cast = [gradient.dtype != self._parameters[index].dtype for index, gradient in pairs]
        last_cast = {index: place for place, index in enumerate(self._targets) if is_cast[place]}

        for place, (index, gradient) in enumerate(pairs):
            parameter = self._parameters[index]
            if is_cast[place]:
                add_to_sum(cast_sums, index, gradient)
                if last_cast[index] != place:
                    continue
                gradient = cast_sums[index].to(parameter.dtype)
            add_to_sum(sums, index, gradient.to(parameter.grad_dtype or gradient.dtype))
        for index in leftovers.keys() & self._parameters.keys():
            add_to_sum(sums, index, leftovers.pop(index))
        return [sums[index] for index in self._parameters]

    def accumulate(self, gradients: list[Tensor], run_all_hooks: bool) -> None:
        """Add `gradients` to the parameters' `.grad`.

        One fused addition does it if every parameter has a `.grad` already and none has hooks; else autograd does it.
        `run_all_hooks`: something other than hooks of the parameters waits for the gradients, as DistributedDataParallel does.
        """
        sums = [
            parameter.grad for parameter in self.parameters if _is_dense(parameter.grad) and not has_gradient_hooks(parameter)
        ]
        if len(sums) < len(self.parameters) or run_all_hooks or not all(map(_is_dense, gradients)):
            run_backward(self._edges, gradients)
        else:
            foreach_add(sums, gradients)


def _is_dense(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.layout == torch.strided


def group_parameters(
    pending: Sequence[PendingUse], leftovers: Sequence[int], slots: Sequence[ParameterSlot]
) -> Iterator[WeightGradientGroup]:
    """Yield groups of about `GROUP_BYTES`. One of them has all parameters whose gradients come from several sources."""
    num_sources = Counter(chain(leftovers, *[use.targets for use, _ in pending]))
    several_sources, one_source, size = list[int](), list[int](), 0

    for number, (use, _) in enumerate(pending):
        if any(target is not None and num_sources[target] > 1 for target in use.targets):
            several_sources.append(number)
            continue
        one_source.append(number)
        size += use.weight.nbytes
        if size >= GROUP_BYTES:
            yield WeightGradientGroup(pending, one_source, (), slots)
            one_source, size = [], 0

    if several_sources or leftovers:
        yield WeightGradientGroup(pending, several_sources, leftovers, slots)
    if one_source:
        yield WeightGradientGroup(pending, one_source, (), slots)
