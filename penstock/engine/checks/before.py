"""What a step changes on this rank, as it was before: to be put back where the step fails or its batch is taken back."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.randomness import generator_of
from penstock.stage.stage import Stage
from penstock.torch_private import buffer_slots


class Before:
    """The gradients of `stages` as they are now; with `everything`, buffers and the random state of `device` too.

    A gradient that is None costs nothing. One that is being added to is copied: sums that begin anew would have other bits.
    """

    def __init__(self, stages: Collection[Stage], device: torch.device, everything: bool) -> None:
        parameters = {id(each): each for stage in stages for each in stage.parameters}
        self._gradients = [(each, _copied(each.grad)) for each in parameters.values()]
        slots = [slot for stage in stages for slot in buffer_slots(stage.module)] if everything else []
        self._buffers = [(slot, slot.tensor.clone()) for slot in slots]
        generators = {id(each): each for each in (generator_of(device), torch.default_generator)} if everything else {}
        self._random = [(each, each.get_state()) for each in generators.values()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it what it was, in the same tensors."""
        for parameter, copied in self._gradients:
            if copied is None:
                parameter.grad = None
            else:
                gradient, values = copied
                parameter.grad = gradient.copy_(values)
        for slot, values in self._buffers:
            slot.put(slot.tensor.copy_(values))
        for generator, state in self._random:
            generator.set_state(state)


def _copied(gradient: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if gradient is None else (gradient, gradient.detach().clone())


@contextmanager
def undone_on_failure(stages: Collection[Stage], device: torch.device, everything: bool) -> Iterator[Before]:
    """Around a step: whatever ends it, gradients are as they were."""
    before = Before(stages, device, everything)
    try:
        yield before
    except BaseException:
        before.put_back()
        raise
