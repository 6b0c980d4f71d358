"""What this machine offers: devices, backends, what a message costs, and what is missing."""

import importlib.util
import os
import platform
import time
from importlib.metadata import version

import torch
import torch.distributed as dist

from penstock import comms
from penstock.launcher import launch

SIZES = (1, 16_384, 1_048_576)  # floats
ROUNDS = 50
EXTRAS = {"sklearn": "penstock train --model mlp (pip install 'penstock[mlp]')"}


def examine() -> None:
    """Print it all; a minus sign is in front of what is missing."""
    print(f"+ Python {platform.python_version()}, torch {version('torch')}, penstock {version('penstock')}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"+ {cores} processor cores: more ranks than that share them, and computing takes longer than the table says")
    _devices()
    _say(dist.is_gloo_available(), "Gloo, for CPUs", "Gloo: this build of torch does not have it")
    _say(dist.is_nccl_available(), "NCCL, for GPUs", "NCCL: this build of torch does not have it")
    for module, use in EXTRAS.items():
        _say(importlib.util.find_spec(module) is not None, f"{module}, for {use}", f"{module}, needed for {use}")
    begin = time.perf_counter()
    launch(_nothing, 2)
    print(f"+ two ranks start in {time.perf_counter() - begin:.2f} s, the first time in a program")
    begin = time.perf_counter()
    launch(_nothing, 2)
    print(f"+ two ranks start in {time.perf_counter() - begin:.2f} s, later")
    for floats, seconds in launch(_ping_pong, 2)[0].items():
        size = floats * 4
        print(f"+ a message of {size:>9,} bytes takes {seconds * 1e6:6.0f} us, {size / seconds / 1e9:.2f} GB/s")


def _say(there: bool, present: str, absent: str) -> None:
    print(f"+ {present}" if there else f"- {absent}")


def _devices() -> None:
    if not torch.cuda.is_available():
        print("- no CUDA GPU that torch can use: stages live on the CPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"+ cuda:{index} {properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if torch.backends.mps.is_available():
        print("+ mps: Apple's GPU (messages go through host memory)")


def _nothing() -> None:
    pass


def _ping_pong() -> dict[int, float]:
    """Floats of a message -> seconds one way, the median over rounds there and back."""
    rank, result = comms.init_distributed(device="cpu").rank, {}
    for floats in SIZES:
        ball, times = torch.zeros(floats), []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            if rank == 0:
                dist.send(ball, 1)
                dist.recv(ball, 1)
            else:
                dist.recv(ball, 0)
                dist.send(ball, 0)
            times.append((time.perf_counter() - begin) / 2)
        result[floats] = sorted(times)[ROUNDS // 2]
    return result
