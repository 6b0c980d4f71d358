"""Undo what a step has changed on this rank: when it fails, before the error is reported to other ranks; or for a NaN."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from penstock.randomness import default_generator
from penstock.stage.stage import Stage
from penstock.torch_private import TensorSlot, buffer_slots


class StepRollback:
    """A context for one step: if it raises, gradients of `stages` are restored; buffers and `device`'s random state too, if
    that is given.

    A gradient that is None costs nothing. One that is being accumulated is copied: sums that begin anew would have other bits.
    """

    def __init__(self, stages: Collection[Stage], device: torch.device | None = None) -> None:
        parameters = {id(parameter): parameter for stage in stages for parameter in stage.parameters}
        self._gradients = [
            (parameter, grad := parameter.grad, None if grad is None else grad.detach().clone())
            for parameter in parameters.values()
        ]

        self._buffers: Sequence[tuple[TensorSlot, Tensor]] = ()
        self._random_states: Sequence[tuple[torch.Generator, Tensor]] = ()
        if device is not None:
            slots = [slot for stage in stages for slot in buffer_slots(stage.module)]
            self._buffers = [(slot, slot.tensor.clone()) for slot in slots]
            generators = {default_generator(device), torch.default_generator}
            self._random_states = [(generator, generator.get_state()) for generator in generators]

    def __enter__(self) -> "StepRollback":
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, in the same tensors."""
        for parameter, gradient, copy in self._gradients:
            parameter.grad = gradient if gradient is None or copy is None else gradient.copy_(copy)
        for slot, values in self._buffers:
            slot.replace(slot.tensor.copy_(values))
        for generator, state in self._random_states:
            generator.set_state(state)
