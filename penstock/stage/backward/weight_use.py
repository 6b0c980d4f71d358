"""One use of a weight in a forward whose backward is split: what `W` will compute its gradient from."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.stage.graph import Gradients, edge_of
from penstock.torch_private import saved_tensor_hooks, version_of

WeightGradients = tuple[Tensor | None, Tensor | None]  # of the weight and the bias
Formula = Callable[[Tensor, Tensor, Tensor], WeightGradients]  # of output gradient, input, weight
NO_VIEWS = (None, None)


class WeightUse:
    """One use of a weight: what its gradient will be computed from."""

    __slots__ = ("formula", "number", "targets", "unpacked", "value", "version", "views", "weight")

    def __init__(self, number: int, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.number, self.formula = number, formula
        self.value: Tensor | None = value
        self.version = version_of(value)
        self.unpacked: Callable[[], Tensor] | None = None
        if (hooks := saved_tensor_hooks()) is not None:  # a checkpoint gives it back only in the backward
            pack, unpack = hooks
            with torch.no_grad():
                self.value, self.unpacked = None, partial(unpack, pack(value.detach()))
        self.targets = index_of(weight), index_of(bias)  # whose gradients they are
        self.views = (_view_end(weight), None) if bias is None else (_view_end(weight), _view_end(bias))
        self.weight = bare_of(weight)

    def unpack(self) -> Tensor:
        """The saved input. Raises RuntimeError, as autograd does, if it was changed in place."""
        if self.value is None:
            assert self.unpacked is not None
            self.value = self.unpacked()
        elif self.unpacked is None and version_of(self.value) != self.version:
            raise RuntimeError(
                f"the input {list(self.value.shape)} of an operation was modified by an inplace operation after it; its"
                " weight's gradient needs it as it was"
            )
        return self.value

    def alike(self, gradient: Tensor) -> Any:
        """Equal for uses of a weight, by several microbatches, that differ in their rows only."""
        formula = (self.formula.func, str(self.formula.args)) if isinstance(self.formula, partial) else self.formula
        return self.number, formula, self.targets, self.unpack().shape[1:], gradient.shape[1:]

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
    groups: dict[Any, list[Owed]] = {}
    for use, gradient in chain.from_iterable(owed):
        groups.setdefault(use.alike(gradient), []).append((use, gradient))
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(group: Sequence[Owed]) -> Owed:
    use = copy.copy(group[0][0])
    use.value = torch.cat([each.unpack() for each, _ in group])
    use.version = version_of(use.value)
    return use, torch.cat([gradient for _, gradient in group])


def _view_end(weight: Tensor) -> GradientEdge | None:
    """For a view of a trainable parameter, its end of the graph."""
    return edge_of(weight) if weight.requires_grad and index_of(weight) is None else None


def index_of(weight: Tensor | None) -> int | None:
    """Which of the stage's parameters `weight` stands in for; None for a view of one, for a frozen one, for None."""
    return getattr(weight, "parameter_index", None)


def bare_of(weight: Any) -> Any:
    """`weight` outside the graph, None for None."""
    bare = getattr(weight, "bare", None)
    return weight.detach() if bare is None and weight is not None else bare
