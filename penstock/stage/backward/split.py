"""The backward in two: `I`, the input's gradient now, and `W`, the weights' gradients later.

    forward   stand-ins take the parameters' places (`standins.py`)
                  y = linear(x, w)      a rule calls `linear` with w outside the graph, and notes a use: x, w and a formula
    I         the backward of a graph in which the weights are not
                  dL/dy at y            is stored with the use: the two are pending
                  dL/dx                 is the gradient of the stage's input
                  no rule (norms, ..)   autograd leaves the gradient on the stand-in: a leftover
    W         gradient = formula(dL/dy, x, w) for each pending use; summed by parameter, with the leftover
              -> parameter.grad, in one of two ways:
                  added                 to a `.grad` that exists, a group of parameters at once
                  through autograd      first gradients, without a copy; and parameters with hooks

Each parameter's gradients are summed in the order in which a whole backward sums them, but leftovers are one summand. They
reach the parameter once, through its own edge of the autograd graph: hooks and DistributedDataParallel see what they see in a
whole backward. No graph is walked and none is retained.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.deferred import AutocastCache, DeferredGradients, PendingUse
from penstock.stage.backward.parameter_slot import ParameterSlot
from penstock.stage.backward.standins import make_standin
from penstock.stage.backward.weight_gradients import WeightGradientGroup, group_parameters
from penstock.torch_private import has_gradient_hooks, is_compiled, run_backward

MIN_DEFERRED_MULTIPLICATIONS = 1 << 18  # in a weight's gradient; putting one off takes about as long as these
BeforeAccumulation = Callable[[Sequence[Tensor]], None]


class BackwardSplitter:
    """Splits the backward of one stage: gives its microbatches their stand-ins, and runs their `W`.

    `shared`: parameters that other stages have too. They get their gradients in `I`.
    `in_order`: the microbatches' `W` come in the order of their `I`. Then gradients that are cheaper to compute than to defer
    reach their parameters in `I`, with the same bits, from the second step on.
    `hooks_gradients`: something other than hooks of the parameters waits for their gradients, as DistributedDataParallel does.
    """

    def __init__(self, module: nn.Module, shared: Collection[nn.Parameter], in_order: bool, hooks_gradients: bool) -> None:
        self.module, self._hooks_gradients = module, hooks_gradients
        self.in_order = in_order and not hooks_gradients
        self.autocast_cache: AutocastCache = {}  # of this step
        self.has_tied_parameters = False  # whether a parameter has several places in the module
        self._shared = {id(parameter) for parameter in shared}
        self._step_slots: Sequence[ParameterSlot] = []  # all of this step
        self._unread_slots: Sequence[ParameterSlot] | None = None  # the same, until a backward is split
        self._slots: list[ParameterSlot] = []
        self._slot_keys: list[Any] = []
        self._free: list[DeferredGradients] = []  # with stand-ins, for the next microbatches
        self._groups: dict[Any, list[WeightGradientGroup]] = {}  # targets of the uses -> groups
        self._deferred: Sequence[int] = ()  # the slots that get stand-ins in this step
        self._deferred_next: Sequence[int] | None = ()  # the slots that get them from the next step on; None: to be found

    def begin_step(self, slots: Sequence[ParameterSlot]) -> None:
        """Read all parameters of the module anew: since the last step they may have been frozen, replaced or moved."""
        self.autocast_cache.clear()
        if slots is not self._step_slots:
            self.has_tied_parameters = any(len(slot.places) > 1 for slot in slots)
        self._step_slots = self._unread_slots = slots

    def _read_slots(self, slots: Sequence[ParameterSlot]) -> None:
        """Find which parameters get stand-ins, before the first backward of this step that is split."""
        self._unread_slots = None

        # The code of a compiled module reads the parameters themselves.
        compiled = [module for module in self.module.modules() if is_compiled(module)]
        excluded = self._shared.union(id(parameter) for module in compiled for parameter in module.parameters())
        trained = [slot for slot in slots if type(slot.parameter) is nn.Parameter and slot.parameter.requires_grad]
        included = [slot for slot in trained if id(slot.parameter) not in excluded]

        if (slot_keys := [slot.cache_key() for slot in included]) != self._slot_keys:
            self._slots, self._slot_keys, self._free, self._groups = included, slot_keys, [], {}
            self._deferred = range(len(included))
            self._deferred_next = None if self.in_order else self._deferred
        elif self._deferred_next is not None and len(self._deferred_next) < len(self._deferred):
            self._deferred, self._free = self._deferred_next, []

    def begin_microbatch(self) -> DeferredGradients | None:
        """Return stand-ins for a microbatch's forward, `I` and `W`; None if nothing is to be deferred."""
        if self._unread_slots is not None:
            self._read_slots(self._unread_slots)
        if self._free or not self._deferred:
            return self._free.pop() if self._free else None
        standins = {index: make_standin(self._slots[index].parameter, index) for index in self._deferred}
        return DeferredGradients(self._slots, standins, self.autocast_cache)

    def write_back_replaced_data(self, deferred: DeferredGradients) -> None:
        """Assign to the parameters what the forward has assigned to their stand-ins (`weight.data = ..`)."""
        if replaced := deferred.replaced_data():
            for index, values in replaced.items():
                self._slots[index].parameter.data = values
            self.autocast_cache, self._free = {}, []  # they are for the former memory

    def run_weight_backward(
        self, deferred: DeferredGradients | None, is_last: bool, before_accumulation: BeforeAccumulation | None
    ) -> None:
        """Run `W` of one microbatch: add the sum of its gradients to every parameter.

        `deferred`: None if nothing was deferred. `is_last`: no other backward follows in this step.
        `before_accumulation`: is called before the gradients reach the parameters, with tensors whose graph has all parameters
        that get one.
        """
        if deferred is None and before_accumulation is None:
            return

        # 1. What is to be computed, in groups. After the last `I`, stand-ins in `_free` may have some that the module kept.
        pending, leftovers = self._pop_pending_and_leftovers(deferred, self._free if is_last else [])
        groups = self._cached_groups(pending, leftovers)

        # 2. The short way: gradients that can be added with no copy of a large one.
        if before_accumulation is None:
            for group in [group for group in groups if group.copies_no_large_gradient()]:
                group.accumulate(group.compute(pending, leftovers), self._hooks_gradients)
                groups.remove(group)

        # 3. The rest through autograd, which computes group by group, and takes over gradients that nothing else refers to.
        with torch.enable_grad():
            roots = [
                _ComputeGradientsFunction.apply(partial(group.compute, pending, leftovers), *group.parameters)
                for group in groups
            ]
        root_gradients = list(roots)
        if before_accumulation is not None:
            not_deferred = self._parameters_with_gradients_from_i()
            root_gradients += map(torch.zeros_like, not_deferred)
            roots += not_deferred
            before_accumulation(roots)
        if roots:
            run_backward([get_gradient_edge(root) for root in roots], root_gradients)

        # 4. The stand-ins serve again, unless the memory that they stand for was replaced.
        if deferred is not None and deferred.autocast_cache is self.autocast_cache:
            self._free.append(deferred)

    def _pop_pending_and_leftovers(
        self, deferred: DeferredGradients | None, unused: Sequence[DeferredGradients]
    ) -> tuple[list[PendingUse], dict[int, Tensor]]:
        """Return the uses whose gradients are to be computed, and the leftovers by index of the parameter."""
        pending, leftovers = list[PendingUse](), dict[int, Tensor]()
        if deferred is not None:
            pending = deferred.pop_pending()
            deferred.pop_leftovers(leftovers)
            if self._deferred_next is None:
                self._deferred_next = self._parameters_worth_deferring(deferred, pending)

        for standins in unused:
            pending += standins.pop_pending()
            standins.pop_leftovers(leftovers)
        return pending, leftovers

    def _parameters_worth_deferring(self, deferred: DeferredGradients, pending: Sequence[PendingUse]) -> Sequence[int]:
        """Return the indices of the parameters to defer from the next step on, by what the first `W` has to compute.

        Parameters with the user's hooks are among them: what a hook does belongs to `W`.
        """
        if deferred.has_view_uses:
            return self._deferred
        multiplications: Counter[int | None] = Counter()
        for use, gradient in pending:
            multiplications[use.targets[0]] += gradient.numel() * (use.weight.numel() // len(use.weight))

        hooked = {index for index, slot in enumerate(self._slots) if has_gradient_hooks(slot.parameter)}
        worth = [
            use.targets
            for use, _ in pending
            if multiplications[use.targets[0]] >= MIN_DEFERRED_MULTIPLICATIONS or hooked.intersection(use.targets)
        ]
        return sorted(index for index in hooked.union(*worth) if index is not None)

    def _cached_groups(self, pending: Sequence[PendingUse], leftovers: dict[int, Tensor]) -> list[WeightGradientGroup]:
        key = tuple([use.targets for use, _ in pending]), tuple(leftovers)
        if key not in self._groups:
            self._groups[key] = list(group_parameters(pending, tuple(leftovers), self._slots))
        return list(self._groups[key])

    def _parameters_with_gradients_from_i(self) -> list[nn.Parameter]:
        """Return the parameters without stand-ins that have a gradient: they go to `before_accumulation` too."""
        deferred = {id(slot.parameter) for slot in self._slots}
        return [
            parameter for parameter in self.module.parameters() if id(parameter) not in deferred and parameter.grad is not None
        ]


class _ComputeGradientsFunction(torch.autograd.Function):
    """An empty tensor whose backward calls `compute` and gives `parameters` the gradients that it returns."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.compute()
