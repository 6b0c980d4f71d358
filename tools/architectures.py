"""Which architectures of transformers are cut, with which numbers beside the uncut model: docs/reference/architectures.md.

    python tools/architectures.py               all of them; takes some minutes
    python tools/architectures.py llama bert    some; the other rows stay as they were

Every model is a tiny one. It is cut by an example: built in memory for two ranks, and on the meta device for three, its
weights loaded. A step's loss and gradients are compared with those of the uncut model, microbatch by microbatch.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

import penstock as ps

TABLE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "architectures.md"
ROWS, TIME, WORDS, MICROBATCHES = 4, 6, 19, 2
VERSIONS = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
HEAD = f"""# Architectures of transformers

Written by `tools/architectures.py` with {VERSIONS}. Each model is tiny, with two or three layers, and is cut unchanged by
an example: `ps.Pipeline(model, loss, .., example_kwargs=batch)`. *In memory*: built on the CPU, two ranks, ZB-V. *On meta*:
built on the meta device, its weights loaded, three ranks, 1F1B. **bits**: loss and every gradient have the bits of the uncut
model with the same microbatches. A number is the largest difference of a gradient, relative to its largest value.
*Without a mask*: two stages in one process, on a batch without `attention_mask`; those of the other columns hide some tokens.
*By names*: whether `cuts=` is enough, without an example, because `torch.fx` can trace the forward.

| architecture | in memory | on meta | without a mask | by names |
|---|---|---|---|---|
"""
NOTES = """
With an example a model can be cut before any of its layers, chosen by `cuts=` or by measured times. If hooks read values inside
a layer, as for the routers' losses, the model can also be cut inside that layer.

Without a mask, or with one of only ones, transformers makes none, and attention may take another kernel, with other last bits.
So the functions that make masks are called in every forward, as in the uncut model, where only layers take what they return.
Rotary angles and other buffers that no checkpoint has are computed by the model's own `_init_weights`, as in `from_pretrained`.

Caches are off, also in the uncut model: a cache copies keys and values, and products with the copies have other last bits.
"""


def ids(seed: int) -> Tensor:
    """Tokens of a batch."""
    return torch.randint(3, WORDS, (ROWS, TIME), generator=torch.Generator().manual_seed(seed))


def masked() -> dict[str, Any]:
    """For an encoder."""
    return {"input_ids": ids(1), "attention_mask": (torch.arange(TIME) < 4 + torch.arange(ROWS)[:, None] % 3).long()}


def causal() -> dict[str, Any]:
    """For a decoder."""
    return {**masked(), "use_cache": False}


def sequences() -> dict[str, Any]:
    """For both."""
    return {**causal(), "decoder_input_ids": ids(2)}


def images() -> dict[str, Any]:
    """For a model that sees."""
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def speech() -> dict[str, Any]:
    """For a model that hears."""
    features = torch.randn(ROWS, 8, 16, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": ids(2), "use_cache": False}


class Architecture(NamedTuple):
    """A model's class and configuration, and a batch for it."""

    head: str
    config: dict[str, Any]
    batch: Callable[[], dict[str, Any]]

    def model(self, kind: str, device: str) -> nn.Module:
        """The model, always the same; without memory on the device `meta`."""
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model(kind, **self.config)
        with torch.device(device):
            model: nn.Module = getattr(transformers, f"AutoModelFor{self.head}").from_config(config)
        return model


NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
WIDTHS = {**LAYERS, "vocab_size": WORDS, "max_position_embeddings": 32, **NO_TOKENS}
GROUPED = {**WIDTHS, "num_key_value_heads": 1}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**WIDTHS, **STILL, "pad_token_id": 0}
GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": WORDS, "n_positions": 32, **NO_TOKENS}
GPT |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
TWICE: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": WORDS, "dropout": 0.0}
TWICE |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
TWICE |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def causal_of(**config: Any) -> Architecture:
    """A decoder of this configuration."""
    return Architecture("CausalLM", config, causal)


def masked_of(**config: Any) -> Architecture:
    """An encoder of this configuration."""
    return Architecture("MaskedLM", config, masked)


