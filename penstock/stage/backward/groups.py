"""Which parameters are handed their gradients together in `W`, and how those are summed: to the bit as autograd sums them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.weight_use import Owed
from penstock.stage.parameter_slot import ParameterSlot

TOGETHER = 1 << 21  # bytes of gradients that are handed over at once; more would only take memory
COPIED = 1 << 18  # bytes of a gradient that may be copied to become a parameter's first `.grad`


class Group:
    """The parameters that some of a microbatch's `uses` are of; `summed` if a gradient may have several sources."""

    def __init__(self, owed: Sequence[Owed], uses: Sequence[int], left: Sequence[int], slots: Sequence[ParameterSlot]) -> None:
        targets = [target for number in uses for target in owed[number][0].targets]
        self._uses = uses
        self._wanted = [target is not None for target in targets]  # of what the uses compute
        self._targets = [target for target in targets if target is not None]
        self._indices = list(dict.fromkeys((*left, *self._targets)))
        self._dtypes = {index: slots[index].parameter.dtype for index in self._indices}
        self._summed = bool(left) or len(self._indices) < len(self._targets)
        self.parameters: list[nn.Parameter] = [slots[index].parameter for index in self._indices]
        self.ends = list(map(get_gradient_edge, self.parameters))
        self._large = [parameter for parameter in self.parameters if parameter.nbytes >= COPIED]

    def may_copy(self) -> bool:
        """Whether no large gradient would have to be copied, because somebody still holds it, to be a parameter's first."""
        return all(parameter.grad is not None for parameter in self._large)

    def gradients(self, owed: Sequence[Owed], left: dict[int, Tensor]) -> list[Tensor]:
        """Of the parameters, from what a microbatch owes them and what `I` has `left`."""
        mine = [owed[number] for number in self._uses]
        computed: Iterable[Any] = compress(chain.from_iterable([use.compute(each) for use, each in mine]), self._wanted)
        return self._sums(computed, mine, left) if self._summed else list(computed)

    def _sums(self, computed: Iterable[Tensor], owed: Sequence[Owed], left: dict[int, Tensor]) -> list[Tensor]:
        """In the order of arrival. What autocast had cast is summed as it is, and arrives with the last of it."""
        coming = Counter(target for use, gradient in owed if gradient.dtype != use.weight.dtype for target in use.targets)
        sums, casts = dict[int, Tensor](), dict[int, Tensor]()
        for index, each in zip(self._targets, computed, strict=True):
            gradient = each
            if each.dtype != self._dtypes[index]:
                casts[index] = casts[index] + each if index in casts else each
                coming[index] -= 1
                if coming[index]:
                    continue
                gradient = casts[index].to(self._dtypes[index])
            sums[index] = sums[index] + gradient if index in sums else gradient
        for index in left.keys() & self._dtypes.keys():
            mine = left.pop(index)
            sums[index] = mine + sums[index] if index in sums else mine
        return [sums[index] for index in self._indices]


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


def sum_of(gradients: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Index of a parameter -> the sum over several microbatches."""
    sums: dict[int, Tensor] = {}
    for more in gradients:
        for index, gradient in more.items():
            sums[index] = sums[index] + gradient if index in sums else gradient
    return sums


def hand_over(compute: Callable[[], Sequence[Tensor]], parameters: Sequence[nn.Parameter]) -> Tensor:
    """An empty tensor whose backward gives the `parameters` the gradients that `compute` returns then, held by nobody else."""
    return _HandOver.apply(compute, *parameters)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.compute()
