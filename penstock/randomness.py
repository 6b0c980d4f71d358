"""Random numbers that depend on their purpose and place, not on rank or order; and the switch for deterministic bits."""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.errors import MismatchError
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


class preserve_generator_state:
    """A context whose value is the default generator of `device`, to be seeded and used; its state is restored (`fork_rng`)."""

    def __init__(self, device: torch.device) -> None:
        self._generator = default_generator(device)

    def __enter__(self) -> torch.Generator:
        self._state = self._generator.get_state()
        return self._generator

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._state)


# -- generators that no seed of a layer reaches ---------------------------------------------------------------------------


class GeneratorAccess(NamedTuple):
    """How to read the state of a random number generator, and how to set it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def list_generators(module: nn.Module) -> list[GeneratorAccess]:
    """Return torch's generator of the CPU, Python's, NumPy's if it is imported, and those that layers have as attributes."""
    generators = [
        GeneratorAccess(torch.get_rng_state, torch.set_rng_state),
        GeneratorAccess(random.getstate, random.setstate),
    ]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        generators.append(GeneratorAccess(numpy_random.get_state, numpy_random.set_state))
    attributes = {id(value): value for layer in module.modules() for value in vars(layer).values()}
    return generators + [access for value in attributes.values() if (access := _generator_access(value, numpy_random))]


def _generator_access(value: Any, numpy_random: Any) -> GeneratorAccess | None:
    """Return the access to a generator of torch, Python or NumPy; None for anything else."""
    if isinstance(value, torch.Generator):
        return GeneratorAccess(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return GeneratorAccess(value.getstate, value.setstate)
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return GeneratorAccess(value.get_state, value.set_state)
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        return GeneratorAccess(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    return None


@contextmanager
def use_generator_states(generators: Sequence[GeneratorAccess], states: Sequence[Any]) -> Iterator[None]:
    """Set the generators to `states` inside. Afterwards they have the states from before."""
    current = [generator.read() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.write(state)
        yield
    finally:
        for generator, state in zip(generators, current, strict=True):
            generator.write(state)


# -- where a forward has a part of a sequence's tokens ------------------------------------------------------------------

_DROPOUTS = frozenset((functional.dropout, functional.dropout1d, torch.dropout, torch.ops.aten.dropout.default))
_FILLS = frozenset((torch.rand_like, torch.randn_like, Tensor.bernoulli_, Tensor.exponential_, Tensor.normal_, Tensor.uniform_))


class RandomnessByPosition(TorchFunctionMode):
    """Draws random numbers for all tokens of a sequence, and takes those of a part: the ones that a forward of all would have.

    `lengths`: the tokens of each part. `part`: which one the forward inside has. `dim`: the dimension that has the tokens.
    """

    def __init__(self, lengths: Sequence[int], part: int, dim: int) -> None:
        self._first, self._length, self._total, self._dim = sum(lengths[:part]), lengths[part], sum(lengths), dim

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch. Raises MismatchError for a dropout of a tensor that lacks the part's tokens."""
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return self._drop(function, *args, **kwargs)
        if function not in _FILLS or (dim := self._token_dim(args[0])) is None:
            return function(*args, **kwargs)
        numbers = self._take_part(function(self._empty_whole(args[0], dim), *args[1:], **kwargs), dim)
        return args[0].copy_(numbers) if function.__name__.endswith("_") else numbers

    def _drop(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool = True,
    ) -> Tensor:
        if not (p and training and train):
            return input
        if (dim := self._token_dim(input)) is None:
            raise MismatchError(
                f"a layer drops elements of a tensor of shape {tuple(input.shape)}, which does not have the {self._length} "
                f"tokens of this part of a sequence in dimension {self._dim} (sequence_dim): use dropout before that shape"
            )
        factors = self._take_part(function(self._empty_whole(input, dim).fill_(1), p, True), dim)
        return input.mul_(factors) if inplace else input * factors

    def _token_dim(self, tensor: Tensor) -> int | None:
        """Return the dimension of a tensor that has the tokens; of (rows * tokens, width) the first."""
        dim = self._dim
        if dim == 1 and tensor.dim() == 2 and tensor.shape[0] % self._length == 0:
            return 0
        return dim if tensor.dim() > dim and tensor.shape[dim] == self._length else None

    def _empty_whole(self, tensor: Tensor, dim: int) -> Tensor:
        """Return an empty tensor like a part's, with all tokens and the same order in memory, in which numbers are drawn."""
        shape, order = list(tensor.shape), list(range(tensor.dim()))
        shape[dim] = shape[dim] // self._length * self._total
        if not tensor.is_contiguous():
            order.sort(key=tensor.stride, reverse=True)
        return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)

    def _take_part(self, whole: Tensor, dim: int) -> Tensor:
        parts = whole.unflatten(dim, (-1, self._total)).narrow(dim + 1, self._first, self._length)
        return parts.flatten(dim, dim + 1).clone()
