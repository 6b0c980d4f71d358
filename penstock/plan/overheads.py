"""Measure the time of a step besides the work of its layers, on real ranks: the engine's for each action, and messages."""

from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock import comms
from penstock.pipeline import Pipeline
from penstock.plan.measuring import measure
from penstock.plan.model_profile import TIMES, LayerCost, ModelProfile, ProfileSample
from penstock.schedule.table import Kind
from penstock.timing.measurement import Measurement

PROBE_MICROBATCHES, PROBE_STEPS = 8, 5
MESSAGE_FLOATS = 1, 262_144  # of the two messages from which latency and bandwidth are computed


class Overheads(NamedTuple):
    """Measured overheads, in seconds; the bandwidth in bytes a second."""

    empty_layer: LayerCost  # as `measure` finds it, of a layer that does next to nothing
    action: float  # of a stage that does next to nothing
    send: float
    bandwidth: float

    def subtract_from(self, layers: ModelProfile) -> ModelProfile:
        """Return `layers` without the overhead of measuring each alone. A stage of them takes `action` once more."""
        return ModelProfile(
            tuple(ProfileSample(rows, tuple(map(self._subtract_from_layer, some))) for rows, some in layers.samples)
        )

    def _subtract_from_layer(self, layer: LayerCost) -> LayerCost:
        return layer._replace(**{name: max(0.0, getattr(layer, name) - getattr(self.empty_layer, name)) for name in TIMES})


class ScalarMultiply(nn.Module):
    """A layer that does next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return hidden * self.weight


def measure_overheads() -> Overheads:
    """Return the overheads of small steps over all ranks. All ranks call it."""
    small, large = map(_measure_empty_pipeline, MESSAGE_FLOATS)
    [alone] = (
        measure(nn.Sequential(ScalarMultiply()), (torch.ones(1, 1),), device=comms.current_topology().device, seconds=0.1)
        .samples[-1]
        .layers
    )
    action = fmean(
        sum(times) for kind in (Kind.F, Kind.B) for times in zip(small.seconds[kind], small.engine_seconds[kind], strict=True)
    )
    send, longer = (fmean(value.message_seconds or (0.0,)) for value in (small, large))
    size = 4.0 * (MESSAGE_FLOATS[1] - MESSAGE_FLOATS[0])
    return Overheads(alone, action, send, size / (longer - send) if longer > send else float("inf"))


def _measure_empty_pipeline(floats: int) -> Measurement:
    """Return the seconds of a pipeline whose layers do next to nothing. `floats`: in each message."""
    topology = comms.current_topology()
    layers = nn.Sequential(*(ScalarMultiply() for _ in range(topology.world_size)))
    pipe = Pipeline(layers.to(topology.device), nn.functional.mse_loss, "1f1b", PROBE_MICROBATCHES)
    rows = torch.ones(PROBE_MICROBATCHES, floats, device=topology.device)
    timelines = []
    for _ in range(PROBE_STEPS + 1):  # in the first one the ranks exchange shapes
        pipe.step(rows, target=rows)
        timelines.append(pipe.timeline())
    return Measurement.from_timelines(*timelines[1:])
