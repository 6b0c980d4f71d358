"""Where a stage has its parameters: something else may stand there while a microbatch's forward or backward runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.torch_private import TensorSlot, parameter_slots


class ParameterSlot:
    """A parameter, and every place where the stage's module has it; a tied one has several."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.places: list[TensorSlot] = []
        self._memory = parameter.data_ptr()

    def identity(self) -> Any:
        """Equal as long as what was made for the parameter, in its memory and its places, can be used."""
        return id(self.parameter), self._memory, [(id(place.registry), place.key) for place in self.places]


def slots_of(module: nn.Module) -> list[ParameterSlot]:
    """Of all its parameters."""
    found: dict[int, ParameterSlot] = {}
    for place in parameter_slots(module):
        parameter: Any = place.tensor
        found.setdefault(id(parameter), ParameterSlot(parameter)).places.append(place)
    return list(found.values())


@contextmanager
def installed(standins: Sequence[tuple[TensorSlot, Tensor]]) -> Iterator[None]:
    """Tensors in places of others; afterwards, whatever happens, what was there again."""
    try:
        for place, tensor in standins:
            place.replace(tensor)
        yield
    finally:
        for place, _ in standins:
            place.replace(place.tensor)
