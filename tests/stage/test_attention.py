"""`ps.attention`: torch's own where nothing is cut, to the bit, and what it adds for caches and masks."""

import os
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import penstock as ps
from penstock.guards.attention_check import check_tokens_mix_in_attention
from penstock.stage.attention import AttentionContext, attention_context

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def heads(time: int, number: int = 4) -> torch.Tensor:
    return torch.randn(2, number, time, 8)


def test_it_is_torchs_attention_to_the_bit() -> None:
    query, key, value = heads(7), heads(7, 2), heads(7, 2)
    for causal in (True, False):
        expected = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True, scale=0.3)
        assert torch.equal(ps.attention(query, key, value, causal=causal, scale=0.3), expected)
    torch.manual_seed(1)
    dropped = ps.attention(query, key, value, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, scaled_dot_product_attention(query, key, value, None, 0.5, True, enable_gqa=True))


def test_the_queries_are_the_last_tokens_and_masks_hold_besides() -> None:
    query, key, value = heads(7).double(), heads(7).double(), heads(7).double()
    whole = ps.attention(query, key, value)
    for last in (1, 3):
        assert (ps.attention(query[:, :, -last:], key, value) - whole[:, :, -last:]).abs().max() < 1e-14

    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, :2] = False
    right = ps.attention(query[1:, :, 2:], key[1:, :, 2:], value[1:, :, 2:])
    additive = torch.zeros(2, 1, 1, 7).double().masked_fill(~padding[:, None, None], -torch.inf)
    for mask in (padding, padding[:, None, None], additive):
        assert (ps.attention(query, key, value, mask=mask)[1:, :, 2:] - right).abs().max() < 1e-14
    for wrong in (padding[:, :6], padding.float(), padding[0]):
        with pytest.raises(ps.MismatchError, match="boolean mask of"):
            ps.attention(query, key, value, mask=wrong)


def test_a_layer_that_mixes_tokens_by_itself_is_named() -> None:
    check_tokens_mix_in_attention(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv1d(4, 4, 1)))
    for layer in (torch.nn.MultiheadAttention(4, 1), torch.nn.GRU(4, 4), torch.nn.Conv1d(4, 4, 3)):
        with pytest.raises(ps.MismatchError, match=f"before 1, a {type(layer).__name__}, which mixes"):
            check_tokens_mix_in_attention(torch.nn.Sequential(torch.nn.Linear(4, 4), layer))


def test_transformers_models_call_it_with_the_bits_of_sdpa() -> None:
    transformers: Any = pytest.importorskip("transformers")
    import penstock.integrations.transformers  # noqa: F401 - registers it

    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 17}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=16))
    tokens, padding = torch.randint(17, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    padding[1, :2] = 0
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    for inputs in ({}, {"attention_mask": padding}, {"position_ids": packed}):
        model.set_attn_implementation("sdpa")
        expected = model(tokens, **inputs).logits
        model.set_attn_implementation("penstock")
        assert torch.equal(model(tokens, **inputs).logits, expected)
        with attention_context(AttentionContext()):
            if "position_ids" not in inputs:
                assert (model(tokens, **inputs).logits - expected)[:, 2:].abs().max() < 1e-6

    sliding = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, intermediate_size=16, sliding_window=4))
    sliding.set_attn_implementation("penstock")
    with attention_context(AttentionContext()), pytest.raises(ps.MismatchError, match="sliding window"):
        sliding(tokens)
