"""`penstock bench steps`: measure a step on emulated devices against its table, and the engine's own time."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock import comms
from penstock.launcher.launch import launch
from penstock.learn.devices import EmulatedDevice, EmulatedLayer
from penstock.pipeline import Pipeline
from penstock.schedule import Costs, Kind, Measurement, Schedule, Timeline, simulate

WARM_UP = 3  # steps


@dataclass(frozen=True)
class BenchResult:
    """Times of one configuration, on rank 0."""

    seconds: list[float]  # of each step
    timeline: Timeline
    cpu: float  # seconds of this rank's main thread in a step


def measure(schedule: Schedule, forward: float, floats: int, steps: int) -> BenchResult:
    """Run `steps` steps over emulated devices on this rank; a microbatch's activation has `floats` numbers."""
    topology = comms.init_distributed()
    pipe = Pipeline(
        [_device(forward) for _ in range(schedule.stages)],
        lambda output, target: output.sum(),
        schedule,
        topology=topology,
        seed=None,
    )
    batch, target = torch.zeros(schedule.microbatches, floats), torch.zeros(schedule.microbatches)
    for _ in range(WARM_UP):
        pipe.step(batch, target=target)
    seconds, begin_cpu = [], time.thread_time()
    for _ in range(steps):
        begin = time.perf_counter()
        pipe.step(batch, target=target)
        seconds.append(time.perf_counter() - begin)
    return BenchResult(seconds, pipe.timeline(), (time.thread_time() - begin_cpu) / steps)


def _device(seconds: float) -> nn.Module:
    """Return a stage that sleeps `seconds` in F, I and W each; for 0 a single product, the least work with a backward."""
    return EmulatedDevice(seconds, seconds, seconds) if seconds else EmulatedLayer(1, 0, 0)


def bench(schedule: Schedule, forward: float, megabytes: float, steps: int) -> None:
    """Measure and print the step on emulated devices, then the engine's time on devices without work."""
    floats = max(1, round(megabytes * 1e6 / 4))
    run = launch(measure, schedule.ranks, schedule, forward, floats, steps)[0]
    ideal = simulate(schedule, Costs(forward, forward, forward)).makespan
    measurement = Measurement.from_timelines(run.timeline)
    predicted = simulate(measurement.schedule, action_costs(measurement)).makespan
    step = statistics.median(run.seconds)
    spread = f"{min(run.seconds) * 1e3:.1f} to {max(run.seconds) * 1e3:.1f}"
    print(f"{schedule.name}: P={schedule.ranks} M={schedule.microbatches}, {megabytes:g} MB a message, {steps} steps")
    print(f"  a step                               {step * 1e3:8.1f} ms  ({spread})")
    print(f"  the table, at nominal costs          {ideal * 1e3:8.1f} ms  {step / ideal:.3f} times")
    print(f"  the table, at the actions' own costs {predicted * 1e3:8.1f} ms  {step / predicted:.3f} times")
    bare = launch(measure, schedule.ranks, schedule, 0.0, floats, 5 * steps)[0]
    actions = len(schedule.actions[0])
    print(
        f"  the engine, per action               {bare.cpu / actions * 1e6:8.1f} us  of rank 0's processor, nothing to compute"
    )


def action_costs(measured: Measurement, send: float = 0.0, **message: Any) -> Costs:
    """Return the measured times of the actions as costs; `send` and `message` are passed on to `Costs`."""
    seconds = measured.seconds
    return Costs(seconds[Kind.F], seconds[Kind.I], seconds[Kind.W], send, backward=seconds[Kind.B], **message)
