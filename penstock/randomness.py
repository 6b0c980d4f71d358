"""Random numbers that depend on what they are for, never on which rank draws them or in which order; and bits that repeat."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import torch

from penstock.torch_private import mps_generator

_MASK = 2**64 - 1


def mix_seed(*numbers: int) -> int:
    """One 64-bit seed from several numbers."""
    state = 0
    for number in numbers:
        state = mix_in(state, number)
    return state


def mix_in(state: int, number: int) -> int:
    """`mix` of one number more (SplitMix64's finaliser; Steele, Lea and Flood 2014)."""
    state = (state ^ index(number)) + 0x9E3779B97F4A7C15 & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on `device` draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return mps_generator()
    return torch.default_generator


def use_deterministic_algorithms() -> None:
    """From now on torch gives the same bits each time, on a GPU too, or raises where an operation has no such way.

    To be called before the first product: cuBLAS reads once how much memory of its own it may use. Products of float32 are of
    float32, not of TF32.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # which changes no bit
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False


@contextmanager
def fork_generator(device: torch.device) -> Iterator[torch.Generator]:
    """The generator of `device`, to be seeded at will: its state is put back afterwards."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)
