"""Which of the ranks have a GPU of their own, as they tell each other at the store, and with that what carries tensors."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NO_GPU = "none"
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # Penstock ends waits in vain: torch's watchdog ends the process


def gpu_of(device: torch.device) -> str:
    """What tells a GPU from all others, those of other machines too; NO_GPU for what NCCL does not reach."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return NO_GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def backend_for(gpus: Sequence[str]) -> str:
    """What carries tensors between ranks on these `gpus`: NCCL, which refuses two ranks on one, else Gloo."""
    return "nccl" if NO_GPU not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def common_backend(device: torch.device, store: Any, rank: int, ranks: int, timeout: timedelta) -> str:
    """What carries tensors between all ranks, of which this one is on `device`. All call it; RuntimeError if they do not."""
    keys, gpu = [f"gpu-{each}" for each in range(ranks)], gpu_of(device)
    store.set(keys[rank], gpu)
    if gpu == NO_GPU:
        return backend_for([gpu])  # which decides it
    store.wait(keys, timeout)
    return backend_for([store.get(key).decode() for key in keys])


def settle_nccl() -> None:
    """How NCCL is to behave where the user's environment does not say it."""
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
