"""Where a stage's autograd graph begins and ends: inputs whose gradients are captured, and edges that a backward starts at."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.torch_private import fast_apply, is_python_node
from penstock.trees import flatten, map_tensors, unflatten

Gradients = tuple[Tensor | None, ...]


class GradientCapture:
    """What came from another stage, and after the backward the gradients of those of its tensors that require one.

    `parameters`: leaves that stand for parameters of that stage. Their gradients come last. They are leaves because only a leaf
    has a `grad_dtype`, in which the gradients of its uses are summed.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._message_gradients: Gradients = ()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad] if parameters else ()

    @property
    def gradients(self) -> Gradients:
        """The gradients; None for a tensor that the backward did not reach."""
        if not self._parameters:
            return self._message_gradients
        return (*self._message_gradients, *[parameter.grad for parameter in self._parameters])

    def attach(self, message: Any) -> Any:
        """Return `message` as the beginning of a graph: a backward stores the gradients of its tensors here."""
        if isinstance(message, Tensor):  # the common case
            if not message.requires_grad:
                return message
            self._message_gradients = (None,)
            return with_gradient_callback([message.detach()], self._store_gradients)[0]

        leaves, structure = flatten(message)
        wanted = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not wanted:
            return message

        self._message_gradients = (None,) * len(wanted)
        attached = with_gradient_callback([leaves[index].detach() for index in wanted], self._store_gradients)
        for index, tensor in zip(wanted, attached, strict=True):
            leaves[index] = tensor
        return unflatten(leaves, structure)

    def _store_gradients(self, gradients: Gradients) -> None:
        self._message_gradients = gradients


def detach_for_next_stage(value: Any) -> Any:
    """Return `value` as the next stage of the same rank receives it: the same memory, without the graph that made it."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def with_gradient_callback(tensors: Sequence[Tensor], on_gradients: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
    """Return `tensors`, which have no graph, as the beginning of one. A backward calls `on_gradients` with their gradients.

    They are no leaves, so a layer may change them in place. A gradient is None if the backward did not reach its tensor. The
    function is not called if it reached none.
    """
    return _begin_graph(_REQUIRES_GRAD, tensors, on_gradients)


class _GraphBeginning(torch.autograd.Function):
    """A node without inputs: autograd does not look for tensors inside a sequence."""

    @staticmethod
    def forward(
        ctx: Any, requires_grad: Tensor, tensors: Sequence[Tensor], on_gradients: Callable[[Gradients], None]
    ) -> tuple[Tensor, ...]:
        ctx.on_gradients = on_gradients
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.on_gradients(gradients)
        return None, None, None


_REQUIRES_GRAD = torch.empty(0, requires_grad=True)  # makes autograd record the node
_begin_graph = fast_apply(_GraphBeginning)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return `get_gradient_edge(tensor)`, without its two changes of grad mode where an operation has made the tensor."""
    node = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return get_gradient_edge(tensor)
    # A node written in Python does not keep the graph alive; a view of its output does.
    return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn if is_python_node(node) else None)
