"""What `checkpoint.save` costs beside a step, on a disk and in memory: python benchmarks/saving.py [WIDTH ..]

Two ranks train square layers with AdamW and save after every step, in turns into either folder. Printed are medians, of the
wall and of this rank's own processor time, which others on the machine disturb less.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.disk import is_in_memory

STEPS = 24
WARM_UP = 4
Times = list[tuple[float, float]]


def timed(times: Times, work: Callable[[], Any]) -> None:
    """Do `work`; add what it took, in milliseconds: the wall's and the processor's."""
    begin = time.perf_counter(), time.process_time()
    work()
    times.append(((time.perf_counter() - begin[0]) * 1e3, (time.process_time() - begin[1]) * 1e3))


def train(folders: list[str], width: int) -> str:
    """What it costs on this rank, in a line."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), nn.functional.mse_loss, "1f1b", 4)
    optimizer = torch.optim.AdamW(pipe.parameters())
    batch, times = torch.randn(32, width), dict[str, Times]()

    def step() -> None:
        pipe.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        folder = folders[number % len(folders)]
        timed(times.setdefault("step", []), step)
        where = "save in memory" if is_in_memory(Path(folder)) else "save on the disk"
        timed(times.setdefault(where, []), partial(checkpoint.save, folder, pipe, optimizer, keep=1))

    size = sum(value.nbytes for value in pipe.state_dict().values()) * 3 / 1e6
    told = []
    for name, duration in times.items():
        wall, own = (median(column) for column in zip(*duration[WARM_UP:], strict=True))
        told.append(f"{name} {wall:.1f} ({own:.1f})")
    return f"width {width}, {size:.1f} MB a rank: ms (of this rank's processor): {', '.join(told)}"


if __name__ == "__main__":
    for item in map(int, sys.argv[1:] or ("64", "512", "1024")):
        with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            print(ps.launch(train, 2, [disk, memory], item)[0], flush=True)
