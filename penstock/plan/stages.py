"""What a stage of consecutive layers costs its rank, with and without recomputation."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from penstock.plan.layers import Layer

Recompute = Literal["stage", "block"] | None
ADAM = 2.0  # bytes of optimizer state for each byte of parameters


class Held(NamedTuple):
    """One way to hold a stage's activations, and what it costs."""

    recompute: Recompute
    activation: float  # bytes of a microbatch, from its forward to its backward
    reserve: float  # bytes more while a backward has brought back what was not kept
    seconds: float  # more in the backward, for the forward once more


class StageCost(NamedTuple):
    """A stage. Seconds and bytes, of one microbatch."""

    forward: float
    backward_input: float
    backward_weight: float
    keep: float  # what its W still needs after its I
    parameters: float
    input: float  # what comes over the border before it
    output: float
    ways: tuple[Held, ...]  # nothing recomputed comes first
    split: float  # longer, where the backward is in two


class Line:
    """The layers of a model in a row, for microbatches of one size: any stretch of them is a stage."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._sums = {name: [0.0, *accumulate(getattr(each, name) for each in self.layers)] for name in _SUMMED}
        self._inputs = [0.0, *(layer.output for layer in self.layers)]  # the batch itself is there in any case
        self._input_sums = [0.0, *accumulate(self._inputs)]
        self._known: dict[tuple[int, int], StageCost] = {}

    @cached_property
    def seconds(self) -> list[float]:
        """Of every layer, forward and backward."""
        return [layer.seconds for layer in self.layers]

    def stage(self, start: int, end: int) -> StageCost:
        """The layers from `start` up to `end`."""
        if (start, end) not in self._known:
            self._known[start, end] = self._stage(start, end)
        return self._known[start, end]

    def _stage(self, start: int, end: int) -> StageCost:
        forward, inputs, weights, activation, keep, parameters, split = (
            self._sums[name][end] - self._sums[name][start] for name in _SUMMED
        )
        after, first = self.layers[end - 1].ends, self._inputs[start]
        activation += after
        loss = after if end == len(self.layers) else 0.0  # what it keeps: it is not recomputed
        least, blocks = first + loss, self._input_sums[end] - self._input_sums[start] + loss
        largest = max(
            max(0.0, layer.activation - come)
            for layer, come in zip(self.layers[start:end], self._inputs[start:end], strict=True)
        )
        ways = [Held(None, activation, 0.0, 0.0), Held("stage", least, max(0.0, activation - least), forward)]
        if end - start > 1:
            ways.append(Held("block", blocks, largest, forward))
        return StageCost(forward, inputs, weights, keep, parameters, first, self._inputs[end], tuple(ways), split)


_SUMMED = ("forward", "backward_input", "backward_weight", "activation", "keep", "parameters", "split")
