"""What a stage of consecutive layers costs its rank, with and without recomputation."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from penstock.plan.model_profile import LayerCost

Recompute = Literal["stage", "block"] | None
ADAM_STATE_RATIO = 2.0  # bytes of optimizer state for each byte of parameters


class ActivationPolicy(NamedTuple):
    """One way to hold a stage's activations, and what it costs."""

    recompute: Recompute
    activation: float  # bytes of a microbatch, from its forward to its backward
    transient_bytes: float  # bytes more while a backward has brought back what was not kept
    recompute_seconds: float  # more in the backward, for the forward once more


class StageCost(NamedTuple):
    """A stage. Seconds and bytes, of one microbatch."""

    forward: float
    backward_input: float
    backward_weight: float
    keep: float  # what its W still needs after its I
    parameters: float
    input: float  # what comes over the border before it
    output: float
    policies: tuple[ActivationPolicy, ...]  # nothing recomputed comes first
    split: float  # longer, where the backward is in two


class LayerChain:
    """The layers of a model in a row, for microbatches of one size: any stretch of them is a stage."""

    def __init__(self, layers: Sequence[LayerCost]) -> None:
        self.layers = tuple(layers)
        self._prefix_sums = {name: [0.0, *accumulate(getattr(each, name) for each in self.layers)] for name in _SUMMED_FIELDS}
        self._input_bytes = [0.0, *(layer.output for layer in self.layers)]  # the batch itself is there in any case
        self._input_sums = [0.0, *accumulate(self._input_bytes)]
        self._stage_costs: dict[tuple[int, int], StageCost] = {}

    @cached_property
    def layer_seconds(self) -> list[float]:
        """Of every layer, forward and backward."""
        return [layer.seconds for layer in self.layers]

    def stage_cost(self, start: int, end: int) -> StageCost:
        """The layers from `start` up to `end`."""
        if (start, end) not in self._stage_costs:
            self._stage_costs[start, end] = self._compute_stage_cost(start, end)
        return self._stage_costs[start, end]

    def _compute_stage_cost(self, start: int, end: int) -> StageCost:
        forward, inputs, weights, activation, keep, parameters, split = (
            self._prefix_sums[name][end] - self._prefix_sums[name][start] for name in _SUMMED_FIELDS
        )
        after, first = self.layers[end - 1].ends, self._input_bytes[start]
        activation += after
        loss = after if end == len(self.layers) else 0.0  # what it keeps: it is not recomputed
        least, blocks = first + loss, self._input_sums[end] - self._input_sums[start] + loss
        largest = max(
            max(0.0, layer.activation - come)
            for layer, come in zip(self.layers[start:end], self._input_bytes[start:end], strict=True)
        )
        ways = [
            ActivationPolicy(None, activation, 0.0, 0.0),
            ActivationPolicy("stage", least, max(0.0, activation - least), forward),
        ]
        if end - start > 1:
            ways.append(ActivationPolicy("block", blocks, largest, forward))
        return StageCost(forward, inputs, weights, keep, parameters, first, self._input_bytes[end], tuple(ways), split)


_SUMMED_FIELDS = ("forward", "backward_input", "backward_weight", "activation", "keep", "parameters", "split")
