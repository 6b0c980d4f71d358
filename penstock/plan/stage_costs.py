"""The cost of a stage: `LayerCost` (model_profile.py) summed over its layers, with and without recomputation.

A teacher's layers come behind the model's. They have forwards only, and keep nothing, so that nothing is recomputed.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from penstock.plan.model_profile import LayerCost

Recompute = Literal["stage", "block"] | None
ADAM_STATE_RATIO = 2.0  # bytes of optimizer state for each byte of parameters


class ActivationPolicy(NamedTuple):
    """A choice of which activations of a stage are kept and which recomputed, and its cost for one microbatch."""

    recompute: Recompute
    activation: float  # bytes from its forward to its backward
    transient_bytes: float  # more while a backward has recomputed the others
    recompute_seconds: float  # of the second forward, in the backward


class StageCost(NamedTuple):
    """The cost of a stage for one microbatch, in seconds and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    keep: float  # what its W still needs after its I
    parameters: float
    input: float  # over the border before it
    output: float
    policies: tuple[ActivationPolicy, ...]  # nothing recomputed comes first
    split: float  # seconds that a backward in two, I and W, takes longer
    keys_and_values: float  # of its attention: in slices, their gradients wait for the backwards of earlier slices
    frozen: float  # of parameters that are not trained


class LayerChain:
    """The layers of a model in order, for microbatches of one size: any range of them is a stage.

    `teacher_layers`: of a teacher; no stage has layers of both. `teacher_output`: bytes of its output for a microbatch.
    """

    def __init__(self, layers: Sequence[LayerCost], teacher_layers: Sequence[LayerCost] = ()) -> None:
        self.layers = (*layers, *(layer.without_backward() for layer in teacher_layers))
        self.num_model_layers = len(layers)
        self.teacher_output = teacher_layers[-1].output if teacher_layers else 0.0
        self._prefix_sums = {
            field: [0.0, *accumulate(getattr(layer, field) for layer in self.layers)] for field in _SUMMED_FIELDS
        }
        self._input_bytes = [0.0, *(layer.output for layer in self.layers)]  # the batch itself is on the rank anyway
        if teacher_layers:
            self._input_bytes[self.num_model_layers] = 0.0  # the model's output does not leave its rank
        self._cached_stage_cost = cache(self._compute_stage_cost)
        self._input_prefix_sums = [0.0, *accumulate(self._input_bytes)]

    @cached_property
    def layer_seconds(self) -> list[float]:
        """Seconds of every layer, forward and backward."""
        return [layer.seconds for layer in self.layers]

    def stage_cost(self, start: int, end: int) -> StageCost:
        """Return the cost of a stage of the layers from `start` up to, without, `end`."""
        return self._cached_stage_cost(start, end)

    def _compute_stage_cost(self, start: int, end: int) -> StageCost:
        sums = {field: until_layer[end] - until_layer[start] for field, until_layer in self._prefix_sums.items()}
        end_bytes = self.layers[end - 1].ends
        activation, forward = sums.pop("activation") + end_bytes, sums["forward"]
        loss_bytes = end_bytes if end == self.num_model_layers else 0.0  # the loss is not recomputed

        # Recomputing the stage keeps its input; recomputing block by block keeps the input of every layer.
        input_bytes = self._input_bytes[start]
        kept_by_stage = input_bytes + loss_bytes
        kept_by_block = self._input_prefix_sums[end] - self._input_prefix_sums[start] + loss_bytes
        largest_block = max(
            max(0.0, layer.activation - layer_input)
            for layer, layer_input in zip(self.layers[start:end], self._input_bytes[start:end], strict=True)
        )

        policies = [
            ActivationPolicy(None, activation, 0.0, 0.0),
            ActivationPolicy("stage", kept_by_stage, max(0.0, activation - kept_by_stage), forward),
        ]
        if end - start > 1:
            policies.append(ActivationPolicy("block", kept_by_block, largest_block, forward))
        if start >= self.num_model_layers:
            del policies[1:]

        return StageCost(**sums, input=input_bytes, output=self._input_bytes[end], policies=tuple(policies))


_SUMMED_FIELDS = tuple(field for field in LayerCost._fields[1:] if field not in ("output", "ends"))
