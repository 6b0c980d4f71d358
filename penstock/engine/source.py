"""The model that a rank was given, and by names every parameter, buffer and submodule of it, whichever rank runs it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.partition import Whole
from penstock.torch_private import tensor_slots


class ModelTensors:
    """Of the `whole` model that is cut, by the names in it; else of all stages that the rank was given, by stage and name.

    Names are the same on all ranks. A tensor with several has the first, also where a stage has only another one.
    """

    def __init__(self, whole: nn.Module | None, stages: Mapping[int, nn.Module]) -> None:
        self.is_whole = whole is not None
        self._roots = {f"{stage}.": module for stage, module in stages.items()} if whole is None else {"": whole}
        slots = [(prefix, slot) for prefix, root in self._roots.items() for slot in tensor_slots(root)]
        self._names = {id(slot.tensor): prefix + slot.name for prefix, slot in reversed(slots)}
        self._tensors = {self._names[id(slot.tensor)]: slot.tensor for _, slot in slots}

    def of(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """Those of `stages`, each once, in their order."""
        found = dict[str, Tensor]()
        for stage, module in stages.items():
            for slot in tensor_slots(module):
                own = slot.name if self.is_whole else f"{stage}.{slot.name}"
                name = self._names.get(id(slot.tensor), own)  # where the stage has a copy of a buffer, on its device
                if name in self._tensors:
                    found.setdefault(name, slot.tensor)
        return found

    def elsewhere(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """Those that `stages`, all that this rank runs, do not have."""
        here = self.of(stages)
        return {name: tensor for name, tensor in self._tensors.items() if name not in here}

    def submodules(self, stages: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
        """Those of `stages`; a stage that was cut is none of the model's itself."""
        pairs = [(prefix + name, each) for prefix, root in self._roots.items() for name, each in root.named_modules()]
        names = {id(each): name for name, each in reversed(pairs)}
        return {names[id(each)]: each for stage in stages.values() for each in stage.modules() if id(each) in names}


class Source(NamedTuple):
    """The model of a pipeline, or its stages, as the user has it."""

    model: Any
    whole: Whole | None  # the same, if it was cut
    stages: Mapping[int, nn.Module]  # else: all stages that this rank has of it

    @property
    def tensors(self) -> ModelTensors:
        """Their names, as they are now."""
        return ModelTensors(None if self.whole is None else self.whole.model, self.stages)
