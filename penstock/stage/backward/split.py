"""The backward in two: `I`, the input's gradient now, and `W`, the weights' gradients later.

`I` leaves on the stand-ins of a microbatch (`standins.py`) what it knows of the weights' gradients. `W` hands each parameter
the sum of its gradients, once, in the order in which a full backward would have summed them (but what `I` left is one
summand), through the parameter's own end of the autograd graph: hooks, and whoever else listens there, as
DistributedDataParallel does, see what they see in a full backward. Where neither is, gradients are added to the sums so far.
No graph is walked and none is retained.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.deferred import Casts, DeferredGradients, Owed, WeightUse, joined
from penstock.stage.backward.groups import Group, grouped
from penstock.stage.backward.rules import PRODUCTS
from penstock.stage.backward.standins import stand_in
from penstock.stage.parameter_slot import ParameterSlot
from penstock.torch_private import has_gradient_hooks, is_compiled, run_backward

SMALL = 1 << 18  # products in a weight's gradient; to put off one takes about as long as so many
Expect = Callable[[Sequence[Tensor]], None]


class Splitter:
    """The parameters of a stage whose backward is split, and a stock of stand-ins for them.

    `merge`: products add to the gradient so far as they go, where no hook waits for it. The sum's order changes.
    `shared`: parameters that other stages have too; they get their gradients in `I`.
    `listened`: somebody other than hooks of parameters waits for their gradients.
    `in_order`: the microbatches' `W` come in the order of their `I`. Then gradients that would cost less than to put them off
    reach their parameters in `I`, with the same bits, from the second step on.
    """

    def __init__(
        self,
        module: nn.Module,
        merge: bool = False,
        shared: Collection[nn.Parameter] = (),
        in_order: bool = False,
        listened: bool = False,
    ) -> None:
        self.module, self._listened = module, listened
        self.merge, self.in_order = merge and not listened, in_order and not listened
        self.casts: Casts = {}  # of this step
        self.tied = False  # whether some parameter is in several places
        self._shared = {id(parameter) for parameter in shared}
        self._slots: list[ParameterSlot] = []
        self._identities: list[Any] = []
        self._stock: list[DeferredGradients] = []
        self._groups: dict[Any, list[Group]] = {}  # for uses of the same parameters in the same order
        self._active: Sequence[int] = ()  # those of the slots that get stand-ins
        self._worth: Sequence[int] | None = ()  # those that get them from the next step on; None until that is known

    def refresh(self, every: Sequence[ParameterSlot]) -> None:
        """Before a step: `every` parameter of the module, as it is now. It may have been changed, frozen, replaced or moved."""
        self.casts.clear()
        self.tied = any(len(slot.places) > 1 for slot in every)
        compiled = [each for each in self.module.modules() if is_compiled(each)]  # which is bound to the parameters themselves
        bound = self._shared.union(id(parameter) for each in compiled for parameter in each.parameters())
        trained = [slot for slot in every if type(slot.parameter) is nn.Parameter and slot.parameter.requires_grad]
        slots = [slot for slot in trained if id(slot.parameter) not in bound]
        if (identities := [slot.identity() for slot in slots]) != self._identities:
            self._slots, self._identities, self._stock, self._groups = slots, identities, [], {}
            self._active = range(len(slots))
            self._worth = None if self.in_order and not self.merge else self._active
        elif self._worth is not None and len(self._worth) < len(self._active):
            self._active, self._stock = self._worth, []

    def begin(self) -> DeferredGradients | None:
        """For one microbatch; None if nothing of it is to be put off."""
        if self._stock or not self._active:
            return self._stock.pop() if self._stock else None
        standins = {index: stand_in(self._slots[index].parameter, index) for index in self._active}
        return DeferredGradients(self._slots, standins, self.casts)

    def hand_on(self, deferred: DeferredGradients) -> None:
        """After the forward: values that it has put in the place of a stand-in's are the parameter's."""
        if replaced := deferred.replaced():
            for index, values in replaced.items():
                self._slots[index].parameter.data = values
            self.casts, self._stock = {}, []  # of the memory that was

    def end(self, deferred: Sequence[DeferredGradients], last: bool = False, expect: Expect | None = None) -> None:
        """`W` of one microbatch, or of several as one: hand every parameter the sum of its gradients.

        `deferred` is empty if `I` has handed over all. `last`: no other follows in this step. `expect` is called before the
        gradients reach the parameters, with tensors that depend on those which get one.
        """
        if not deferred and expect is None:
            return
        owed, left = self._due(deferred, self._stock if last else [])
        groups = self._groups_of(owed, left)
        if expect is None:  # less work, where no gradient must be copied
            for group in [group for group in groups if group.may_copy()]:
                group.hand_over(group.gradients(owed, left), self._listened)
                groups.remove(group)
        with torch.enable_grad():
            ends = [_HandOver.apply(partial(group.gradients, owed, left), *group.parameters) for group in groups]
        gradients = list(ends)
        if expect is not None:
            others = self._reached_in_i()
            gradients += map(torch.zeros_like, others)
            ends += others
            expect(ends)
        if ends:
            run_backward([get_gradient_edge(end) for end in ends], gradients)
        self._stock += [each for each in deferred if each.casts is self.casts]

    def _due(
        self, deferred: Sequence[DeferredGradients], others: Sequence[DeferredGradients]
    ) -> tuple[list[Owed], dict[int, Tensor]]:
        """Uses whose gradients are to be computed, and what `I` left; `others` may still have some that a module kept."""
        owed = [each.taken() for each in deferred]
        if self._worth is None and deferred:
            self._worth = self._judged(deferred[0], owed[0])
        uses = owed[0] if len(owed) == 1 else joined(owed)
        uses += itertools.chain.from_iterable(each.taken() for each in others)
        left = dict[int, Tensor]()
        for each in (*deferred, *others):
            each.take_left(left)
        if self.merge:
            uses = [pair for pair in uses if not self._added_to_sum(*pair)]
        return uses, left

    def _judged(self, deferred: DeferredGradients, owed: Sequence[Owed]) -> Sequence[int]:
        """The parameters whose gradients are worth being put off, by what the `W` of one microbatch finds.

        Those with hooks of the user's are: what they do belongs to `W`.
        """
        if deferred.views:
            return self._active
        work: Counter[int | None] = Counter()
        for use, gradient in owed:
            work[use.targets[0]] += gradient.numel() * (use.weight.numel() // len(use.weight))
        hooked = {index for index, slot in enumerate(self._slots) if has_gradient_hooks(slot.parameter)}
        large = [use.targets for use, _ in owed if work[use.targets[0]] >= SMALL or hooked.intersection(use.targets)]
        return sorted(index for index in hooked.union(*large) if index is not None)

    def _groups_of(self, owed: Sequence[Owed], left: dict[int, Tensor]) -> list[Group]:
        key = tuple([use.targets for use, _ in owed]), tuple(left)
        if key not in self._groups:
            self._groups[key] = list(grouped(owed, tuple(left), self._slots))
        return list(self._groups[key])

    def _reached_in_i(self) -> list[nn.Parameter]:
        """Parameters that got their gradients in `I`: who listens is to hear of them too."""
        mine = {id(slot.parameter) for slot in self._slots}
        return [each for each in self.module.parameters() if id(each) not in mine and each.grad is not None]

    def _added_to_sum(self, use: WeightUse, gradient: Tensor) -> bool:
        """Whether the weight's gradient could be, and so was, added in the product itself."""
        index, _ = use.targets
        factors = PRODUCTS.get(use.formula)
        if factors is None or index is None:
            return False
        weight = self._slots[index].parameter
        if weight.grad is None or gradient.dtype != weight.dtype or has_gradient_hooks(weight):
            return False
        with torch.no_grad():
            weight.grad.addmm_(*factors(gradient, use.unpack()))
        return True


class _HandOver(torch.autograd.Function):
    """An empty tensor whose backward gives `parameters` the gradients that `compute` returns then, held by nobody else."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.compute()
