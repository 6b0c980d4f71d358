"""Which parameters are handed their gradients together in `W`, and how those are summed: to the bit as autograd sums them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.deferred import Owed, add
from penstock.stage.parameter_slot import ParameterSlot
from penstock.torch_private import foreach_add, has_gradient_hooks, run_backward

TOGETHER = 1 << 21  # bytes of gradients that are handed over at once; more would only take memory
COPIED = 1 << 18  # bytes of a gradient that may be copied to become a parameter's first `.grad`


class Group:
    """The parameters that some of a microbatch's `uses` are of, and those that `I` has `left` gradients of."""

    def __init__(self, owed: Sequence[Owed], uses: Sequence[int], left: Sequence[int], slots: Sequence[ParameterSlot]) -> None:
        targets = [target for number in uses for target in owed[number][0].targets]
        self._uses = uses
        self._wanted = [target is not None for target in targets]  # of what the uses compute
        self._targets = [target for target in targets if target is not None]
        self._parameters = {index: slots[index].parameter for index in (*left, *self._targets)}
        self._summed = bool(left) or len(self._parameters) < len(self._targets)  # a gradient may have several sources
        self.parameters: list[nn.Parameter] = list(self._parameters.values())
        self.ends = list(map(get_gradient_edge, self.parameters))
        self._large = [parameter for parameter in self.parameters if parameter.nbytes >= COPIED]

    def may_copy(self) -> bool:
        """Whether no large gradient would have to be copied, because somebody still holds it, to be a parameter's first."""
        return all(parameter.grad is not None for parameter in self._large)

    def hand_over(self, gradients: list[Tensor], listened: bool) -> None:
        """Give the parameters their `gradients`: all in one addition, where each has a sum already and nobody listens."""
        sums = [each.grad for each in self.parameters if _is_plain(each.grad) and not has_gradient_hooks(each)]
        if len(sums) < len(self.parameters) or listened or not all(map(_is_plain, gradients)):
            run_backward(self.ends, gradients)
        else:
            foreach_add(sums, gradients)

    def gradients(self, owed: Sequence[Owed], left: dict[int, Tensor]) -> list[Tensor]:
        """Of the parameters, from what a microbatch owes them and what `I` has `left`."""
        mine = [owed[number] for number in self._uses]
        computed: Any = chain.from_iterable([use.compute(gradient) for use, gradient in mine])
        arrived = list(compress(computed, self._wanted))
        return self._sums(arrived, left) if self._summed else arrived

    def _sums(self, arrived: Sequence[Tensor], left: dict[int, Tensor]) -> list[Tensor]:
        """In the order of arrival. What autocast had cast is summed as it is, and arrives with the last of it."""
        sums, casts = dict[int, Tensor](), dict[int, Tensor]()
        is_cast = [each.dtype != self._parameters[index].dtype for index, each in zip(self._targets, arrived, strict=True)]
        last = {index: place for place, index in enumerate(self._targets) if is_cast[place]}
        for place, (index, gradient) in enumerate(zip(self._targets, arrived, strict=True)):
            add(casts if is_cast[place] else sums, index, gradient)
            if last.get(index) == place:
                add(sums, index, casts[index].to(self._parameters[index].dtype))
        for index in left.keys() & self._parameters.keys():
            add(sums, index, left.pop(index))
        return [sums[index] for index in self._parameters]


def _is_plain(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.layout == torch.strided


def grouped(owed: Sequence[Owed], left: Sequence[int], slots: Sequence[ParameterSlot]) -> Iterator[Group]:
    """Groups of about `TOGETHER` bytes; one of them has all the parameters whose gradients have several sources."""
    sources = Counter(chain(left, *[use.targets for use, _ in owed]))
    summed, uses, size = list[int](), list[int](), 0
    for number, (use, _) in enumerate(owed):
        if any(target is not None and sources[target] > 1 for target in use.targets):
            summed.append(number)
            continue
        uses.append(number)
        size += use.weight.nbytes
        if size >= TOGETHER:
            yield Group(owed, uses, (), slots)
            uses, size = [], 0
    if summed or left:
        yield Group(owed, summed, left, slots)
    if uses:
        yield Group(owed, uses, (), slots)
