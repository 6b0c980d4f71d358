"""What no plan of these layers can be below, whatever its cut and its table; and what keeps a plan above it."""

import math
from collections.abc import Sequence
from itertools import accumulate

from penstock.plan.model_profile import LayerCost
from penstock.schedule import Timeline


def min_step_seconds(
    layers: Sequence[LayerCost],
    ranks: int,
    microbatches: int,
    cores: float = math.inf,
    speeds: Sequence[float] = (),
    slices: int = 1,
) -> float:
    """Return a lower bound for the seconds of a step of `microbatches` on `ranks`.

    There must be time for all work, shared by the ranks' speeds, though the k-th rank to begin waits for k layers before it;
    and for the dearest layer, though a microbatch must come to it first and, unless W are still to do, go all the way back
    after it. Where microbatches are cut into `slices`, the first and the last slice do so, each an equal share of one.
    """
    forwards = [0.0, *accumulate(layer.forward / slices for layer in layers)]
    inputs = [0.0, *accumulate(layer.backward_input / slices for layer in layers)]
    work = microbatches * sum(layer.seconds for layer in layers)
    used_speeds = sorted(speeds or [1.0] * ranks, reverse=True)[: len(layers)]  # the fastest ranks begin first
    fill = sum(speed * seconds / used_speeds[0] for speed, seconds in zip(used_speeds, forwards, strict=False))
    alone = [
        forwards[place]
        + microbatches * (layer.forward + layer.backward_input)
        + max(microbatches * layer.backward_weight, inputs[place])
        for place, layer in enumerate(layers)
    ]
    return max((work + fill) / sum(used_speeds), work / (cores * used_speeds[0]), max(alone) / used_speeds[0])


def bottleneck_sentence(
    layers: Sequence[LayerCost], timeline: Timeline, microbatches: int, recompute_seconds: float, reduce_seconds: float = 0.0
) -> str:
    """In a sentence, what costs the step most of what it takes more than evenly shared work would.

    `timeline`: the planned step. `recompute_seconds`: of recomputation in it. `reduce_seconds`: after it, in which the replicas
    sum their gradients.
    """
    busy, step = timeline.busy, timeline.makespan + reduce_seconds
    work = microbatches * sum(layer.seconds for layer in layers)
    uneven, idle_seconds = max(busy) - sum(busy) / len(busy), timeline.makespan - max(busy)
    if max(recompute_seconds / len(busy), uneven, idle_seconds, reduce_seconds) < step / 100:
        return "all ranks work all the time"
    if reduce_seconds > max(recompute_seconds / len(busy), uneven, idle_seconds):
        return f"for {reduce_seconds / step:.0%} of the step the replicas sum their gradients: fewer replicas have less to sum"
    if idle_seconds >= max(recompute_seconds / len(busy), uneven):
        cause = f"the busiest rank waits for {idle_seconds / step:.0%} of the step, while the pipeline fills and drains"
        return f"{cause}: more microbatches, or memory for more of them in flight, would shorten that"
    if recompute_seconds / len(busy) >= uneven:
        share = recompute_seconds / work
        return f"recomputation makes the work {share:.0%} more: more memory or smaller microbatches would save it"
    dearest = max(layers, key=lambda layer: layer.seconds)
    if microbatches * dearest.seconds > work / len(busy):
        share = microbatches * dearest.seconds / work
        enough = 1 + math.ceil(round(1 / share - 1, 6))
        fewer = f", or use {enough} ranks, which can be as fast" if enough < len(busy) else ""
        return (
            f"{dearest.name} alone is {share:.0%} of the work, more than a rank's share of {1 / len(busy):.0%}: split it{fewer}"
        )
    rank = busy.index(max(busy))
    more = max(busy) * len(busy) / sum(busy) - 1
    return f"rank {rank} works {more:.0%} longer than the mean: finer layers, or more memory, would share better"
