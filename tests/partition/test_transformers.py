"""Models of the transformers library, as they are: cut by torch.export, trained with the numbers of the uncut model."""

import os
from typing import Any

import pytest
import torch
from models import Batch, ModelCase
from runners import on_ranks
from test_bits_of_any_cut import CutRun, assert_equal, rank_runs, run_steps, uncut
from torch import nn

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.kernels]

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers: Any = pytest.importorskip("transformers")
create_causal_mask: Any = pytest.importorskip("transformers.masking_utils").create_causal_mask

SHAPE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 17,
}  # fmt: skip


def dropouts(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, num_key_value_heads=1, max_position_embeddings=12))


def llama_recomputed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def gpt2() -> nn.Module:
    none = dropouts("attn_pdrop", "embd_pdrop", "resid_pdrop")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=17, n_positions=12, **none)
    )


def bert() -> nn.Module:
    none = dropouts("hidden_dropout_prob", "attention_probs_dropout_prob")
    return transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, max_position_embeddings=12, **none))


def t5() -> nn.Module:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 17}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, dropout_rate=0, decoder_start_token_id=0))


def vit() -> nn.Module:
    shape = {name: size for name, size in SHAPE.items() if name != "vocab_size"}
    none = dropouts("hidden_dropout_prob", "attention_probs_dropout_prob")
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**shape, image_size=8, patch_size=4, num_labels=3, **none)
    )


def ids(rows: int, seed: int, time: int = 6) -> torch.Tensor:
    return torch.randint(1, 17, (rows, time), generator=torch.Generator().manual_seed(seed))


def causal(rows: int, seed: int) -> Batch:
    return Batch((), ids(rows, seed + 50), {"input_ids": ids(rows, seed), "use_cache": False})


def causal_and_masked_in_some_rows(rows: int, seed: int) -> Batch:
    """Of two microbatches one has a mask of only ones, for which transformers makes no mask."""
    args, target, kwargs = causal(rows, seed)
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[rows // 2 :, 4:] = 0
    return Batch(args, target, {**kwargs, "attention_mask": mask})


def causal_and_masked(rows: int, seed: int) -> Batch:
    args, target, kwargs = causal(rows, seed)
    return Batch(args, target, {**masked(rows, seed).kwargs, **kwargs})


def masked(rows: int, seed: int) -> Batch:
    mask = (torch.arange(6)[None] < 3 + torch.arange(rows)[:, None] % 4).long()
    return Batch((), ids(rows, seed + 50), {"input_ids": ids(rows, seed), "attention_mask": mask})


def translated(rows: int, seed: int) -> Batch:
    both = {"input_ids": ids(rows, seed), "decoder_input_ids": ids(rows, seed + 25, 5), "use_cache": False}
    return Batch((), ids(rows, seed + 50, 5), both)


def images(rows: int, seed: int) -> Batch:
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Batch((), torch.arange(rows) % 3, {"pixel_values": pixels})


def loss_of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


CASES = {
    "llama": ModelCase(llama, loss_of_logits, causal_and_masked),
    "llama without a mask": ModelCase(llama, loss_of_logits, causal),
    "llama with a mask in some rows": ModelCase(llama, loss_of_logits, causal_and_masked_in_some_rows),
    "llama that recomputes its layers": ModelCase(llama_recomputed, loss_of_logits, causal_and_masked),
    "gpt-2, tied": ModelCase(gpt2, loss_of_logits, causal),
    "bert": ModelCase(bert, loss_of_logits, masked),
    "t5, tied": ModelCase(t5, loss_of_logits, translated),
    "vit": ModelCase(vit, loss_of_logits, images),
}

RUNS = [
    CutRun("llama", ("model.layers.1",), by="example"),
    CutRun("llama that recomputes its layers", ("model.layers.0", "model.layers.1", "model.norm"), "zb-v", by="example"),
    CutRun("gpt-2, tied", ("transformer.h.0", "transformer.h.1", "lm_head"), "interleaved-1f1b", by="example"),
    CutRun("gpt-2, tied", ("transformer.h.1", "transformer.ln_f", "lm_head"), "zb-v", by="example", meta=True),
    CutRun("bert", ("bert.encoder.layer.0", "bert.encoder.layer.1", "cls"), "zb-v", by="example"),
    CutRun("t5, tied", ("encoder.block.1", "decoder", "decoder.block.1"), "interleaved-1f1b", by="example"),
    CutRun("vit", None, "1f1b", rows=2, by="measure"),
    CutRun("llama", None, "zb-v", by="measure", meta=True),
    CutRun("llama with a mask in some rows", ("model.layers.1",), "1f1b", by="example"),
]
WITHOUT_MASK = CutRun("llama without a mask", ("model.layers.0", "model.layers.1", "model.norm"), "zb-v", by="example")


def rank_without_mask() -> Any:
    case = CASES[WITHOUT_MASK.case]
    pipe = WITHOUT_MASK.pipeline(case)
    text = pipe.generate(ids(4, 1), max_new_tokens=6, eos=2, use_cache=False)
    return run_steps(pipe, WITHOUT_MASK, case), text


@pytest.fixture(scope="module")
def everyone() -> list[Any]:
    return on_ranks(rank_runs, 2, RUNS, CASES)


@pytest.fixture(scope="module")
def without_mask() -> list[Any]:
    return on_ranks(rank_without_mask, 2)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case} {run.schedule}{' from meta' * run.meta}")
def test_transformers_models_have_the_numbers_of_the_uncut_ones(everyone, run):
    assert_equal(run, [result[RUNS.index(run)] for result in everyone], uncut(run, CASES))


def test_a_model_without_a_mask_has_the_numbers_of_the_uncut_one_though_an_exported_one_makes_a_mask(without_mask):
    """Of grouped heads attention's kernels with and without a mask have other bits."""
    assert_equal(WITHOUT_MASK, [result for result, _ in without_mask], uncut(WITHOUT_MASK, CASES))


def test_an_exported_model_generates_the_tokens_of_its_own_generate(without_mask):
    prompt, model = ids(4, 1), CASES[WITHOUT_MASK.case].model().eval()
    given = {"attention_mask": torch.ones_like(prompt), "eos_token_id": 2, "pad_token_id": 2}
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, **given)
    assert all(torch.equal(text, expected) for _, text in without_mask)


class BiasBetweenLayers(nn.Module):
    """Does something with the mask around its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(17, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.config = transformers.LlamaConfig(**SHAPE, attn_implementation="eager")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = create_causal_mask(self.config, hidden, None, None)
        for layer in self.layers:
            hidden = layer(hidden) + (mask == 0).sum(-1)[:, 0, :, None]
        return hidden


def test_a_mask_that_code_around_the_layers_uses_is_the_exported_one() -> None:
    model, tokens = BiasBetweenLayers(), ids(4, 1)
    stages = ps.partition.split(model, 2, cuts=["layers.1"], example_args=(tokens[:2],))
    assert torch.equal(ps.partition.run(stages, tokens), model(tokens))
    names = [str(node.target) for stage in stages for node in stage.penstock._nodes[True]]
    assert not any("create_causal_mask" in name for name in names)
