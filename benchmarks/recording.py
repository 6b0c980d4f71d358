"""What it costs to record when every action ran.

python benchmarks/recording.py                      about a minute
python benchmarks/recording.py --action-ms 0.5 --turns 400

Ranks run steps whose actions sleep, in turns with the engine's clock and with one that records nothing.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist
import tyro
from torch import nn

import penstock as ps
from penstock.engine import step
from penstock.engine.clock import ActionClock, ClockTotals, make_clock
from penstock.learn.devices import DIM, EmulatedLayer

CALLS = 100_000  # of the clock alone
WARM_UP = 5  # steps


@dataclass
class RecordingOptions:
    """Measure steps with and without the record of their actions."""

    ranks: int = 2
    action_ms: float = 1.0  # of F and of B
    microbatches: int = 32
    turns: int = 300  # steps of each kind


class Silent(ActionClock):
    """Records nothing; of the step it says that it took a second."""

    now = staticmethod(float)

    def __init__(self) -> None:
        super().__init__()
        self.marks = deque(maxlen=0)  # type: ignore[assignment]

    def totals(self) -> ClockTotals:
        """First start, last end, and the time spent in actions: not known."""
        return ClockTotals(0.0, 1.0, 1.0, 0.0, 0.0)


def silent(device: torch.device, offset: float = 0.0, previous_end: object = None) -> ActionClock:
    """In the place of `make_clock`."""
    return Silent()


def steps(options: RecordingOptions) -> list[tuple[float, float]]:
    """Seconds of a step (with, without) the record, turn by turn. Run on every rank."""
    ps.comms.init_distributed(backend="gloo")
    seconds = options.action_ms / 1e3
    stages = [EmulatedLayer(DIM, seconds, seconds) for _ in range(options.ranks)]
    pipe = ps.Pipeline(stages, nn.functional.mse_loss, "1f1b", options.microbatches)
    batch = torch.randn(2, 2 * options.microbatches, DIM)
    for _ in range(WARM_UP):
        _step(pipe, batch)
    return [_turn(pipe, batch, turn) for turn in range(options.turns)]


def _turn(pipe: ps.Pipeline, batch: torch.Tensor, turn: int) -> tuple[float, float]:
    times = {}
    for recording in (True, False) if turn % 2 else (False, True):  # neither always goes first
        step.make_clock = make_clock if recording else silent
        times[recording] = _step(pipe, batch)
    return times[True], times[False]


def _step(pipe: ps.Pipeline, batch: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    pipe.step(batch[0], target=batch[1])
    return time.perf_counter() - begin


def alone() -> float:
    """Seconds that the record of one action takes, nothing else done."""
    clock = ActionClock()
    begin = time.perf_counter()
    mark, now = clock.marks.append, clock.now
    for _ in range(CALLS):
        mark(now())
        mark(now())
        mark(now())
    return (time.perf_counter() - begin) / CALLS


def main(options: RecordingOptions) -> None:
    """Measure and print both."""
    turns = ps.launch(steps, options.ranks, options)[0]
    with_record, without = zip(*turns, strict=True)
    ratios = [100 * (one / other - 1) for one, other in turns]
    low, middle, high = quantiles(ratios, n=4)
    alone_run = alone()
    size = f"{options.ranks} ranks, {2 * options.microbatches} actions of {options.action_ms:g} ms a rank"
    print(f"{options.turns} steps of each kind, {size}")
    print(f"a step with the record {1e3 * median(with_record):.2f} ms, without {1e3 * median(without):.2f} ms")
    uncertain = 0.93 * (high - low) / options.turns**0.5  # standard error of a median
    print(f"the record costs {middle:+.2f} +- {uncertain:.2f} % of a step (turn by turn; quartiles {low:+.2f}, {high:+.2f} %)")
    print(f"the clock alone: {1e9 * alone_run:.0f} ns an action, {100 * alone_run / (options.action_ms / 1e3):.3f} % of one")


if __name__ == "__main__":
    main(tyro.cli(RecordingOptions))
