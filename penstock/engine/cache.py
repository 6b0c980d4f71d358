"""A cache of earlier tokens, such as keys and values, for layers while a pipeline generates: a pass then brings one new token.

`Pipeline.generate` uses it if every layer of the model supports it. A layer that reads other tokens, or positions, declares
`uses_cache` and calls the functions below; a layer like `nn.Linear` or `nn.LayerNorm`, which takes each token by itself, need
not:

    class Attention(nn.Module):
        uses_cache = True
        context = 128  # if there is a limit: how many tokens it can take at once

        def forward(self, hidden):                              # (batch, time, width): while a cache is used, the new tokens
            query, key, value = self.heads(hidden)              # (batch, heads, time, size) each
            key, value = ps.cache.extended(key, value)          # of all tokens so far
            return ps.attention(query, key, value)              # a token sees itself and those before it

Without a cache - in training, in an evaluation, in one process - `extended` returns its arguments, and the position is 0, or
where the tokens of this rank begin, if the mesh has an axis `cp`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.attention import current_context
from penstock.torch_private import has_hooks_or_patched_forward, is_compiled

_TOKENWISE_LAYERS = nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity
_TOKENWISE_ACTIVATIONS = nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid
_TOKENWISE_FORWARDS = {layer.forward for layer in _TOKENWISE_LAYERS + _TOKENWISE_ACTIVATIONS}


class TokenCache:
    """The tensors that the layers of one stage have cached for one microbatch."""

    def __init__(self) -> None:
        self.first_position = 0  # of the tokens of this forward
        self._entries: list[tuple[Tensor, ...]] = []  # in the order of the calls of `extend` in a forward
        self._next_entry = 0

    @contextmanager
    def forward_at(self, first_position: int) -> Iterator[None]:
        """Make this the current cache during a forward of the stage, whose first token is at `first_position`."""
        global _current
        _current, self.first_position, self._next_entry = self, first_position, 0
        try:
            yield
        finally:
            _current = None

    def extend(self, tensors: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
        """Append `tensors` to the next entry along `dim`, and return the entry."""
        if self._next_entry < len(self._entries):
            entry = self._entries[self._next_entry]
            tensors = tuple([torch.cat(pair, dim) for pair in zip(entry, tensors, strict=True)])
        self._entries[self._next_entry : self._next_entry + 1] = [tensors]
        self._next_entry += 1
        return tensors


_current: TokenCache | None = None


def first_position() -> int:
    """Return how many tokens precede those of this forward: 0 unless a pipeline generates with a cache, or cuts the tokens."""
    context = current_context() if _current is None else _current
    return 0 if context is None else context.first_position


def extended(*tensors: Tensor, dim: int = -2) -> tuple[Tensor, ...]:
    """Return `tensors` of this forward's tokens joined along `dim` behind those of all earlier tokens, and cache them."""
    return tensors if _current is None else _current.extend(tensors, dim)


def supports_incremental_decoding(module: nn.Module) -> bool:
    """Whether all layers of `module` take each token by itself or use the cache. Compiled modules do not."""
    if is_compiled(module) or has_hooks_or_patched_forward(module):
        return False
    if type(module).forward is nn.Sequential.forward:
        return all(map(supports_incremental_decoding, module.children()))
    if type(module).forward in _TOKENWISE_FORWARDS:
        return True
    return getattr(module, "uses_cache", False) and not any(map(is_compiled, module.modules()))


def max_context(modules: Iterable[nn.Module]) -> int | None:
    """Return how many tokens the layers of `modules` can take at once; None if none declares a `context`."""
    layers: list[Any] = [layer for module in modules for layer in module.modules() if getattr(layer, "uses_cache", False)]
    return min((layer.context for layer in layers if hasattr(layer, "context")), default=None)
