"""What a pipeline gains over layers that are spread over devices in one process, as `device_map="auto"` does.

Both sides use emulated devices, which sleep in proportion to the rows instead of computing. They alternate.

    python benchmarks/device_map.py
"""

import time
from statistics import quantiles

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.learn.devices import EmulatedDevice

RANKS, ROWS, FORWARD_SECONDS, STEPS = 2, 16, 0.004, 15  # seconds for a row on a device; a backward takes twice as long


class Device(EmulatedDevice):
    """A device that takes as long as a microbatch has rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Sleep for (rows, ..)."""
        self.seconds = len(hidden) * FORWARD_SECONDS, 2 * len(hidden) * FORWARD_SECONDS
        return super().forward(hidden)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean, whatever the target."""
    return output.mean()


def spread_step(model: nn.Module, batch: Tensor) -> float:
    """Return the seconds of a step of one process over all devices."""
    start = time.perf_counter()
    loss_fn(model(batch), batch).backward()
    return time.perf_counter() - start


def measure(microbatches: int) -> tuple[list[float], list[float]]:
    """Return seconds of steps of both sides, in turn; rank 0 runs the one process while the others wait for their next step."""
    devices = [Device(1.0, 1.0) for _ in range(RANKS)]
    pipe = ps.Pipeline([Device(1.0, 1.0) for _ in range(RANKS)], loss_fn, "1f1b", microbatches)
    batch, spread, piped = torch.ones(ROWS, 4), [], []
    for _ in range(STEPS + 1):
        if pipe.topology.rank == 0:
            spread.append(spread_step(nn.Sequential(*devices), batch))
        pipe.step(batch, target=batch)
        assert pipe.report is not None
        piped.append(pipe.report.makespan)
    return spread[1:], piped[1:]


def spread_text(seconds: list[float]) -> str:
    """Return median and quartiles in ms."""
    low, middle, high = quantiles(seconds, n=4)
    return f"{1e3 * middle:.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})"


if __name__ == "__main__":
    print("| M | one process, one device at a time | pipeline | ratio | (M + P - 1) / (M P) |\n|---|---|---|---|---|")
    for microbatches in (2, 4, 8, 16):
        spread, piped = ps.launch(measure, RANKS, microbatches)[0]
        ratio = quantiles([ours / theirs for ours, theirs in zip(piped, spread, strict=True)], n=4)[1]
        rule = (microbatches + RANKS - 1) / (microbatches * RANKS)
        print(f"| {microbatches} | {spread_text(spread)} | {spread_text(piped)} | {ratio:.2f} | {rule:.2f} |")