ARCHITECTURES = {
    "llama": causal_of(**GROUPED),
    "mistral, sliding window": causal_of(**GROUPED, sliding_window=4),
    "mixtral": causal_of(**GROUPED, **EXPERTS),
    "mixtral, router losses": causal_of(**GROUPED, **EXPERTS, output_router_logits=True),
    "qwen2, tied": causal_of(**GROUPED, tie_word_embeddings=True),
    "qwen3": causal_of(**GROUPED, head_dim=8),
    "qwen3_moe": causal_of(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gemma": causal_of(**GROUPED, head_dim=8),
    "gemma2": causal_of(**GROUPED, head_dim=8),
    "gemma3_text": causal_of(**GROUPED, head_dim=8),
    "phi": causal_of(**WIDTHS),
    "phi3": causal_of(**GROUPED),
    "olmo": causal_of(**WIDTHS),
    "olmo2": causal_of(**WIDTHS),
    "stablelm": causal_of(**GROUPED),
    "cohere": causal_of(**GROUPED),
    "falcon": causal_of(**WIDTHS),
    "mamba": causal_of(hidden_size=16, num_hidden_layers=3, vocab_size=WORDS, state_size=4, **NO_TOKENS),
    "gpt2": causal_of(**GPT),
    "gptj": causal_of(**GPT, rotary_dim=4),
    "gpt_neox": causal_of(**WIDTHS),
    "gpt_neo": causal_of(
        hidden_size=16, num_layers=3, num_heads=2, vocab_size=WORDS, max_position_embeddings=32,
        attention_types=[[["global"], 3]], embed_dropout=0.0, resid_dropout=0.0, attention_dropout=0.0, **NO_TOKENS,
    ),
    "opt": causal_of(**WIDTHS, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0),
    "bloom": causal_of(hidden_size=16, n_layer=3, n_head=2, vocab_size=WORDS, hidden_dropout=0.0, attention_dropout=0.0),
    "bert": masked_of(**ENCODER),
    "roberta": masked_of(**ENCODER),
    "electra": masked_of(**ENCODER, embedding_size=16),
    "deberta-v2": masked_of(**ENCODER),
    "distilbert": masked_of(
        dim=16, n_layers=3, n_heads=2, hidden_dim=32, vocab_size=WORDS, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0,
    ),
    "t5": Architecture(
        "Seq2SeqLM",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS, "dropout_rate": 0.0},
        sequences,
    ),
    "bart": Architecture("Seq2SeqLM", {**TWICE, "max_position_embeddings": 32, "forced_eos_token_id": 2}, sequences),
    "whisper": Architecture(
        "SpeechSeq2Seq",
        {**TWICE, "max_source_positions": 8, "max_target_positions": 12, "num_mel_bins": 8, "suppress_tokens": None,
         "begin_suppress_tokens": None},
        speech,
    ),
    "vit": Architecture(
        "ImageClassification", {**LAYERS, **STILL, "image_size": 8, "patch_size": 4, "num_labels": WORDS}, images
    ),
}  # fmt: skip


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Of the logits, and the routers' own where the model gives it."""
    loss = nn.functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())
    auxiliary = output.get("aux_loss")
    return loss if auxiliary is None else loss + 0.1 * auxiliary


def target_of(name: str) -> Tensor:
    """What the batch's logits should be."""
    return ids(3)[:, 0] if name == "vit" else ids(3)


