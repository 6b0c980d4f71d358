"""What `checkpoint.remember` costs beside a step and beside `checkpoint.save`: python benchmarks/remember.py [WIDTH ..]

Two ranks train square layers with AdamW and remember after every step. Printed are medians, of the wall and of this rank's own
processor time, which others on the machine disturb less.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock import checkpoint

STEPS = 12


def timed(times: list[tuple[float, float]], work: Callable[[], Any]) -> None:
    """Do `work`; add what it took, in milliseconds: the wall's and the processor's."""
    begin = time.perf_counter(), time.process_time()
    work()
    times.append(((time.perf_counter() - begin[0]) * 1e3, (time.process_time() - begin[1]) * 1e3))


def train(folder: str, width: int) -> str:
    """What it costs on this rank, in a line."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), nn.functional.mse_loss, "1f1b", 4)
    optimizer = torch.optim.AdamW(pipe.parameters())
    batch = torch.randn(32, width)
    steps: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    saved: list[tuple[float, float]] = []

    def step() -> None:
        pipe.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        timed(steps, step)
        timed(kept, lambda: checkpoint.remember(folder, pipe, optimizer))
        if number % 4 == 3:
            timed(saved, lambda: checkpoint.save(folder, pipe, optimizer, keep=1))
    size = sum(value.nbytes for value in pipe.state_dict().values()) * 3 / 1e6
    told = [f"{name} {wall:.1f} ({own:.1f})" for name, wall, own in (
        (name, *(median(column) for column in zip(*times[2:], strict=True)))
        for name, times in (("step", steps), ("remember", kept), ("save", saved))
    )]  # fmt: skip
    return f"width {width}, {size:.1f} MB a rank: ms (of this rank's processor): {', '.join(told)}"


if __name__ == "__main__":
    for each in map(int, sys.argv[1:] or ("64", "512", "1024")):
        with tempfile.TemporaryDirectory() as where:
            print(ps.launch(train, 2, where, each, restarts=1)[0], flush=True)
