"""What one microbatch on one stage has put off: the uses of weights that its forward noted, their gradients owed by `W`."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.weight_use import NO_VIEWS, Formula, Owed, WeightUse, bare_of
from penstock.stage.graph import Gradients, enter
from penstock.stage.parameter_slot import ParameterSlot
from penstock.torch_private import DisableTorchFunctionSubclass, base_of, run_backward, version_of

Casts = dict[Any, tuple[int, Tensor]]  # a weight, or a view of one -> its version, and what autocast makes of it


class DeferredGradients:
    """Stand-ins for a microbatch's forward and `I`, gradients for its `W`.

    `standins`: by the index of their parameter among the stage's `slots`. `casts`: shared by all microbatches of a step.
    """

    def __init__(self, slots: Sequence[ParameterSlot], standins: Mapping[int, Any], casts: Casts) -> None:
        self.standins, self._casts = standins, casts
        self.views = False  # whether a use of a weight was ever through a view of it
        self.gradients: dict[WeightUse, Gradients] = {}  # in the order in which the backward came by
        self._uses = itertools.count()
        self.places = [(slots[index], standin) for index, standin in standins.items()]
        for standin in standins.values():
            standin.deferred = self

    # -- what the rules call ----------------------------------------------------------------------------------------

    def owns(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Whether both are stand-ins or views of one; the bias may be frozen or None."""
        return self._is_ours(weight) and (bias is None or not bias.requires_grad or self._is_ours(bias))

    def _is_ours(self, tensor: Tensor) -> bool:
        return getattr(tensor, "deferred", None) is self or getattr(base_of(tensor), "deferred", None) is self

    def operands(self, value: Tensor, *weights: Any) -> tuple[Any, ...]:
        """The input, and the weights outside the graph, as autocast would hand them to a product."""
        device = value.device.type
        if not torch.is_autocast_enabled(device) or not value.is_floating_point() or value.dtype is torch.float64:
            return value, *map(bare_of, weights)
        dtype = torch.get_autocast_dtype(device)
        return value.to(dtype), *[None if weight is None else self._as(weight, dtype) for weight in weights]

    def _as(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Only casts of what lies in a parameter's memory are kept: where a temporary tensor was, another may come to lie."""
        return self._cast(bare_of(weight), dtype) if self._is_ours(weight) else weight.detach().to(dtype)

    def _cast(self, bare: Tensor, dtype: torch.dtype) -> Tensor:
        """`bare` as autocast casts it, once for all microbatches unless it is changed in between."""
        key = bare.data_ptr(), bare.shape, bare.stride(), dtype
        version, cast = self._casts.get(key, (None, None))
        if cast is None or version != version_of(bare):
            cast = bare.to(dtype)
            self._casts[key] = version_of(bare), cast
        return cast

    def defer(self, output: Tensor, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`output`, connected so that `I` keeps its gradient for `formula`."""
        use = WeightUse(next(self._uses), formula, value, weight, bias)
        self.views = self.views or use.views != NO_VIEWS
        keep: Any = partial(self.gradients.__setitem__, use)  # no Python runs when the backward calls this
        if use.unpacked is not None:
            keep = partial(use.unpack_and, keep)
        if not output.requires_grad:
            return enter([output], keep)[0]
        output.grad_fn.register_prehook(keep)  # type: ignore[union-attr]
        return output

    # -- W ----------------------------------------------------------------------------------------------------------

    def taken(self) -> list[Owed]:
        """The uses of weights whose gradients are owed, in the order in which the backward came by; none afterwards.

        Those through views are passed on to the stand-ins at once.
        """
        owed = [(use, gradient) for use, (gradient,) in self.gradients.items() if gradient is not None]
        self.gradients.clear()
        self._uses = itertools.count()
        if self.views and (through_views := [pair for pair in owed if pair[0].views != NO_VIEWS]):
            self._pass_on(through_views)
            owed = [pair for pair in owed if pair[0].views == NO_VIEWS]
        return owed

    def _pass_on(self, owed: list[Owed]) -> None:
        edges, gradients = [], []
        for use, gradient in owed:
            for view, index, each in zip(use.views, use.targets, use.compute(gradient), strict=True):
                end = get_gradient_edge(self.standins[index]) if index is not None else view
                if end is not None and each is not None:
                    edges.append(end)
                    gradients.append(each)
        run_backward(edges, gradients)

    def held(self) -> list[Tensor | None]:
        """What is kept for `W`: inputs, gradients of outputs, and what `I` left on the stand-ins."""
        with DisableTorchFunctionSubclass():
            left = [standin.grad for standin in self.standins.values()]
        return [*left, *(each for use, (gradient,) in self.gradients.items() for each in (use.value, gradient))]

    def left(self) -> dict[int, Tensor]:
        """Index of a parameter -> the gradient that `I` left on its stand-in; taken from there."""
        left = {}
        with DisableTorchFunctionSubclass():
            for index, standin in self.standins.items():
                if standin.grad is not None:
                    left[index], standin.grad = standin.grad, None
        return left
