"""`attn_implementation="penstock"`: transformers' models call `ps.attention` when a pipeline cuts their tokens.

Otherwise they call transformers' own "sdpa", with its masks. When tokens are cut, the mask of (batch, time) is passed to
`ps.attention` unchanged, because a mask over queries and keys would cover only one rank's part.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.errors import MismatchError
from penstock.stage.attention import attention, current_context

NAME = "penstock"
UNSUPPORTED_KEYWORDS = ("position_bias", "s_aux", "sliding_window", "softcap")  # of transformers' attention functions


def register_attention() -> None:
    """Register the attention and its mask with transformers, as "penstock"."""
    AttentionInterface.register(NAME, pipeline_attention)
    AttentionMaskInterface.register(NAME, pipeline_mask)


def pipeline_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output in transformers' form, (batch, time, heads, width), and None for the weights."""
    if current_context() is None:
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments, **kwargs)
        return result

    if unsupported := [name for name in UNSUPPORTED_KEYWORDS if kwargs.get(name) is not None]:
        raise MismatchError(
            f"the attention of a {type(module).__name__} has a {unsupported[0]}, with which tokens cannot be cut"
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    output = attention(query, key, value, causal=causal, mask=attention_mask, scale=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def pipeline_mask(
    *arguments: Any,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask for `pipeline_attention`: if tokens are cut, the padding mask of (batch, time), or None."""
    settings = {"mask_function": mask_function, "attention_mask": attention_mask, "local_size": local_size}
    if current_context() is None:
        mask: Tensor | None = sdpa_mask(*arguments, **settings, use_vmap=use_vmap, **kwargs)
        return mask

    # An export always requests the mask of packed documents, an "and" of two masks, for any positions.
    is_plain = getattr(mask_function, "__name__", "") in ("causal_mask_function", "bidirectional_mask_function", "and_mask")
    if local_size is not None or use_vmap or not is_plain:
        raise MismatchError(
            "the model's attention has its own mask (a sliding window, chunks, blocks), with which tokens cannot be cut"
        )
    return attention_mask
