"""What the benchmarks train: stages, a batch and a loss, the same bits for every engine that runs them."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.learn.devices import EmulatedDevice
from penstock.model import GPT, GPTConfig, mlp
from penstock.partition import split


class Subject(Protocol):
    """A model cut into stages, its batch and its loss."""

    @property
    def name(self) -> str:
        """How it is called in the tables."""

    @property
    def nominal(self) -> tuple[float, float, float] | None:
        """Seconds of F, I and W of a stage, where they are known beforehand."""

    @property
    def message(self) -> int:
        """Bytes that pass between two stages for one microbatch, when a batch has 8 of them."""

    def stages(self, count: int) -> list[nn.Module]:
        """One module for each stage."""

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Input and target."""

    def loss(self, output: Any, target: Any) -> Tensor:
        """A scalar."""


@dataclass(frozen=True)
class Emulated:
    """Devices that sleep; a microbatch is `rows` by `width` floats everywhere."""

    width: int
    seconds: float  # of F, of I and of W of a stage
    rows: int = 16

    @property
    def name(self) -> str:
        """The size of a message."""
        return f"{self.message >> 20} MB" if self.message >> 20 else f"{self.message >> 10} KB"

    @property
    def nominal(self) -> tuple[float, float, float]:
        """As asked for."""
        return self.seconds, self.seconds, self.seconds

    @property
    def message(self) -> int:
        """Bytes of a microbatch."""
        return 4 * self.rows * self.width

    def stages(self, count: int) -> list[nn.Module]:
        """`count` devices of the same speed."""
        return [EmulatedDevice(*self.nominal) for _ in range(count)]

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """(rows, width), (rows,) of all microbatches."""
        torch.manual_seed(1)
        return torch.randn(self.rows * microbatches, self.width), torch.randn(self.rows * microbatches)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """(rows, width), (rows,) -> scalar; costs next to nothing, however wide the output."""
        return _FirstColumn.apply(output, target)


class _FirstColumn(torch.autograd.Function):
    """The mean error of the first column. Its gradient does not depend on the output, so one copy serves all microbatches."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.shape = tuple(output.shape)
        return (output[:, 0] - target).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _first_column_gradient(ctx.shape, gradient.item()), None


@lru_cache
def _first_column_gradient(shape: tuple[int, int], seed: float) -> Tensor:
    gradient = torch.zeros(shape)
    gradient[:, 0] = seed / shape[0]
    return gradient


@dataclass(frozen=True)
class Trivial:
    """Stages of one multiplication: without compute to speak of, what is left of a step is the engine."""

    name: str = "trivial"
    nominal: None = None
    message: int = 128

    def stages(self, count: int) -> list[nn.Module]:
        """`count` multiplications."""
        return [Multiplication() for _ in range(count)]

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Two rows of 16 for each microbatch."""
        torch.manual_seed(1)
        return torch.randn(2 * microbatches, 16), torch.randn(2 * microbatches, 16)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """(rows, 16) twice -> scalar."""
        return functional.mse_loss(output, target)


class Multiplication(nn.Module):
    """The least a stage can do and still have a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        return hidden * self.weight


@dataclass(frozen=True)
class Perceptron:
    """The 16-layer MLP."""

    dim: int = 1024
    rows: int = 256
    dtype: torch.dtype = torch.float32
    nominal: None = None

    @property
    def name(self) -> str:
        """With its width."""
        return f"mlp {self.dim}"

    @property
    def message(self) -> int:
        """Bytes of a microbatch of activations."""
        return 4 * self.rows * self.dim // 8

    def stages(self, count: int) -> list[nn.Module]:
        """Cut where the parameters are even."""
        torch.manual_seed(0)
        return split(mlp(self.dim).to(self.dtype), count)

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """(rows, dim) and a class for each row."""
        torch.manual_seed(1)
        return torch.randn(self.rows, self.dim, dtype=self.dtype), torch.randint(2, (self.rows,))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """(rows, classes), (rows,) -> scalar."""
        return functional.cross_entropy(output, target)


@dataclass(frozen=True)
class TransformerSubject:
    """The small GPT on random tokens."""

    rows: int = 32
    name: str = "gpt"
    nominal: None = None
    config: GPTConfig = field(default_factory=GPTConfig)

    @property
    def message(self) -> int:
        """Bytes of a microbatch of activations."""
        return 4 * self.rows * self.config.context * self.config.width // 8

    def stages(self, count: int) -> list[nn.Module]:
        """Cut where the parameters are even."""
        torch.manual_seed(0)
        return split(GPT(self.config), count)

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """(rows, time) tokens, and the same one token later."""
        torch.manual_seed(1)
        tokens = torch.randint(self.config.vocabulary, (self.rows, self.config.context + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """(rows, time, vocabulary), (rows, time) -> scalar."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