def rows(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The batch in `count` microbatches."""
    size = ROWS // count
    return [
        {
            name: microbatch[size * number :][:size] if isinstance(microbatch, Tensor) else microbatch
            for name, microbatch in batch.items()
        }
        for number in range(count)
    ]


def batch_of(name: str, with_mask: bool) -> dict[str, Any]:
    """The architecture's batch, with or without its attention mask."""
    return {key: value for key, value in ARCHITECTURES[name].batch().items() if with_mask or key != "attention_mask"}


def uncut(name: str, with_mask: bool) -> tuple[nn.Module, Tensor]:
    """The model with its gradients, and its loss."""
    model, total = ARCHITECTURES[name].model(kind(name), "cpu"), torch.zeros(())
    for part, target in zip(rows(batch_of(name, with_mask), MICROBATCHES), target_of(name).chunk(MICROBATCHES), strict=True):
        loss = loss_of(model(**part), target) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return model, total


def kind(name: str) -> str:
    """What transformers calls it."""
    return name.partition(",")[0]


def difference(name: str, device: str, schedule: str) -> float:
    """Of this rank's loss and gradients from the uncut model's; 0 if they have its bits."""
    batch, (whole, expected) = batch_of(name, True), uncut(name, True)
    model = ARCHITECTURES[name].model(kind(name), device)
    pipe = ps.Pipeline(model, loss_of, schedule, MICROBATCHES, example_kwargs=rows(batch, MICROBATCHES)[0])
    pipe.load_state_dict(whole.state_dict())
    found = [abs(pipe.step(**batch, target=target_of(name)) - expected) / expected]
    theirs = {key: parameter.grad for key, parameter in whole.named_parameters(remove_duplicate=False)}
    for key, parameter in pipe.named_parameters():
        mine, gradient = parameter.grad, theirs[key]
        if mine is not None and gradient is not None:
            found.append((mine - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30))
    return max(result.item() for result in found)


def rank_differences(names: Sequence[str], device: str, schedule: str) -> list[float | str]:
    """For each of `names` the difference on this rank, or what was said instead."""
    told: list[float | str] = []
    for name in names:
        try:
            told.append(difference(name, device, schedule))
        except ps.PenstockError as error:
            told.append(str(error))
    return told


def outcomes(names: Sequence[str], ranks: int, device: str, schedule: str) -> list[str]:
    """A cell of the table for each of `names`."""
    everyone = ps.launch(rank_differences, ranks, names, device, schedule)
    return [_cell([result[number] for result in everyone]) for number in range(len(names))]


def _cell(told: Sequence[float | str]) -> str:
    refused = [message for message in told if isinstance(message, str)]
    most = max((message for message in told if not isinstance(message, str)), default=0.0)
    return f"refused: {refused[0]}" if refused else "bits" if most == 0 else f"{most:.0e}"


def without_mask(name: str) -> str:
    """The cell of a batch without a mask: two stages, one after the other in this process."""
    batch, (whole, _) = batch_of(name, False), uncut(name, False)
    microbatches, model = rows(batch, MICROBATCHES), ARCHITECTURES[name].model(kind(name), "cpu")
    stages = ps.partition.split(model, 2, example_kwargs=microbatches[0])
    for part, target in zip(microbatches, target_of(name).chunk(MICROBATCHES), strict=True):
        (loss_of(ps.partition.run(stages, **part), target) / MICROBATCHES).backward()
    pairs = [(mine.grad, uncut_one.grad) for mine, uncut_one in zip(model.parameters(), whole.parameters(), strict=True)]
    return _cell([0.0 if all(a is b or torch.equal(a, b) for a, b in pairs if a is not None and b is not None) else 1.0])


def by_names(name: str) -> str:
    """Whether the model is cut without an example."""
    model = ARCHITECTURES[name].model(kind(name), "meta")
    second = next(f"{key}.1" for key, module in model.named_modules() if isinstance(module, nn.ModuleList))
    try:
        ps.partition.split(model, 2, cuts=[second])
    except ps.PenstockError:
        return "no"
    return "yes"


def table(names: Sequence[str]) -> dict[str, str]:
    """The rows of `names`."""
    memory, meta = outcomes(names, 2, "cpu", "zb-v"), outcomes(names, 3, "meta", "1f1b")
    cells = zip(names, memory, meta, map(without_mask, names), map(by_names, names), strict=True)
    return {cell[0]: f"| {' | '.join(cell)} |" for cell in cells}


def written() -> dict[str, str]:
    """The rows that are in the docs."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    return {name: line for line in lines for name in ARCHITECTURES if line.startswith(f"| {name} |")}


def main() -> None:
    """The rows that are asked for into the docs; the others stay as they were."""
    found = written() | table(sys.argv[1:] or list(ARCHITECTURES))
    rows = [found[name] for name in ARCHITECTURES if name in found]
    TABLE.write_text(HEAD + "\n".join(rows) + "\n" + NOTES, encoding="utf-8")


if __name__ == "__main__":
    main()
