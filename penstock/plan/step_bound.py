"""A lower bound of a step for any partition and table of these layers, and the reason why a plan takes longer."""

import math
from collections.abc import Sequence
from itertools import accumulate

from penstock.plan.model_profile import LayerCost
from penstock.timing.timeline import Timeline


def min_step_seconds(
    layers: Sequence[LayerCost],
    ranks: int,
    microbatches: int,
    cores: float = math.inf,
    speeds: Sequence[float] = (),
    slices: int = 1,
    teacher_seconds: float = 0.0,
) -> float:
    """Return a lower bound for the seconds of a step of `microbatches` on `ranks`.

    It is the largest of three bounds. All work takes its share of the ranks' speeds, and the k-th rank to begin waits for k
    layers. All work takes its share of the cores. The costliest layer runs every microbatch, after the first has reached it,
    and before the last has gone back from it (during which it may still run W). With `slices`, the first and the last slice
    travel, each an equal share of a microbatch. A teacher's forward of a microbatch takes `teacher_seconds`; it may run while
    ranks wait, so that only the work of both models counts.
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
    both = work + microbatches * teacher_seconds
    shared = max(work + fill, both) / sum(used_speeds)
    return max(shared, both / (cores * used_speeds[0]), max(alone) / used_speeds[0])


def bottleneck_sentence(
    layers: Sequence[LayerCost], timeline: Timeline, microbatches: int, recompute_seconds: float, reduce_seconds: float
) -> str:
    """Return a sentence that names the largest cause why the step is longer than with evenly shared work.

    `timeline`: the planned step. `recompute_seconds`: of all recomputation in it. `reduce_seconds`: the time after it in which
    the replicas sum their gradients.
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
