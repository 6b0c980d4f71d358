"""GRPO over two ranks (Shao et al. 2024): groups of sampled texts, rewarded by a function, each against its group's mean.

python examples/grpo.py
torchrun --nproc-per-node 2 examples/grpo.py zb-h1
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.model import GPT, GPTConfig

GROUP, PROMPT, ANSWER, EPSILON = 8, 4, 12, 0.2


def log_probs(logits: Tensor, text: Tensor) -> Tensor:
    """(rows, time, vocabulary) logits, (rows, time) text -> (rows, answer): of each token of the answers."""
    return logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, text[:, PROMPT:, None])[..., 0]


class GRPOLoss(nn.Module):
    """The clipped objective. Keeps the importance ratios of each microbatch, on the last stage's rank."""

    ratios: tuple[Tensor, ...] = ()

    def forward(self, logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """`target`: text, advantages (rows, 1), and the log-probabilities with which it was sampled."""
        text, advantages, sampled = target
        ratio = (log_probs(logits, text) - sampled).exp()
        self.ratios = *self.ratios, ratio.detach()
        return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages).mean()


def train(schedule: str = "1f1b", *, rounds: int = 3, updates: int = 2) -> tuple[list[float], Any, dict[str, Tensor]]:
    """Return the mean reward of each round, all ratios, and the weights of this rank's stages."""
    torch.manual_seed(0)
    model, loss_fn = GPT(GPTConfig(vocabulary=64, context=PROMPT + ANSWER, width=32, layers=4, heads=4)), GRPOLoss()
    pipe = ps.Pipeline(model, loss_fn, schedule, microbatches=4)
    optimizer, rewards = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
    for number in range(rounds):
        prompts = torch.randint(64, (4, PROMPT), generator=torch.Generator().manual_seed(number)).repeat_interleave(GROUP, 0)
        text = pipe.generate(prompts, max_new_tokens=ANSWER, temperature=1.0, seed=number)  # the same on every rank
        groups = (text[:, PROMPT:] % 2 == 0).float().mean(1).unflatten(0, (-1, GROUP))  # the reward: the share of even tokens
        advantages = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
        rewards.append(groups.mean().item())
        logits = pipe.eval(text)  # None but on the last stage's rank
        target = None if logits is None else (text, advantages.view(-1, 1), log_probs(logits, text))
        for _ in range(updates):
            pipe.step(text, target=target)
            optimizer.step(), optimizer.zero_grad()
    return rewards, loss_fn.ratios, pipe.state_dict()


if __name__ == "__main__":
    print(*train(*sys.argv[1:])[:1] if "RANK" in os.environ else ps.launch(train, 2, *sys.argv[1:])[0][0])
