"""The deferred weight gradients of one microbatch on one stage: uses of weights in its forward, for which `W` computes them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import StageError
from penstock.stage.backward.autograd_edges import Gradients, gradient_edge, with_gradient_callback
from penstock.stage.backward.parameter_slot import ParameterSlot
from penstock.torch_private import DisableTorchFunctionSubclass, run_backward, saved_tensor_hooks, tensor_version, view_base

WeightGradients = tuple[Tensor | None, Tensor | None]  # of the weight and the bias
Formula = Callable[[Tensor, Tensor, Tensor], WeightGradients]  # of output gradient, input, weight
AutocastCache = dict[Any, tuple[int, Tensor]]  # memory and layout of a weight -> its version, its cast
NO_VIEW_EDGES = (None, None)


class WeightUse:
    """One use of a weight by an operation, with all that the weight's gradient needs except the gradient of the output."""

    __slots__ = ("formula", "targets", "unpack_saved", "value", "version", "view_edges", "weight")

    def __init__(self, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.formula = formula
        self.value: Tensor | None = value  # the operation's input
        self.version = tensor_version(value)
        self.unpack_saved: Callable[[], Tensor] | None = None

        if (hooks := saved_tensor_hooks()) is not None:  # a checkpoint recomputes the input in the backward
            pack, unpack = hooks
            with torch.no_grad():
                self.value, self.unpack_saved = None, partial(unpack, pack(value.detach()))

        self.targets = _parameter_index(weight), _parameter_index(bias)  # the parameters whose gradients these are
        self.view_edges = (_view_edge(weight), None) if bias is None else (_view_edge(weight), _view_edge(bias))
        self.weight = _detach_current_data(weight)

    def unpack(self) -> Tensor:
        """Return the saved input. Raises RuntimeError, as autograd does, if it was changed in place."""
        if self.value is None:
            assert self.unpack_saved is not None
            self.value = self.unpack_saved()
        elif self.unpack_saved is None and tensor_version(self.value) != self.version:
            raise RuntimeError(
                f"the input {list(self.value.shape)} of an operation was modified by an inplace operation after it, but its "
                "weight's gradient needs it unchanged"
            )
        return self.value

    def unpack_and_call(self, on_gradients: Callable[[Gradients], None], gradients: Gradients) -> None:
        """Unpack inside the checkpoint's backward, the only place where it can be, then call `on_gradients(gradients)`."""
        self.unpack()
        on_gradients(gradients)

    def compute(self, gradient: Tensor) -> WeightGradients:
        """Return the gradients of the weight and the bias from the output's `gradient`."""
        return self.formula(gradient, self.unpack(), self.weight)


PendingUse = tuple[WeightUse, Tensor]  # a use of a weight, and the gradient of its output


class DeferredGradients:
    """Stand-ins for one microbatch's forward and `I`, and the weight uses and gradients that they collect for its `W`.

    `standins`: by the index of their parameter in the stage's `slots`. `autocast_cache`: shared by all microbatches of a step.
    """

    def __init__(self, slots: Sequence[ParameterSlot], standins: Mapping[int, Any], autocast_cache: AutocastCache) -> None:
        self.standins, self.autocast_cache = standins, autocast_cache
        self.has_view_uses = False  # whether an operation has ever used a view of a weight
        self.gradients: dict[WeightUse, Gradients] = {}  # of the outputs, in the order in which the backward reached them
        self._memory = {index: standin.detached.data_ptr() for index, standin in standins.items()}
        self.replacements = [(place, standin) for index, standin in standins.items() for place in slots[index].places]
        for standin in standins.values():
            standin.deferred = self

    # -- forward: called by the rules --------------------------------------------------------------------------------

    def are_standins(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Return whether both are stand-ins of this microbatch or views of one. The bias may also be frozen or None."""
        return self._is_standin(weight) and (bias is None or not bias.requires_grad or self._is_standin(bias))

    def _is_standin(self, tensor: Tensor) -> bool:
        return getattr(tensor, "deferred", None) is self or getattr(view_base(tensor), "deferred", None) is self

    def autocast_operands(self, value: Tensor, *weights: Any) -> tuple[Any, ...]:
        """Return the input, and the weights outside the graph, in the dtype in which autocast hands them to a product."""
        device = value.device.type
        if not torch.is_autocast_enabled(device) or not value.is_floating_point() or value.dtype is torch.float64:
            return value, *map(_detach_current_data, weights)
        dtype = torch.get_autocast_dtype(device)
        return value.to(dtype), *[None if weight is None else self._cast_detached(weight, dtype) for weight in weights]

    def _cast_detached(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the detached cast of `weight`, as autocast makes it: once for all microbatches, until the weight changes.

        Only casts of a parameter's memory are cached: the memory of a temporary tensor may be given to another one.
        """
        if not self._is_standin(weight):
            return weight.detach().to(dtype)
        detached = _detach_current_data(weight)
        key, version = (detached.data_ptr(), detached.shape, detached.stride(), dtype), tensor_version(detached)
        if key not in self.autocast_cache or self.autocast_cache[key][0] != version:
            self.autocast_cache[key] = version, detached.to(dtype)
        return self.autocast_cache[key][1]

    def defer(self, output: Tensor, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Note a use of `weight`, and return `output` connected so that `I` stores its gradient with the use.

        output.requires_grad (through the input)    a pre-hook of the node that made `output` stores the gradient
        not                                         `output` begins a graph, whose only purpose is to store it
        """
        use = WeightUse(formula, value, weight, bias)
        self.has_view_uses = self.has_view_uses or use.view_edges != NO_VIEW_EDGES

        on_gradients: Any = partial(self.gradients.__setitem__, use)  # autograd calls this without running any Python code
        if use.unpack_saved is not None:
            on_gradients = partial(use.unpack_and_call, on_gradients)

        if not output.requires_grad:
            return with_gradient_callback([output.detach()], on_gradients)[0]
        base = view_base(output)  # an in-place change replaces the node of a view, but not that of its base
        made = output if base is None else base
        made.grad_fn.register_prehook(on_gradients)  # type: ignore[union-attr]
        return output

    def replaced_data(self) -> dict[int, Tensor]:
        """Return what the forward has assigned to parameters (`weight.data = ..`), by index of the parameter."""
        with DisableTorchFunctionSubclass():
            return {
                index: standin.data for index, standin in self.standins.items() if standin.data_ptr() != self._memory[index]
            }

    def check_no_inner_backward(self) -> None:
        """Raise StageError if the forward has run a backward itself: its weight gradients would be lost. Called before `I`."""
        if self.gradients:
            raise StageError(
                "the forward differentiates inside (torch.autograd.grad), where a backward in two loses the weights' part: "
                "use a schedule without I and W, '1f1b' for instance"
            )

    # -- W ----------------------------------------------------------------------------------------------------------

    def pop_pending(self) -> list[PendingUse]:
        """Remove and return the uses whose weight gradients are to be computed, in the order in which `I` reached them.

        Uses through views of weights are computed at once: their gradients go to the stand-ins and become leftovers.
        """
        pending = [(use, gradient) for use, (gradient,) in self.gradients.items() if gradient is not None]
        self.gradients.clear()

        if self.has_view_uses and (through_views := [pair for pair in pending if pair[0].view_edges != NO_VIEW_EDGES]):
            self._backward_through_views(through_views)
            pending = [pair for pair in pending if pair[0].view_edges == NO_VIEW_EDGES]
        return pending

    def _backward_through_views(self, pending: list[PendingUse]) -> None:
        edges, gradients = [], []
        for use, output_gradient in pending:
            computed = use.compute(output_gradient)
            for view_edge, index, gradient in zip(use.view_edges, use.targets, computed, strict=True):
                edge = get_gradient_edge(self.standins[index]) if index is not None else view_edge
                if edge is not None and gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        run_backward(edges, gradients)

    def pop_leftovers(self, sums: dict[int, Tensor]) -> None:
        """Move the gradients that `I` left on the stand-ins to `sums`, by index of the parameter."""
        with DisableTorchFunctionSubclass():
            for index, standin in self.standins.items():
                if standin.grad is not None:
                    add_to_sum(sums, index, standin.grad)
                    standin.grad = None

    def saved_tensors(self) -> list[Tensor | None]:
        """Return what is kept in memory for `W`: inputs, gradients of outputs, and leftovers on the stand-ins."""
        with DisableTorchFunctionSubclass():
            leftovers = [standin.grad for standin in self.standins.values()]
        return [*leftovers, *(tensor for use, (gradient,) in self.gradients.items() for tensor in (use.value, gradient))]


def add_to_sum(sums: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """Add `gradient` to `sums[index]`, as a new tensor, since the summands may be used elsewhere."""
    sums[index] = sums[index] + gradient if index in sums else gradient


def _view_edge(weight: Tensor) -> GradientEdge | None:
    """Return the gradient edge of a view of a trainable parameter; None for anything else."""
    return gradient_edge(weight) if weight.requires_grad and _parameter_index(weight) is None else None


def _parameter_index(weight: Tensor | None) -> int | None:
    """Return the index of the parameter that `weight` stands in for; None for a view of one, a frozen one, None."""
    return getattr(weight, "parameter_index", None)


def _detach_current_data(weight: Any) -> Any:
    """Return `weight` detached, or None for None."""
    detached = getattr(weight, "detached", None)
    if weight is not None and (detached is None or detached.data_ptr() != weight.data_ptr()):  # a forward may set `weight.data`
        return weight.detach()
    return detached
