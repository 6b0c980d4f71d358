"""Uses of parameters of layers that other ranks run. This process' copies of them have no effect.

Every rank builds the whole model. A parameter that a forward reaches but does not register, as in a plain list, is this
process' copy of what another rank trains: no optimizer steps that copy, and its gradient is lost.
"""

import weakref
from collections.abc import Collection, Iterable

from torch import Tensor, nn

from penstock.engine.observers import ObservedStep, Observer, Rows
from penstock.errors import MismatchError
from penstock.torch_private import tensor_version

GradientRecord = tuple[str, nn.Parameter, Tensor | None, int]  # a parameter, its gradient at an earlier time and its version


class RemoteParameterUseCheck(Observer):
    """Checks, in the first training step of each kind, that `rank` with its `stages` adds to no remote parameter's gradient.

    These are the parameters of other ranks' stages, and this rank's that get their gradients there (`stage/connections.py`).
    They are not kept alive.
    """

    only_in_new_steps = True

    def __init__(self, rank: int, stages: Collection[int], remote_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._location = f"rank {rank}: stage {' or '.join(map(str, sorted(stages)))}"
        self._remote = [(name, weakref.ref(parameter)) for name, parameter in remote_parameters]
        self._records = list[GradientRecord]()

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Record the gradients of the remote parameters that still exist, in the first step of a kind."""
        remote = self._remote if step.call.is_training else ()
        alive = [(name, parameter) for name, reference in remote if (parameter := reference()) is not None]
        self._records = [(name, parameter, parameter.grad, _version(parameter.grad)) for name, parameter in alive]

    def end(self, step: ObservedStep) -> float:
        """Raise MismatchError if one of the gradients has been added to since."""
        for name, parameter, grad, version in self._records:
            if parameter.grad is not grad or _version(grad) != version:
                raise MismatchError(
                    f"{self._location} uses the parameter {name} from where it is not registered (a plain list, a closure, the "
                    "loss), so its gradient would be lost: register it (self.layer = embedding), or pass the tensor on; a "
                    "tied parameter must be registered in both stages, and be used from there only"
                )
        return 0.0


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else tensor_version(grad)
