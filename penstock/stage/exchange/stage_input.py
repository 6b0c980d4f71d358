"""Where what comes from another stage enters this one's graph, and where its gradients come out."""

from typing import Any

from torch import Tensor

from penstock.comms.messages import wire
from penstock.stage.graph import Gradients, enter
from penstock.torch_private import tree_unflatten


class StageInput:
    """One message: the gradients of those of its tensors that require one, once the backward has reached them."""

    def __init__(self) -> None:
        self.gradients: Gradients = ()

    def admit(self, value: Any) -> Any:
        """`value` with those of its tensors that require a gradient connected to this input."""
        if isinstance(value, Tensor):  # the common case, a short way
            return self._enter(value)[0] if value.requires_grad else value
        leaves, tree = wire.flatten(value)
        wanted = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not wanted:
            return value
        for index, entered in zip(wanted, self._enter(*[leaves[index] for index in wanted]), strict=True):
            leaves[index] = entered
        return tree_unflatten(leaves, tree)

    def _enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.gradients = (None,) * len(tensors)
        return enter([tensor.detach() for tensor in tensors], self._keep)

    def _keep(self, gradients: Gradients) -> None:
        self.gradients = gradients


def handed_over(value: Any) -> Any:
    """`value` as the next stage of the same rank receives it: the same memory, cut off from the graph that made it."""
    leaves, tree = wire.flatten(value)
    cut = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return cut[0] if isinstance(value, Tensor) else tree_unflatten(cut, tree)
