"""DPO over two ranks (Rafailov et al. 2023): pairs of a chosen and a rejected row, and what the model said before training.

python examples/dpo.py
torchrun --nproc-per-node 2 examples/dpo.py zb-h1
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps

BETA = 0.1


def log_probs(logits: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """(rows, time, vocabulary), (rows, time), (rows, time) -> (rows,). What counts are answers, no prompts and no padding."""
    per_token = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (per_token * counts[:, 1:]).sum(1)


class DPOLoss(nn.Module):
    """The mean over pairs. Keeps the rewards of each microbatch, (pairs, 2), on the last stage's rank."""

    rewards: tuple[Tensor, ...] = ()

    def forward(self, output: Any, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """`target`: tokens, which of them count, and the reference's log-probabilities, (rows,)."""
        tokens, counts, reference = target
        rewards = BETA * (log_probs(output.logits, tokens, counts) - reference).unflatten(0, (-1, 2))
        self.rewards = *self.rewards, rewards.detach()
        return -nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()


def train(schedule: str = "1f1b", *, steps: int = 5) -> tuple[list[float], Any, dict[str, Tensor]]:
    """Return losses, rewards and weights, of this rank's stages. Rows 2n and 2n + 1 are pair n."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, use_cache=False))
    tokens, counts = torch.randint(256, (20, 16)), torch.arange(16).expand(20, 16) >= 6  # 10 pairs with prompts of 6 tokens

    loss_fn, losses = DPOLoss(), []
    pipe = ps.Pipeline(model, loss_fn, schedule, 4, rows_per_sample=2, example_kwargs={"input_ids": tokens[:2]})
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    reference = pipe.eval(input_ids=tokens)  # the model before its first step; None but on the last stage's rank
    target = None if reference is None else (tokens, counts, log_probs(reference.logits, tokens, counts))
    for _ in range(steps):
        losses.append(pipe.step(input_ids=tokens, target=target).item())
        optimizer.step(), optimizer.zero_grad()
    return losses, loss_fn.rewards, pipe.state_dict()


if __name__ == "__main__":
    print(*train(*sys.argv[1:])[0] if "RANK" in os.environ else ps.launch(train, 2, *sys.argv[1:])[0][0])
