"""Where a module has its parameters: other tensors take these places while a microbatch's forward or backward runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.torch_private import TensorSlot, parameter_registries, parameter_slots


class ParameterSlot:
    """A parameter and its places in the stage's module. A tied parameter has several."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.places: list[TensorSlot] = []

    def cache_key(self) -> Any:
        """Return a value that is equal as long as stand-ins made for the parameter fit: same object, memory and places."""
        places = [(id(place.registry), place.key) for place in self.places]
        return id(self.parameter), self.parameter.data_ptr(), places


def list_parameters_with_places(module: nn.Module) -> list[ParameterSlot]:
    """Return a slot for each parameter of `module`."""
    slots: dict[int, ParameterSlot] = {}
    for place in parameter_slots(module):
        parameter: Any = place.tensor
        slots.setdefault(id(parameter), ParameterSlot(parameter)).places.append(place)
    return list(slots.values())


class ParameterReader:
    """Reads the parameters of `module` in every step: since the last one a user may have replaced some."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[ParameterSlot] = []  # they keep the objects alive whose ids are in `_ids`
        self._ids: list[Any] | None = None  # of the dicts that have parameters, and of what these have, with its keys

    def read(self) -> Sequence[ParameterSlot]:
        """Return a slot for each parameter: those of the last call if the same parameters are in the same places."""
        registries = parameter_registries(self._module)
        ids = [item for registry in registries for item in (id(registry), *registry, *map(id, registry.values()))]
        if ids != self._ids:
            self._slots, self._ids = list_parameters_with_places(self._module), ids
        return self._slots


@contextmanager
def replace_temporarily(replacements: Sequence[tuple[TensorSlot, Tensor]]) -> Iterator[None]:
    """Replace the tensors in these slots while the context is open; always restore them."""
    try:
        for place, tensor in replacements:
            place.replace(tensor)
        yield
    finally:
        for place, _ in replacements:
            place.replace(place.tensor)
