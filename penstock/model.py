"""The reference models: an MLP of many layers, whole and in slices, and a small GPT.

Every layer is initialised from a seed of its own, taken from torch's generator and the layer's number. So a slice has
the weights of the whole model without building the rest of it, and a GPT is the same wherever it is cut.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.batch.pieces import split_sizes
from penstock.comms.topology import CPU
from penstock.engine import cache
from penstock.errors import MismatchError
from penstock.randomness import mix_seed, preserve_generator_state
from penstock.stage.attention import attention


class _SeededBuilder:
    """Builds layers, each with the random numbers of its own number."""

    def __init__(self) -> None:
        self.seed = int(torch.randint(2**62, (), device="cpu"))  # advances the generator, so the next model is another

    def build_layer(self, number: int, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that `make` creates, initialised as layer `number`."""
        with preserve_generator_state(CPU) as generator:
            generator.manual_seed(mix_seed(self.seed, number))
            return make()


def _mlp_layers(dim: int, total_layers: int, classes: int, start: int, end: int) -> "OrderedDict[str, nn.Module]":
    """Return hidden layers `start` to `end`, by their names in the whole model; after the last one the head."""
    if dim < 1 or classes < 1 or total_layers < 1:
        raise MismatchError(f"an MLP needs a dim, layers and classes of 1 or more, got {dim}, {total_layers} and {classes}")
    seeded, layers = _SeededBuilder(), OrderedDict[str, nn.Module]()
    for number in range(start, end):
        layers[str(2 * number)] = seeded.build_layer(number, lambda: HiddenLinear(dim))
        layers[str(2 * number + 1)] = nn.ReLU()
    if end == total_layers:
        layers[str(2 * total_layers)] = seeded.build_layer(total_layers, lambda: nn.Linear(dim, classes))
    return layers


class HiddenLinear(nn.Linear):
    """A layer whose ReLU keeps the size of what passes, however deep (He et al. 2015); nn.Linear's own start shrinks it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


def mlp(dim: int, total_layers: int = 16, classes: int = 2) -> nn.Sequential:
    """The monolith: `total_layers` Linear layers of `dim` by `dim`, each with a ReLU, and a Linear head to `classes`.

    (batch, dim) -> (batch, classes). Its weights depend on torch's seed (`torch.manual_seed`) as those of `ShardedMLP`.
    Raises MismatchError for a number below 1.
    """
    return nn.Sequential(_mlp_layers(dim, total_layers, classes, 0, total_layers))


class ShardedMLP(nn.Module):
    """One rank's layers of `mlp(dim, total_layers, classes)`; the others are never created.

        slice = ps.ShardedMLP(512, 16, topology.rank, topology.world_size)
        pipe = ps.Pipeline({topology.rank: slice}, loss_fn)

    `rank`, `world_size`: which slice of how many. Layers that do not divide by the ranks go to the first ranks, one each; the
    last rank has the head. With the same seed on all ranks, all slices together have the names and, to the bit, the weights
    of the monolith. Raises MismatchError for a rank outside the world, or more ranks than layers.
    """

    def __init__(self, dim: int, total_layers: int = 16, rank: int = 0, world_size: int = 1, classes: int = 2) -> None:
        super().__init__()
        if not 0 <= rank < world_size or world_size > total_layers:
            ranks = f"ranks are 0 to {world_size - 1}, at most one for each of {total_layers} layers"
            raise MismatchError(f"no slice {rank} of {world_size}: {ranks}")
        shares = split_sizes(total_layers, world_size)
        start = sum(shares[:rank])
        for name, layer in _mlp_layers(dim, total_layers, classes, start, start + shares[rank]).items():
            self.add_module(name, layer)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, dim) to (batch, dim), on the last rank to (batch, classes)."""
        for layer in self.children():
            hidden = layer(hidden)
        return hidden


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a small GPT."""

    vocabulary: int = 256  # bytes
    context: int = 128  # tokens it sees at once
    width: int = 128
    layers: int = 8
    heads: int = 4
    dropout: float = 0.0


class GPT(nn.Sequential):
    """A decoder-only transformer as a plain sequence of layers: embedding, `layers` blocks, norm, head. Cut it anywhere.

    (batch, time) int64 tokens -> (batch, time, vocabulary) logits; time is at most `context`. Pre-norm blocks and
    initialisation as in GPT-2 (Radford et al. 2019).
    """

    def __init__(self, config: GPTConfig = GPTConfig()) -> None:
        if config.width % config.heads:
            raise MismatchError(f"width {config.width} does not divide by {config.heads} heads")
        seeded, blocks = _SeededBuilder(), range(config.layers)
        layers = OrderedDict[str, nn.Module](embedding=seeded.build_layer(0, lambda: GPTEmbedding(config)))
        layers |= {f"block{number}": seeded.build_layer(1 + number, lambda: GPTBlock(config)) for number in blocks}
        layers["norm"] = nn.LayerNorm(config.width)
        layers["head"] = seeded.build_layer(1 + config.layers, lambda: LinearWithGPT2Init(config.width, config.vocabulary))
        super().__init__(layers)
        self.config = config

    def tensor_parallel(self) -> dict[str, Any]:
        """Return the plan for `Pipeline(.., tensor_parallel=)`: it shards attention heads, perceptrons and the head."""
        from torch.distributed.tensor import Replicate  # these import for a second
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        columns, rows = ColwiseParallel(), RowwiseParallel()
        blocks = {"block*.qkv": columns, "block*.out": rows, "block*.up": columns, "block*.down": rows}
        return {**blocks, "head": ColwiseParallel(output_layouts=Replicate())}


class GPTEmbedding(nn.Module):
    """The embedding of tokens and of their positions, added."""

    uses_cache = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.token = GPT2Embedding(config.vocabulary, config.width)
        self.position = GPT2Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time) to vectors (batch, time, width)."""
        first_position = cache.first_position()
        positions = torch.arange(first_position, first_position + tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GPTBlock(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with a residual connection."""

    uses_cache = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.dropout = nn.Dropout(config.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LinearWithGPT2Init(width, 3 * width), LinearWithGPT2Init(width, width, 2 * config.layers)
        self.up, self.down = LinearWithGPT2Init(width, 4 * width), LinearWithGPT2Init(4 * width, width, 2 * config.layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm2(hidden)))))

    def attention(self, hidden: Tensor) -> Tensor:
        """Return causal self-attention: (batch, time, width) to the same shape."""
        batch, time, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, time, -1, 3, width // self.heads)  # head by head: ranks may have some heads each
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # each (batch, heads, time, width / heads)
        key, value = cache.extended(key, value)
        dropout = self.dropout.p if self.training else 0.0
        mixed = attention(query, key, value, dropout=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPT2Embedding(nn.Embedding):
    """An embedding with GPT-2's initialisation."""

    def reset_parameters(self) -> None:
        """Initialise the vectors as GPT-2 does."""
        nn.init.normal_(self.weight, std=0.02)


class LinearWithGPT2Init(nn.Linear):
    """A Linear with GPT-2's initialisation; `residuals`: the sums its output is one term of, over the whole depth."""

    def __init__(self, inputs: int, outputs: int, residuals: int = 1) -> None:
        self.std = 0.02 / math.sqrt(residuals)
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as GPT-2 does."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)
