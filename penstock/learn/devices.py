"""A device that is not there: its compute is a sleep, its memory a limit.

Four ranks on a laptop with two cores would compete for the cores and hide what the schedule does. Ranks that sleep do not
compete, so their timeline is that of four devices. A process with a memory limit runs out of memory as a device does.
"""

import os
import resource

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.learn.emulated_device import EmulatedDevice
from penstock.schedule import Schedule, Timeline

DIM = 8  # of the activations; a device that sleeps does not mind
CAN_LIMIT_MEMORY = os.path.exists("/proc/self/statm")  # Linux


class EmulatedLayer(EmulatedDevice):
    """An emulated device that multiplies by its weight: there is a gradient to check, and an activation to count.

    (rows, dim) -> (rows, dim). The seconds are those of forward, backward to the input, and backward to the weight.
    """

    def __init__(self, dim: int, forward_seconds: float, backward_seconds: float, weight_seconds: float = 0.0) -> None:
        super().__init__(forward_seconds, backward_seconds, weight_seconds, parameters=dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return self.busy(hidden * self.weight)  # in the backward it takes its time first, then the weight has its gradient


def emulated_step(table: Schedule, forward: float, backward: float, weights: float = 0.0) -> Timeline:
    """The timeline of a step of `table`, measured: each rank is a device that takes these seconds for a microbatch.

    `backward` is to the input, `weights` to the weights. Where a rank has several stages, each has its part of the time.
    """
    topology = ps.comms.init_distributed(backend="gloo")
    part = topology.world_size / table.num_stages
    stages = [EmulatedLayer(DIM, part * forward, part * backward, part * weights) for _ in range(table.num_stages)]
    return fastest_step(ps.Pipeline(stages, mse_loss, schedule=table))


def fastest_step(pipe: ps.Pipeline) -> Timeline:
    """The timeline of the least disturbed of some steps: as many as fit into a second, but at least three."""
    batch = torch.randn(2, 2 * pipe.schedule.microbatches, DIM, generator=torch.Generator().manual_seed(0))
    inputs, target = batch  # two rows for each microbatch, the same on every rank
    pipe.step(inputs, target=target)  # the first one is slower: in it the ranks agree on the shapes
    assert pipe.report is not None
    timelines = []
    for _ in range(max(3, int(1 / pipe.report.makespan))):  # the report is the same on all ranks, so is the number of steps
        pipe.step(inputs, target=target)
        timelines.append(pipe.timeline())
    return min(timelines, key=lambda timeline: timeline.makespan)


def limit_memory(num_bytes: int) -> None:
    """From here on this process gets `num_bytes` bytes more than it has; then torch raises RuntimeError. Linux only."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])  # of data, what RLIMIT_DATA limits
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def warm_up(dim: int, rows: int) -> None:
    """One small step, so that what torch sets up for itself at the first is there before memory or time is counted."""
    layer = nn.Linear(dim, dim)
    layer(torch.zeros(rows, dim)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()
