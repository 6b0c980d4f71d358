"""The ends of a stage's part of autograd's graph: where tensors enter it, and the edges that its backward starts from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.torch_private import is_python_node

Gradients = tuple[Tensor | None, ...]


def enter(tensors: Sequence[Tensor], keep: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
    """`tensors`, which have no graph, as the beginning of one.

    They are not leaves: a layer may change them in place. When a backward has reached them, `keep` gets their gradients, None
    for those that it did not reach; it is not called if it reached none.
    """
    return _Entrance.apply(_ANCHOR, tensors, keep)


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


def edge_of(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge(tensor)`; of what an operation made without the changes of grad mode, which take longest."""
    node = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return get_gradient_edge(tensor)
    # a node written in Python does not keep the graph alive, a view of its output does
    return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn if is_python_node(node) else None)
