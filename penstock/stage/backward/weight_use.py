"""One use of a weight in a forward whose backward is split: what `W` will compute its gradient from."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _FunctionBase
from torch._C._autograd import _make_saved_tensor, _top_saved_tensors_default_hooks
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from penstock.stage.backward.rules import Formula, Gradients


class WeightUse:
    """One use of a weight: what its gradient will be computed from."""

    __slots__ = ("formula", "number", "saved", "targets", "value", "version", "views", "weight")

    def __init__(self, number: int, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.number, self.formula = number, formula
        self.value: Tensor | None = value
        self.version = value._version
        self.saved = None
        if _top_saved_tensors_default_hooks(False) is not None:  # a checkpoint gives it back only in the backward
            self.saved, self.value = _make_saved_tensor(value, is_output=False), None
        self.targets = place_of(weight), place_of(bias)  # whose gradients they are
        self.views = (_view_end(weight), None) if bias is None else (_view_end(weight), _view_end(bias))
        self.weight = bare_of(weight)

    @property
    def bytes(self) -> int:
        """Of the weight."""
        return self.weight.numel() * self.weight.element_size()

    def unpack(self) -> Tensor:
        """The saved input. Raises RuntimeError, as autograd does, if it was changed in place."""
        if self.value is None:
            assert self.saved is not None
            self.value = self.saved.unpack()
        elif self.saved is None and self.value._version != self.version:
            raise RuntimeError(
                f"the input {list(self.value.shape)} of an operation was modified by an inplace operation after it; its"
                " weight's gradient needs it as it was"
            )
        return self.value

    def alike(self, gradient: Tensor) -> Any:
        """Equal for uses of a weight, by several microbatches, that differ in their rows only."""
        formula = (self.formula.func, str(self.formula.args)) if isinstance(self.formula, partial) else self.formula
        return self.number, formula, self.targets, self.unpack().shape[1:], gradient.shape[1:]

    def unpack_and(self, keep: Any, gradients: tuple[Tensor | None]) -> None:
        """In the backward of a checkpoint, which alone gives back what was saved: unpack, then `keep` the `gradients`."""
        self.unpack()
        keep(gradients)

    def compute(self, gradient: Tensor) -> Gradients:
        """The gradients of the weight and the bias."""
        return self.formula(gradient, self.unpack(), self.weight)


Owed = tuple[WeightUse, Tensor]  # a use of a weight, and the gradient of its output


NO_VIEWS = (None, None)


def _view_end(weight: Tensor) -> GradientEdge | None:
    """For a view of a trainable parameter, its end of the graph."""
    return edge_of(weight) if weight.requires_grad and place_of(weight) is None else None


def place_of(weight: Tensor | None) -> int | None:
    """The place of a trainable parameter; None for a view of one, for a frozen one, for None."""
    return getattr(weight, "place", None)


def bare_of(weight: Any) -> Any:
    """`weight` outside the graph, None for None."""
    bare = getattr(weight, "bare", None)
    return weight.detach() if bare is None and weight is not None else bare


def edge_of(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge(tensor)`; of what an operation made without the changes of grad mode, which take longest."""
    node = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return get_gradient_edge(tensor)
    of_python = issubclass(type(node), _FunctionBase)  # such a node does not keep the graph alive, a view of its output does
    return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn if of_python else None)


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward(edges, gradients)` without its checks of shapes, which whoever calls has made.

    They cost as much as the engine itself does for a small stage, and import half a second of symbolic algebra.
    """
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
