"""Two pipelines that run the same layers on different ranks: what one has trained there, the other does not see."""

import weakref
from collections.abc import Mapping

from torch import Tensor

from penstock.errors import MismatchError

_all: "weakref.WeakSet[SharedLayers]" = weakref.WeakSet()


class SharedLayers:
    """The tensors of a pipeline's model that this rank runs, `here`, and those that others run, by name.

    Pipelines are built in the same order on all ranks, so each knows on every rank which others have trained since.
    """

    def __init__(self, here: Mapping[str, Tensor], elsewhere: Mapping[str, Tensor]) -> None:
        self.here = {id(tensor): (name, weakref.ref(tensor)) for name, tensor in here.items()}
        self.elsewhere = {id(tensor): weakref.ref(tensor) for tensor in elsewhere.values()}
        self.steps = 0  # of training
        self._others: list[tuple[weakref.ref[SharedLayers], str, weakref.ref[Tensor], int]] = []
        for other in _all:
            self._meet(other)
            other._meet(self)
        _all.add(self)

    def _meet(self, other: "SharedLayers") -> None:
        """Remember what this rank runs of what others run for `other`, which is trained."""
        for place, (name, tensor) in self.here.items():
            known = other.elsewhere.get(place)
            if known is not None and known() is not None and known() is tensor():
                self._others.append((weakref.ref(other), name, tensor, other.steps))

    def check(self) -> None:
        """Before a training step. Raises MismatchError if another pipeline has trained a layer on another rank."""
        for reference, name, tensor, steps in self._others:
            other, weight = reference(), tensor()
            if other is not None and weight is not None and weight.requires_grad and other.steps != steps:
                raise MismatchError(
                    f"another pipeline has {name} on another rank, and has trained since this one was built: neither sees what "
                    "the other does. Cut both so that a shared layer is on one rank, or go on with pipe.rebuild(..)"
                )
