"""Where what comes from another stage enters this one's graph, and where its gradients come out."""

from typing import Any

import torch
from torch import Tensor

from penstock.comms.messages import wire


class StageInput:
    """A stage's input: where the gradients of its tensors are put when the backward reaches them."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()

    def admit(self, value: Any) -> Any:
        """`value` with those of its tensors that require a gradient connected to this entry."""
        if isinstance(value, Tensor):  # the common case, a short way
            return self._admit([value])[0] if value.requires_grad else value
        leaves, tree = wire.flatten(value)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return value
        for place, admitted in zip(places, self._admit([leaves[place] for place in places]), strict=True):
            leaves[place] = admitted
        return wire.tree_unflatten(leaves, tree)

    def _admit(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        self.tensors = tuple([tensor.detach() for tensor in tensors])
        self.gradients = (None,) * len(tensors)
        return _Admit.apply(_ANCHOR, self)


class _Admit(torch.autograd.Function):
    """Turns received memory into tensors of the graph. They are not leaves: a layer may change them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: StageInput) -> tuple[Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        tensors, entry.tensors = entry.tensors, ()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.entry.gradients = gradients
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)


def handed_over(value: Any) -> Any:
    """`value` as the next stage of the same rank receives it: the same memory, cut off from the graph that made it."""
    leaves, tree = wire.flatten(value)
    cut = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return cut[0] if isinstance(value, Tensor) else wire.tree_unflatten(cut, tree)
