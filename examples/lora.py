"""LoRA by peft over two ranks, the backward in two; then the adapters merged into the weights and trained on as a whole.

python examples/lora.py trained.safetensors
torchrun --nproc-per-node 2 examples/lora.py trained.safetensors --schedule zb-v
"""

import argparse
import os
from typing import Any

import peft
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps
from penstock import checkpoint


def next_token_loss(output: Any, tokens: Tensor) -> Tensor:
    """The mean over all tokens but the first."""
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def steps(model: nn.Module, tokens: Tensor, schedule: str, count: int, path: str) -> list[float]:
    """Take some steps over all ranks, then load what all of them trained into `model`. What is frozen stays frozen."""
    pipe = ps.Pipeline(model, next_token_loss, schedule, 4, example_kwargs={"input_ids": tokens[:2]})
    optimizer = torch.optim.AdamW([parameter for parameter in pipe.parameters() if parameter.requires_grad], lr=1e-2)
    losses = []
    for _ in range(count):
        losses.append(pipe.step(input_ids=tokens, target=tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.export(pipe, path)  # each rank has trained its own layers, and merging reads all of them
    model.load_state_dict(safetensors.torch.load_file(path))
    return losses


def train(schedule: str, path: str) -> tuple[list[float], list[float]]:
    """The losses with adapters, and of what is trained on with other adapters merged in."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, use_cache=False))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    tokens = torch.randint(256, (8, 16))
    with_adapters = steps(adapted, tokens, schedule, 5, path)
    whole = adapted.merge_and_unload()
    return with_adapters, steps(whole.requires_grad_(True), tokens, schedule, 5, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="file to write the trained weights to, where all ranks see it")
    parser.add_argument("--schedule", choices=ps.schedule.names(), default="zb-h1")
    given = parser.parse_args()
    found = train(given.schedule, given.path) if "RANK" in os.environ else ps.launch(train, 2, given.schedule, given.path)[0]
    if os.environ.get("RANK", "0") == "0":
        for what, losses in zip(("adapters", "merged, all weights"), found, strict=True):
            print(f"{what}: " + " ".join(f"{loss:.5f}" for loss in losses))
