"""The model that a rank was given, and by names every parameter, buffer and submodule of it, whichever rank runs it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.partition import CuttableModel
from penstock.torch_private import TensorSlot, tensor_slots


class Source(NamedTuple):
    """The model of a pipeline, or its stages, as the user has it.

    Names are those in the model that is cut; else of all stages that the rank was given, by stage and name. They are the same
    on all ranks. A tensor with several has the first, also where a stage has only another one.
    """

    model: Any
    whole: CuttableModel | None  # the same, if it was cut
    stages: Mapping[int, nn.Module]  # else: all stages that this rank has of it

    def _roots(self) -> dict[str, nn.Module]:
        return {"": self.whole.model} if self.whole else {f"{stage}.": module for stage, module in self.stages.items()}

    def _slots(self) -> Iterator[tuple[str, TensorSlot]]:
        return ((prefix + slot.name, slot) for prefix, root in self._roots().items() for slot in tensor_slots(root))

    def of(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """The tensors of `stages`, each once, in their order."""
        names, found = {id(slot.tensor): name for name, slot in reversed([*self._slots()])}, dict[str, Tensor]()
        known = {*names.values()}
        for stage, module in stages.items():
            for slot in tensor_slots(module):
                own = slot.name if self.whole else f"{stage}.{slot.name}"
                name = names.get(id(slot.tensor), own)  # where the stage has a copy of a buffer, on its device
                if name in known:
                    found.setdefault(name, slot.tensor)
        return found

    def elsewhere(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """The tensors that `stages`, all that this rank runs, do not have."""
        here, found = self.of(stages), dict[int, tuple[str, Tensor]]()
        for name, slot in self._slots():
            found.setdefault(id(slot.tensor), (name, slot.tensor))
        return {name: tensor for name, tensor in found.values() if name not in here}

    def submodules(self, stages: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
        """The submodules of `stages`; a stage that was cut is none of the model's itself."""
        pairs = [(prefix + name, each) for prefix, root in self._roots().items() for name, each in root.named_modules()]
        names = {id(each): name for name, each in reversed(pairs)}
        return {names[id(each)]: each for stage in stages.values() for each in stage.modules() if id(each) in names}
