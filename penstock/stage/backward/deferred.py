"""What one microbatch on one stage has put off: the uses of weights that its forward noted, their gradients owed by `W`."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import StageError
from penstock.stage.autograd_edges import Gradients, gradient_edge, with_gradient_callback
from penstock.stage.parameter_slot import ParameterSlot
from penstock.torch_private import DisableTorchFunctionSubclass, run_backward, saved_tensor_hooks, tensor_version, view_base

WeightGradients = tuple[Tensor | None, Tensor | None]  # of the weight and the bias
Formula = Callable[[Tensor, Tensor, Tensor], WeightGradients]  # of output gradient, input, weight
Casts = dict[Any, tuple[int, Tensor]]  # a weight, or a view of one -> its version, and what autocast makes of it
NO_VIEWS = (None, None)


class WeightUse:
    """One use of a weight: what its gradient will be computed from."""

    __slots__ = ("formula", "number", "targets", "unpacked", "value", "version", "views", "weight")

    def __init__(self, number: int, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.number, self.formula = number, formula
        self.value: Tensor | None = value
        self.version = tensor_version(value)
        self.unpacked: Callable[[], Tensor] | None = None
        if (hooks := saved_tensor_hooks()) is not None:  # a checkpoint gives it back only in the backward
            pack, unpack = hooks
            with torch.no_grad():
                self.value, self.unpacked = None, partial(unpack, pack(value.detach()))
        self.targets = _index_of(weight), _index_of(bias)  # whose gradients they are
        self.views = (_view_end(weight), None) if bias is None else (_view_end(weight), _view_end(bias))
        self.weight = _bare_of(weight)

    def unpack(self) -> Tensor:
        """The saved input. Raises RuntimeError, as autograd does, if it was changed in place."""
        if self.value is None:
            assert self.unpacked is not None
            self.value = self.unpacked()
        elif self.unpacked is None and tensor_version(self.value) != self.version:
            raise RuntimeError(
                f"the input {list(self.value.shape)} of an operation was modified by an inplace operation after it; its"
                " weight's gradient needs it as it was"
            )
        return self.value

    def unpack_and(self, keep: Callable[[Gradients], None], gradients: Gradients) -> None:
        """In the backward of a checkpoint, which alone gives back what was saved: unpack, then `keep` the `gradients`."""
        self.unpack()
        keep(gradients)

    def compute(self, gradient: Tensor) -> WeightGradients:
        """The gradients of the weight and the bias."""
        return self.formula(gradient, self.unpack(), self.weight)


Owed = tuple[WeightUse, Tensor]  # a use of a weight, and the gradient of its output


def joined(owed: Sequence[Sequence[Owed]]) -> list[Owed]:
    """The uses of several microbatches, those of the same operation of the forward as one over the joined rows."""
    alike: dict[Any, list[Owed]] = {}
    for use, gradient in itertools.chain.from_iterable(owed):
        formula = (use.formula.func, str(use.formula.args)) if isinstance(use.formula, partial) else use.formula
        key = use.number, formula, use.targets, use.unpack().shape[1:], gradient.shape[1:]
        alike.setdefault(key, []).append((use, gradient))
    return [group[0] if len(group) == 1 else _join(group) for group in alike.values()]


def _join(group: Sequence[Owed]) -> Owed:
    use = copy.copy(group[0][0])
    use.value = torch.cat([each.unpack() for each, _ in group])
    use.version = tensor_version(use.value)
    return use, torch.cat([gradient for _, gradient in group])


class DeferredGradients:
    """Stand-ins for a microbatch's forward and `I`, gradients for its `W`.

    `standins`: by the index of their parameter among the stage's `slots`. `casts`: shared by all microbatches of a step.
    """

    def __init__(self, slots: Sequence[ParameterSlot], standins: Mapping[int, Any], casts: Casts) -> None:
        self.standins, self.casts = standins, casts
        self.views = False  # whether a use of a weight was ever through a view of it
        self.gradients: dict[WeightUse, Gradients] = {}  # in the order in which the backward came by
        self._uses = itertools.count()
        self._memory = {index: standin.bare.data_ptr() for index, standin in standins.items()}
        self.places = [(place, standin) for index, standin in standins.items() for place in slots[index].places]
        for standin in standins.values():
            standin.deferred = self

    # -- what the rules call ----------------------------------------------------------------------------------------

    def owns(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Whether both are stand-ins or views of one; the bias may be frozen or None."""
        return self._is_ours(weight) and (bias is None or not bias.requires_grad or self._is_ours(bias))

    def _is_ours(self, tensor: Tensor) -> bool:
        return getattr(tensor, "deferred", None) is self or getattr(view_base(tensor), "deferred", None) is self

    def operands(self, value: Tensor, *weights: Any) -> tuple[Any, ...]:
        """The input, and the weights outside the graph, as autocast would hand them to a product."""
        device = value.device.type
        if not torch.is_autocast_enabled(device) or not value.is_floating_point() or value.dtype is torch.float64:
            return value, *map(_bare_of, weights)
        dtype = torch.get_autocast_dtype(device)
        return value.to(dtype), *[None if weight is None else self._cast(weight, dtype) for weight in weights]

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """As autocast casts it: once for all microbatches, unless it is changed in between.

        Only casts of what lies in a parameter's memory are kept: where a temporary tensor was, another may come to lie.
        """
        if not self._is_ours(weight):
            return weight.detach().to(dtype)
        bare = _bare_of(weight)
        key, version = (bare.data_ptr(), bare.shape, bare.stride(), dtype), tensor_version(bare)
        if key not in self.casts or self.casts[key][0] != version:
            self.casts[key] = version, bare.to(dtype)
        return self.casts[key][1]

    def defer(self, output: Tensor, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`output`, connected so that `I` keeps its gradient for `formula`."""
        use = WeightUse(next(self._uses), formula, value, weight, bias)
        self.views = self.views or use.views != NO_VIEWS
        keep: Any = partial(self.gradients.__setitem__, use)  # no Python runs when the backward calls this
        if use.unpacked is not None:
            keep = partial(use.unpack_and, keep)
        if not output.requires_grad:
            return with_gradient_callback([output.detach()], keep)[0]
        made = (
            output if (base := view_base(output)) is None else base
        )  # whose node stays what it is when a view changes in place
        made.grad_fn.register_prehook(keep)  # type: ignore[union-attr]
        return output

    def replaced(self) -> dict[int, Tensor]:
        """What the forward has put in the place of parameters' memory (`weight.data = ..`), by index of the parameter."""
        with DisableTorchFunctionSubclass():
            return {index: each.data for index, each in self.standins.items() if each.data_ptr() != self._memory[index]}

    def check_untouched(self) -> None:
        """Before `I`. Raises StageError if the forward has differentiated inside: the weights' part in that would be lost."""
        if self.gradients:
            raise StageError(
                "the forward differentiates inside (torch.autograd.grad), where a backward in two loses the weights' part: "
                "use a schedule without I and W, '1f1b' for instance"
            )

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

    def take_left(self, sums: dict[int, Tensor]) -> None:
        """Add to `sums` the gradients that `I` left on the stand-ins, by index of the parameter; none are left afterwards."""
        with DisableTorchFunctionSubclass():
            for index, standin in self.standins.items():
                if standin.grad is not None:
                    add(sums, index, standin.grad)
                    standin.grad = None


def add(sums: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """Add to one of the `sums`: as a new tensor, since others may hold the ones that are added."""
    sums[index] = sums[index] + gradient if index in sums else gradient


def _view_end(weight: Tensor) -> GradientEdge | None:
    """For a view of a trainable parameter, its end of the graph."""
    return gradient_edge(weight) if weight.requires_grad and _index_of(weight) is None else None


def _index_of(weight: Tensor | None) -> int | None:
    """Which of the stage's parameters `weight` stands in for; None for a view of one, for a frozen one, for None."""
    return getattr(weight, "parameter_index", None)


def _bare_of(weight: Any) -> Any:
    """`weight` outside the graph, None for None."""
    bare = getattr(weight, "bare", None)
    if weight is not None and (bare is None or bare.data_ptr() != weight.data_ptr()):  # a forward may set `weight.data`
        return weight.detach()
    return bare
