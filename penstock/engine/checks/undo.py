"""A step leaves no trace where it fails, or where something in it was not finite: what it has changed is put back."""

from collections.abc import Collection

import torch

from penstock.randomness import default_generator
from penstock.stage.stage import Stage
from penstock.torch_private import buffer_slots


class Undo:
    """Around a step: gradients of `stages` are put back where it fails; with `everything`, buffers and random state too.

    A gradient that is None costs nothing. One that is being added to is copied: sums that begin anew would have other bits.
    """

    def __init__(self, stages: Collection[Stage], device: torch.device, everything: bool) -> None:
        parameters = {id(each): each for stage in stages for each in stage.parameters}
        gradients = [(each, each.grad) for each in parameters.values()]
        self._gradients = [(each, grad, None if grad is None else grad.detach().clone()) for each, grad in gradients]
        slots = [slot for stage in stages for slot in buffer_slots(stage.module)] if everything else []
        self._buffers = [(slot, slot.tensor.clone()) for slot in slots]
        generators = {id(each): each for each in (default_generator(device), torch.default_generator)} if everything else {}
        self._random = [(each, each.get_state()) for each in generators.values()]

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it what it was, in the same tensors."""
        for parameter, gradient, copied in self._gradients:
            parameter.grad = gradient if gradient is None or copied is None else gradient.copy_(copied)
        for slot, values in self._buffers:
            slot.replace(slot.tensor.copy_(values))
        for generator, state in self._random:
            generator.set_state(state)
