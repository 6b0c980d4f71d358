"""A parameter that a stage uses from where it is not registered, as in a plain list: its gradient would be lost.

Every rank builds the whole model. What a forward reaches past its module's own parameters is this process' copy of what another
rank trains: no optimizer steps that copy, and its gradient goes nowhere.
"""

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch_private import version_of


class Noted(NamedTuple):
    """What a parameter's gradient was."""

    name: str
    parameter: nn.Parameter
    grad: Tensor | None
    version: int


class Strays:
    """Looks for them on `rank`, which runs `stages`. No step of its adds to the gradient of one of the `others`, by name.

    These are the parameters of other ranks' stages, and its own that get their gradients there (`exchange/neighbours.py`).
    They are not kept alive.
    """

    def __init__(self, rank: int, stages: Collection[int], others: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._who = f"rank {rank}: stage {' or '.join(map(str, sorted(stages)))}"
        self._others = [(name, weakref.ref(parameter)) for name, parameter in others]

    def begin(self) -> list[Noted]:
        """Before a step's first backward: how it is with those that are there."""
        there = [(name, parameter) for name, reference in self._others if (parameter := reference()) is not None]
        return [Noted(name, parameter, parameter.grad, _version(parameter.grad)) for name, parameter in there]

    def check(self, before: Sequence[Noted]) -> None:
        """Raises MismatchError if one of their gradients has been added to."""
        for name, parameter, grad, version in before:
            if parameter.grad is not grad or _version(grad) != version:
                raise MismatchError(
                    f"{self._who} uses the parameter {name} from where it is not registered (a plain list, a closure, the "
                    "loss), so its gradient would be lost: register it (self.layer = embedding), or pass the tensor on; a "
                    "tied parameter must be registered in both stages, and be used from there only"
                )


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else version_of(grad)
