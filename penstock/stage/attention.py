"""The attention that a model calls, `ps.attention`, so that a pipeline can cut its tokens over ranks or into slices.

Tokens meet in attention only. A pipeline that gives a forward a part of the tokens sets an `AttentionContext` around it, which
finds the keys and values of the other parts. Everywhere else `ps.attention` is torch's `scaled_dot_product_attention`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import MismatchError
from penstock.randomness import RandomnessByPosition
from penstock.torch_private import safe_softmax

TIME = 2  # the dimension of queries, keys and values that has the tokens
LOOKS_AHEAD = "looks at later tokens too (causal=False), which a slice does not have"
CHECKPOINTS = (
    "is run again in the backward by a checkpoint inside of the model, which cannot be done slice by slice: give "
    "Pipeline(.., recompute='block') instead"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(query @ key.T * scale) @ value for each head; in a pipeline, over tokens of other ranks too.

        mixed = ps.attention(query, key, value)  # in a layer's forward; (batch, heads, time, width) each

    query, key, value
        (batch, heads, time, width). Keys and values may have fewer heads, each of which serves several of the query's. With
        more keys than queries, as with a cache, the queries are the last tokens.
    causal
        A token sees itself and those before it.
    mask
        (batch, time), True for keys that count and False for padding; or as `scaled_dot_product_attention` takes it,
        (batch, heads, queries, keys) or 1 instead of a size. With `causal` both hold.
    scale
        By default 1 / sqrt(width).
    dropout
        The probability with which a weight becomes 0. It does not know whether the layer trains: give 0 if not.

    Returns (batch, heads, time, width), to the bit what `scaled_dot_product_attention` returns.

    Raises MismatchError for a mask of another shape, and for one that cannot be cut where a pipeline cuts the tokens.
    """
    is_padding = mask is not None and mask.dtype == torch.bool and mask.shape == (key.shape[0], key.shape[2])
    if mask is not None and not is_padding and mask.dim() != 4:
        raise MismatchError(
            f"ps.attention takes a boolean mask of (batch, time), or one of (batch, heads, queries, keys), not {mask.dtype} of "
            f"shape {tuple(mask.shape)}"
        )
    attend_here = attend if _current is None else _current.count_and_attend
    return attend_here(query, key, value, causal, mask, scale, dropout)


class WeightsPart(NamedTuple):
    """The part that a forward has of attention's weights (batch, heads, tokens, tokens), besides its keys."""

    heads: int  # of all
    tokens: int  # of all
    first_head: int
    first_query: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
    part: WeightsPart | None = None,
) -> Tensor:
    """Return the attention of tokens that are all here; the arguments are those of `attention`.

    `part`: what is here of a sequence whose tokens are cut; dropout is then that of the whole one.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    causal = causal and bool(queries > 1)  # the last token alone sees all; a size may be symbolic, in an export
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]

    drops_part = part is not None and dropout > 0
    if causal and (mask is not None or queries != keys or drops_part):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
        causal = False
    if part is not None and drops_part:
        return _attend_with_dropout(query, key, value, mask, scale, dropout, part)
    return functional.scaled_dot_product_attention(
        *(query, key, value, mask, dropout, causal), scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
    )


def _attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float, part: WeightsPart
) -> Tensor:
    """Return what `scaled_dot_product_attention` does on a CPU, with its dropout for the whole sequence cut to `part`."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = query.shape, key.shape
    if heads != key_heads:
        key, value = (tensor.repeat_interleave(heads // key_heads, 1) for tensor in (key, value))
    scores = query @ key.mT * (width**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = safe_softmax(scores, -1)

    factors, _ = torch.native_dropout(weights.new_ones(batch, part.heads, part.tokens, part.tokens), dropout, True)
    factors = factors.narrow(1, part.first_head, heads).narrow(2, part.first_query, queries)[..., :keys].clone()
    return (weights * factors) @ value


class AttentionContext:
    """How `attention` computes inside of `attention_context`. This base class computes as it does without a context."""

    num_calls = 0  # of `attention`, so far
    lengths: Sequence[int] = ()  # the tokens of each part of the sequence, if the forward has one of them
    part = 0  # which one that is
    sequence_dim = 1  # the dimension that has the tokens

    @property
    def first_position(self) -> int:
        """The number of tokens of the sequence before those of this forward."""
        return sum(self.lengths[: self.part])

    def count_and_attend(self, *args: Any) -> Tensor:
        """Count the call, and return what `attend` does of these arguments."""
        self.num_calls += 1
        return self.attend(*args)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention of this forward's tokens. The arguments are of these tokens only."""
        return attend(query, key, value, causal, mask, scale, dropout)


class AttentionWhileTracing(AttentionContext):
    """Attention while a model is traced whose tokens will be cut, into slices or over ranks: it sees uncut examples."""

    def __init__(self, in_slices: bool) -> None:
        self._in_slices = in_slices

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention. Raise MismatchError for one that cannot be cut so."""
        if self._in_slices and not causal:
            raise MismatchError(f"tokens cannot be cut into slices: a layer of the model {LOOKS_AHEAD}")
        if not self._in_slices:
            check_mask_can_be_cut(mask)
        return attend(query, key, value, causal, mask, scale, dropout)


def check_mask_can_be_cut(mask: Tensor | None) -> None:
    """Raise MismatchError for a mask that ranks which share the tokens cannot have a part of."""
    if mask is not None and mask.dim() != 2:
        raise MismatchError(
            f"a mask over queries and keys, here of shape {tuple(mask.shape)}, cannot be cut along cp: give ps.attention "
            "one of (batch, time), besides causal="
        )


_current: AttentionContext | None = None  # for all threads: on a GPU, a backward that runs a forward again has its own


@contextmanager
def attention_context(context: AttentionContext | None) -> Iterator[None]:
    """Set `context` for the calls of `attention` inside; None for none. Random numbers are those of its part of the tokens."""
    global _current
    previous, _current = _current, context
    randomness: AbstractContextManager[Any] = nullcontext()
    if context is not None and context.lengths:
        randomness = RandomnessByPosition(context.lengths, context.part, context.sequence_dim)
    try:
        with randomness:
            yield
    finally:
        _current = previous


def current_context() -> AttentionContext | None:
    """Return the context that is set."""
    return _current


def no_attention_error() -> MismatchError:
    """Return the error for a model that never calls `attention`, where its tokens are to be cut."""
    return MismatchError(
        "no layer of the model calls ps.attention, in which alone tokens that are cut can meet: call it in place of "
        'scaled_dot_product_attention, or give a model of transformers attn_implementation="penstock"'
    )
