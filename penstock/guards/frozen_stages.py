"""Refuses a step that trains what the table has no backward for: frozen stages, or the inputs of the first of them."""

from collections.abc import Mapping, Sequence

from penstock.engine.observers import ObservedStep, Observer
from penstock.errors import MismatchError
from penstock.stage.stage import Stage
from penstock.trees import tensors


class FrozenStageCheck(Observer):
    """Refuses a step in which a parameter of a frozen stage is trained, or an input requires a gradient.

    `names`: of a stage's parameters in the uncut model, by stage.
    """

    def __init__(self, stages: Mapping[int, Stage], names: Sequence[Mapping[str, str]], schedule: str) -> None:
        self._stages = [stage for stage in stages.values() if stage.is_frozen]
        self._names, self._schedule = names, schedule

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Raise MismatchError for either."""
        if not step.call.is_training:
            return ()
        for stage in self._stages:
            if any(parameter.requires_grad for parameter in stage.parameters):
                trained = next(name for name, parameter in stage.module.named_parameters() if parameter.requires_grad)
                raise MismatchError(
                    f"{self._names[stage.index].get(trained, trained)} is trained, but stage {stage.index} was frozen when the "
                    "table was made, which has no backward for it: pipe.rebuild() makes it anew"
                )
            if stage.index == 0 and any(tensor.requires_grad for tensor in tensors(step.batch.inputs)):
                raise MismatchError(
                    "an input requires a gradient, but stage 0 was frozen when the table was made, which has no backward for "
                    f"it: give a table, schedule=ps.schedule.build({self._schedule!r}, ranks, microbatches)"
                )
        return ()
