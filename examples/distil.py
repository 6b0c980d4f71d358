"""Distillation over two ranks: a small GPT learns the distribution of a large one, which runs in the ranks' idle time.

python examples/distil.py reverse        # the divergence: forward (default), reverse, or top_k
torchrun --nproc-per-node 2 examples/distil.py top_k zb-v
"""

import os
import sys
from itertools import pairwise

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.model import GPT, GPTConfig

TEMPERATURE, TOP_K = 2.0, 8


def forward(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher | student): the student covers all that the teacher may say."""
    student, teacher = (scores.flatten(0, -2).div(TEMPERATURE).log_softmax(-1) for scores in (logits, teacher))
    return nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * TEMPERATURE**2


def reverse(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(student | teacher): the student says only what the teacher may say (MiniLLM, Gu et al. 2023)."""
    return forward(teacher, logits)


def top_k(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL over the teacher's likeliest tokens, as where only these were stored."""
    likeliest = teacher.topk(TOP_K).indices
    return forward(logits.gather(-1, likeliest), teacher.gather(-1, likeliest))


def gpt(layers: int, width: int, seed: int) -> nn.Sequential:
    """The same vocabulary for both."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocabulary=64, context=16, width=width, layers=layers, heads=4))


def train(divergence: str = "forward", schedule: str = "1f1b", *, steps: int = 5) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses, and the weights of this rank's stages."""
    student, teacher = gpt(4, 32, seed=1), gpt(6, 64, seed=0)
    diverge = {"forward": forward, "reverse": reverse, "top_k": top_k}[divergence]
    pipe = ps.Pipeline(student, lambda logits, _, teacher_logits: diverge(logits, teacher_logits), schedule, 4, teacher=teacher)
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=3e-3), []
    batches = [torch.randint(64, (10, 16), generator=torch.Generator().manual_seed(step)) for step in range(steps + 1)]
    for tokens, next_tokens in pairwise(batches):
        losses.append(pipe.step(tokens, target=tokens, next_args=(next_tokens,)).item())  # the teacher runs a batch ahead
        optimizer.step(), optimizer.zero_grad()
    return losses, pipe.state_dict()


if __name__ == "__main__":
    print(*train(*sys.argv[1:])[0] if "RANK" in os.environ else ps.launch(train, 2, *sys.argv[1:])[0][0])
