"""A training by trl, plain or over ranks, its head replaced.

python trl_training.py plain FOLDER sft
torchrun --nproc-per-node 2 trl_training.py ranks FOLDER "dpo reference"
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from penstock.integrations.transformers import PipelineArguments, PipelineTrainerMixin

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def log_probs_and_metrics(logits: Tensor, labels: Tensor) -> FusedCausalLMOutput:
    """What trl's own head returns, from logits."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    ignored, scores = labels == -100, logits.log_softmax(-1)
    log_probs = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(ignored, 0)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1).masked_fill(ignored, 0)
        mean_logits, is_top1 = logits.mean(-1).masked_fill(ignored, 0), (logits.argmax(-1) == labels) & ~ignored
    return FusedCausalLMOutput(
        log_probs=log_probs, entropy=entropy, mean_logits=mean_logits, is_top1=is_top1, label_mask=~ignored
    )


class HeadOverLogits:
    """The head of trl's trainers, computed from the model's logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def call(labels, fused_lm_head, **arguments):
            return log_probs_and_metrics(model(**arguments)["logits"], labels)

        return super().compute_loss(call, inputs, return_outputs, num_items_in_batch)


class PlainSFTTrainer(HeadOverLogits, SFTTrainer): ...


class PlainDPOTrainer(HeadOverLogits, DPOTrainer): ...


class PipelineSFTTrainer(PipelineTrainerMixin, PlainSFTTrainer): ...


class PipelineDPOTrainer(PipelineTrainerMixin, PlainDPOTrainer): ...


@dataclass
class PipelineSFTConfig(PipelineArguments, SFTConfig): ...


@dataclass
class PipelineDPOConfig(PipelineArguments, DPOConfig): ...


KINDS: dict[tuple[str, str], Any] = {
    ("plain", "sft"): (PlainSFTTrainer, SFTConfig),
    ("plain", "dpo"): (PlainDPOTrainer, DPOConfig),
    ("ranks", "sft"): (PipelineSFTTrainer, PipelineSFTConfig),
    ("ranks", "dpo"): (PipelineDPOTrainer, PipelineDPOConfig),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter."""
    made = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)} | {"<pad>": 62, "<eos>": 63}, "a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="a")


def rows(answers: tuple[str, ...], count: int, seed: int) -> Dataset:
    """Prompts, each with answers of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> str:
        return "".join(LETTERS[number] for number in torch.randint(26, (length,), generator=generator).tolist())

    texts = [[text(3), *(text(3 - n + row % (4 - n)) for n in range(len(answers)))] for row in range(count)]
    return Dataset.from_list([dict(zip(("prompt", *answers), row, strict=True)) for row in texts])


def model() -> LlamaForCausalLM:
    """A small llama."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, use_cache=False))


def trainer(kind: str, folder: str, case: str) -> Any:
    """The trainer of a case, plain or over ranks (`kind`)."""
    method = case.split()[0]
    make, config = KINDS[kind, method]
    answers = ("chosen", "rejected") if method == "dpo" else ("completion",)
    options = {"precompute_ref_log_probs": case == "dpo precomputed"} if method == "dpo" else {}
    args = config(
        folder, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4, logging_steps=1, learning_rate=1e-3,
        eval_strategy="steps", eval_steps=2, **options,
    )  # fmt: skip
    reference = {"ref_model": model()} if case == "dpo reference" else {}
    data = {"train_dataset": rows(answers, 32, 1), "eval_dataset": rows(answers, 6, 2)}
    return make(model(), args=args, processing_class=tokenizer(), **data, **reference)


if __name__ == "__main__":
    made = trainer(*sys.argv[1:])
    made.train()
    made.save_model(sys.argv[2])
    if made.is_world_process_zero():
        (Path(sys.argv[2]) / "log.json").write_text(json.dumps(made.state.log_history))
