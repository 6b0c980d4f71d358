"""Seeds that depend on the purpose of the random numbers, not on rank or order; and the switch for deterministic bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import torch

from penstock.torch_private import mps_generator

_64_BITS = 2**64 - 1


def mix_seed(*numbers: int) -> int:
    """Return one 64-bit seed for several numbers."""
    seed = 0
    for number in numbers:
        seed = mix_in(seed, number)
    return seed


def mix_in(seed: int, number: int) -> int:
    """Return a new 64-bit seed for a seed and one more number (SplitMix64's finaliser; Steele, Lea and Flood 2014)."""
    state = (seed ^ index(number)) + 0x9E3779B97F4A7C15 & _64_BITS
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _64_BITS
    return state ^ state >> 31


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on `device` use."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return mps_generator()
    return torch.default_generator


def use_deterministic_algorithms() -> None:
    """Make torch give the same bits each time, on a GPU too; it raises for an operation that has no deterministic kernel.

    Call it before the first matrix product: cuBLAS reads the size of its workspace once. Products of float32 are computed in
    float32, not in TF32.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it changes no result
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False


@contextmanager
def preserve_generator_state(device: torch.device) -> Iterator[torch.Generator]:
    """Yield the default generator of `device`, to be seeded and used; restore its state afterwards (as `fork_rng`)."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)
