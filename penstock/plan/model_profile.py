"""The costs that a plan is made for: of each layer of a model, for a number of rows, seconds and bytes, measured or given.

{"format": "penstock layers 1",
 "samples": [{"rows": 8, "layers": [{"name": "embed", "forward": 0.001, "backward_input": 0, "backward_weight": 0.001,
                                     "activation": 4096, "keep": 4096, "parameters": 1048576, "output": 4096}, ..]}, ..]}
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from penstock.errors import PenstockError

FORMAT = "penstock layers 1"
COSTS_FILE = "costs.json"  # its name in the folder of a run
TIMES = ("forward", "backward_input", "backward_weight", "split")  # the costs of a layer that are seconds


class LayerCost(NamedTuple):
    """The cost of a layer, or of any other part of a model that is not cut, for one microbatch. Seconds and bytes.

    A new cost is a field here: measuring.py measures it, stage_costs.py adds it up, partition_search.py uses it.
    """

    name: str  # of the submodule, as in `cuts`
    forward: float
    backward_input: float
    backward_weight: float
    activation: float = 0.0  # kept from its forward to its backward, its input included
    keep: float = 0.0  # what its W still needs after its I
    parameters: float = 0.0
    output: float = 0.0  # sent over a border between stages after it
    ends: float = 0.0  # bytes of its output that it keeps if a stage ends with it; of the last layer: that the loss keeps
    split: float = 0.0  # seconds that a backward in two, I and W, takes longer
    keys_and_values: float = 0.0  # of its attention: in slices, their gradients wait for the backwards of earlier slices
    frozen: float = 0.0  # bytes of parameters that are not trained; `parameters` has the others

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward_input + self.backward_weight

    def without_backward(self) -> "LayerCost":
        """Return the cost of the same layer in a teacher: it is not trained, and keeps nothing."""
        frozen = self.parameters + self.frozen
        return LayerCost(self.name, self.forward, 0.0, 0.0, output=self.output, frozen=frozen)


class ProfileSample(NamedTuple):
    """The costs of all layers of a model, in order, at one size of a microbatch."""

    rows: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True)
class ModelProfile:
    """The costs of a model's layers at one or several sizes of a microbatch, by rising rows; `costs_at` gives any other size.

    layers = ModelProfile.from_layers([LayerCost("embed", 0.001, 0, 0.001), LayerCost("head", 0.002, 0.002, 0.002)], rows=8)
    layers.costs_at(4)[1].forward  # 0.001
    """

    samples: tuple[ProfileSample, ...]

    def __post_init__(self) -> None:
        names = [[layer.name for layer in sample.layers] for sample in self.samples]
        if not names or not names[0] or any(name != names[0] for name in names):
            raise PenstockError("the samples of a model's layers name the same layers, one or more")
        rows = [sample.rows for sample in self.samples]
        if rows != sorted(set(rows)) or rows[0] < 1:
            raise PenstockError(f"samples are for rising numbers of rows, 1 or more, not {rows}")
        for sample in self.samples:
            for layer in sample.layers:
                for field, value in zip(LayerCost._fields[1:], layer[1:], strict=True):
                    if not 0 <= value < math.inf:
                        raise PenstockError(f"layer {layer.name} has {field} {value}: give seconds or bytes, 0 or more")

    @classmethod
    def from_layers(cls, layers: Iterable[LayerCost], rows: int = 1) -> "ModelProfile":
        """Return a profile of one sample. All times and activations are assumed to be proportional to the rows."""
        return cls((ProfileSample(rows, tuple(layers)),))

    @classmethod
    def mean_of(cls, profiles: "Sequence[ModelProfile]") -> "ModelProfile":
        """Return the mean of profiles that several ranks measured at once, because the cores of a machine differ in speed."""
        return cls(
            tuple(
                ProfileSample(
                    rank_samples[0].rows,
                    tuple(map(_mean_layer_cost, zip(*[sample.layers for sample in rank_samples], strict=True))),
                )
                for rank_samples in zip(*(profile.samples for profile in profiles), strict=True)
            )
        )

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, in order."""
        return [layer.name for layer in self.samples[0].layers]

    @property
    def max_rows(self) -> float:
        """The largest microbatch, in rows, that the samples can predict: twice the largest sample; infinite for one sample."""
        return 2 * self.samples[-1].rows if len(self.samples) > 1 else math.inf

    def costs_at(self, rows: float) -> tuple[LayerCost, ...]:
        """Return the cost of each layer at microbatches of `rows` rows, on the line through the two nearest samples.

        Below the smallest sample, a cost is at least the share of that sample's. From one sample alone everything but the
        parameters is proportional.
        """
        sampled_rows = [sample.rows for sample in self.samples]
        if len(sampled_rows) == 1:
            return tuple(_interpolate(layer, layer, 0.0, rows / sampled_rows[0]) for layer in self.samples[0].layers)
        high = next((place for place in range(1, len(sampled_rows)) if sampled_rows[place] >= rows), len(sampled_rows) - 1)
        share = (rows - sampled_rows[high - 1]) / (sampled_rows[high] - sampled_rows[high - 1])
        pairs = zip(self.samples[high - 1].layers, self.samples[high].layers, strict=True)
        return tuple(
            _interpolate(low_cost, high_cost, share, min_factor=rows / sampled_rows[0] if rows < sampled_rows[0] else 0.0)
            for low_cost, high_cost in pairs
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to the JSON file at `path`."""
        samples = [{"rows": rows, "layers": [layer._asdict() for layer in layers]} for rows, layers in self.samples]
        text = json.dumps({"format": FORMAT, "samples": samples}, indent=1, default=float)  # float: numbers of numpy
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "ModelProfile":
        """Read what `save` wrote. Raises PenstockError for anything else."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
            return cls(
                tuple(
                    ProfileSample(int(sample["rows"]), tuple(map(_layer_cost_from_json, sample["layers"])))
                    for sample in data["samples"]
                )
            )
        except OSError as error:
            raise PenstockError(f"cannot read layers from {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else repr(error)
            raise PenstockError(f"{path} does not say what a model's layers cost: {why}") from error


def waiting_gradient_bytes(keys_and_values: float, slices: int) -> float:
    """Return the bytes of the gradients of keys and values that a microbatch's last slice leaves to the earlier ones."""
    return keys_and_values * (1 - 1 / slices)


def _layer_cost_from_json(data: dict[str, Any]) -> LayerCost:
    return LayerCost(str(data["name"]), *(float(data.get(field, 0)) for field in LayerCost._fields[1:]))


def _interpolate(
    low_cost: LayerCost, high_cost: LayerCost, share: float, scale: float = 1.0, min_factor: float = 0.0
) -> LayerCost:
    """Return the cost at `share` of the way between two row counts, times `scale`. More rows never cost less.

    No value is below `min_factor` of `low_cost`. Parameters stay the same.
    """
    values = [
        max(min_factor * a, a + share * max(0.0, b - a)) * scale for a, b in zip(low_cost[1:], high_cost[1:], strict=True)
    ]
    return LayerCost(low_cost.name, *values)._replace(parameters=low_cost.parameters, frozen=low_cost.frozen)


def _mean_layer_cost(layer_costs: Sequence[LayerCost]) -> LayerCost:
    name, *columns = zip(*layer_costs, strict=True)
    return LayerCost(name[0], *map(fmean, columns))


def as_profile(layers: "ModelProfile | Sequence[LayerCost]") -> ModelProfile:
    """Return `layers` as a profile. The costs in a plain sequence are those of one row."""
    if isinstance(layers, ModelProfile):
        return layers
    value = list(layers) if isinstance(layers, Iterable) else [layers]
    if not all(isinstance(layer, LayerCost) for layer in value):
        raise PenstockError("layers are what ps.plan.measure returns, or a list of ps.plan.LayerCost")
    return ModelProfile.from_layers(value)
