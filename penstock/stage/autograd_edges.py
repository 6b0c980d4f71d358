"""The ends of a stage's part of autograd's graph: where values enter it and gradients come out, and where a backward starts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.torch_private import fast_apply, is_python_node
from penstock.trees import flatten, map_tensors, unflatten

Gradients = tuple[Tensor | None, ...]


class StageInput:
    """A message from another stage: the gradients of those of its tensors that require one, once a backward has been there."""

    def __init__(self) -> None:
        self.gradients: Gradients = ()

    def attach(self, value: Any) -> Any:
        """`value` with those of its tensors that require a gradient connected to this input."""
        leaves, tree = flatten(value)
        wanted = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not wanted:
            return value
        for index, entered in zip(wanted, self._detach_and_capture_grads([leaves[index] for index in wanted]), strict=True):
            leaves[index] = entered
        return unflatten(leaves, tree)

    def _detach_and_capture_grads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.gradients = (None,) * len(tensors)
        return with_gradient_callback([tensor.detach() for tensor in tensors], self._keep)

    def _keep(self, gradients: Gradients) -> None:
        self.gradients = gradients


def detach_for_next_stage(value: Any) -> Any:
    """`value` as the next stage of the same rank receives it: the same memory, cut off from the graph that made it."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def with_gradient_callback(tensors: Sequence[Tensor], keep: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
    """`tensors`, which have no graph, as the beginning of one.

    They are not leaves: a layer may change them in place. When a backward has reached them, `keep` gets their gradients, None
    for those that it did not reach; it is not called if it reached none.
    """
    return _entered(_ANCHOR, tensors, keep)


class _Entrance(torch.autograd.Function):
    """A node without inputs: the tensors come in a sequence, where autograd does not look for them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor], keep: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.keep(gradients)
        return None, None, None


_ANCHOR = torch.empty(0, requires_grad=True)
_entered = fast_apply(_Entrance)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge(tensor)`; of what an operation made without the changes of grad mode, which take longest."""
    node = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return get_gradient_edge(tensor)
    # a node written in Python does not keep the graph alive, a view of its output does
    return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn if is_python_node(node) else None)
