"""trl's DPOTrainer over two ranks, its head replaced: what plain DPOTrainer logs and saves. Needs `pip install trl`."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.neighbours,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="no trl: pip install trl"),
]
ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def trainer(kind: str, folder: str, has_precomputed: bool) -> Any:
    """DPOTrainer, plain or over ranks (`kind`)."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.utils import FusedCausalLMOutput

    from penstock.integrations.transformers import PipelineArguments, PipelineTrainerMixin

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

    class WithLogits(DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            def call(labels, fused_lm_head, **arguments):
                return log_probs_and_metrics(model(**arguments)["logits"], labels)

            return super().compute_loss(call, inputs, return_outputs, num_items_in_batch)

    class OverRanks(PipelineTrainerMixin, WithLogits):
        pass

    @dataclass
    class Config(PipelineArguments, DPOConfig):
        pass

    made = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)} | {"<pad>": 62, "<eos>": 63}, "a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="a")
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return "".join(LETTERS[number] for number in torch.randint(26, (length,), generator=generator).tolist())

    rows = [{"prompt": text(3), "chosen": text(3 + row % 4), "rejected": text(2 + row % 3)} for row in range(32)]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}

    def model() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, use_cache=False))

    fixed = {"bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "use_cpu": True}
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4, "logging_steps": 1}
    config = DPOConfig if kind == "plain" else Config
    args = config(folder, **fixed, **steps, learning_rate=1e-3, precompute_ref_log_probs=has_precomputed, disable_tqdm=True)
    return (WithLogits if kind == "plain" else OverRanks)(
        model(),
        ref_model=None if has_precomputed else model(),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
    )


def trained(kind: str, folder: Path, has_precomputed: bool) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What it logged, and its weights."""
    start = [] if kind == "plain" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *start, __file__, kind, str(folder), str(int(has_precomputed))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    logged = json.loads((folder / "log.json").read_text())
    untimed = [
        {name: value for name, value in row.items() if not name.startswith("train_") or name == "train_loss"} for row in logged
    ]
    return untimed, safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("has_precomputed", [True, False])
def test_trls_dpo_trainer_has_the_numbers_of_one_process(has_precomputed, tmp_path):
    (plain_log, plain), (log, weights) = (trained(kind, tmp_path / kind, has_precomputed) for kind in ("plain", "ranks"))
    assert len(log) == 5
    assert "rewards/margins" in log[0]
    assert log == plain_log
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


if __name__ == "__main__":
    made = trainer(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
    made.train()
    made.save_model(sys.argv[2])
    if made.is_world_process_zero():
        (Path(sys.argv[2]) / "log.json").write_text(json.dumps(made.state.log_history))
