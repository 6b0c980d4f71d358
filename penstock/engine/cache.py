"""What layers keep of earlier tokens while a pipeline generates, so that each pass brings only the new one.

`Pipeline.generate` does so where every layer of the model takes part. A layer that looks at other tokens, or at their places,
says so, and asks here; a layer like `nn.Linear` or `nn.LayerNorm`, which takes each token by itself, need not:

    class Attention(nn.Module):
        uses_cache = True
        context = 128  # if there is a limit: how many tokens it can take at once

        def forward(self, hidden):                              # (batch, time, width): while a cache is used, the new tokens
            query, key, value = self.heads(hidden)              # (batch, heads, time, size) each
            key, value = ps.cache.extended(key, value)          # of all tokens so far
            causal = ps.cache.first_position() == 0             # else there is one token, which sees all before
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

Everywhere else - in training, in an evaluation, in one process - `extended` returns what it is given, and the position is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_private import has_hooks_or_patched_forward, is_compiled

TOKENWISE = (
    *(nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)  # fmt: skip
_forwards = {kind.forward for kind in TOKENWISE}


class Cache:
    """What the layers of one stage keep of one microbatch."""

    def __init__(self) -> None:
        self.first = 0  # position of the first token of this forward
        self._kept: list[tuple[Tensor, ...]] = []  # in the order in which a forward asks
        self._next = 0

    @contextmanager
    def at(self, first: int) -> Iterator[None]:
        """Around a forward of the stage, whose first token is at that position."""
        global _current
        _current, self.first, self._next = self, first, 0
        try:
            yield
        finally:
            _current = None

    def extended(self, tensors: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
        """See below."""
        if self._next < len(self._kept):
            tensors = tuple([torch.cat(both, dim) for both in zip(self._kept[self._next], tensors, strict=True)])
        self._kept[self._next : self._next + 1] = [tensors]
        self._next += 1
        return tensors


_current: Cache | None = None


def first_position() -> int:
    """How many tokens came before those that a forward is given: 0 unless a pipeline generates with a cache."""
    return 0 if _current is None else _current.first


def extended(*tensors: Tensor, dim: int = -2) -> tuple[Tensor, ...]:
    """`tensors` of the tokens that a forward is given, behind those of all tokens before: joined along `dim`, and kept."""
    return tensors if _current is None else _current.extended(tensors, dim)


def takes_part(module: nn.Module) -> bool:
    """Whether all layers of `module` take each token by itself, or use the cache; what is compiled does not."""
    if is_compiled(module) or has_hooks_or_patched_forward(module):
        return False
    if type(module).forward is nn.Sequential.forward:
        return all(map(takes_part, module.children()))
    if type(module).forward in _forwards:
        return True
    return getattr(module, "uses_cache", False) and not any(map(is_compiled, module.modules()))


def context_of(module: nn.Module) -> int | None:
    """How many tokens the layers of `module` that say so can take at once; None if any number."""
    layers: list[Any] = [each for each in module.modules() if getattr(each, "uses_cache", False)]
    return min((each.context for each in layers if hasattr(each, "context")), default=None)
