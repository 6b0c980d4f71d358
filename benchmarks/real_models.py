"""Ten models that two cores train in a fraction of a second a step, each with a loss and a batch of 8 microbatches or more."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.commands.train.setup import token_loss
from penstock.model import GPT, GPTConfig


class Task(NamedTuple):
    """What is trained: a model, its loss, and a batch."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    inputs: Tensor
    target: Tensor
    keywords: Mapping[str, Any] = {}  # of the forward; such a model is traced

    def example(self, microbatches: int) -> dict[str, Any]:
        """Return the arguments with which a pipeline traces the model, if it is one that must be traced."""
        if isinstance(self.model, nn.Sequential):
            return {}
        return {"example_args": (self.inputs[: len(self.inputs) // microbatches],), "example_kwargs": self.keywords}


def gpt(rows: int, ranks: int, **config: int) -> Task:
    """A GPT of a few layers."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config))
    tokens = torch.randint(256, (rows, config["context"] + 1))
    return Task(model, token_loss, tokens[:, :-1], tokens[:, 1:])


def mlp(rows: int, widths: tuple[int, ...], ranks: int) -> Task:
    """Linear layers and ReLUs of these widths."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(first, second), nn.ReLU()) for first, second in pairwise(widths)]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 10))
    return Task(model, nn.functional.cross_entropy, torch.randn(rows, widths[0]), torch.randint(10, (rows,)))


def convolutions(rows: int, channels: tuple[int, ...], size: int, ranks: int) -> Task:
    """Convolutions with norms; the image is halved wherever channels double."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, channels[0], 3, padding=1))
    for first, second in pairwise(channels):
        convolution = nn.Conv2d(first, second, 3, stride=1 + (second > first), padding=1)
        model.append(nn.Sequential(convolution, nn.GroupNorm(4, second), nn.ReLU()))
    model.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10)))
    return Task(model, nn.functional.cross_entropy, torch.randn(rows, 3, size, size), torch.randint(10, (rows,)))


def encoder(rows: int, ranks: int) -> Task:
    """Torch's transformer encoder layers."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(6)]
    inputs = torch.randn(rows, 64, 128)
    return Task(nn.Sequential(*layers), nn.functional.mse_loss, inputs, torch.randn(rows, 64, 128))


def llama(rows: int, ranks: int) -> Task:
    """A llama of transformers, from a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4)
    tokens = torch.randint(1024, (rows, 64))
    return Task(LlamaForCausalLM(config), _logits_loss, tokens, tokens, {"use_cache": False})


def _logits_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


REAL_MODELS: dict[str, Callable[[int], Task]] = {
    "GPT, small": partial(gpt, 32, context=64, width=128, layers=8),
    "GPT, wide": partial(gpt, 16, context=64, width=384, layers=4),
    "GPT, long rows": partial(gpt, 16, context=256, width=128, layers=4),
    "GPT, large vocabulary": partial(gpt, 16, context=64, width=128, layers=4, vocabulary=8192),
    "MLP, wide": partial(mlp, 128, (1024,) * 9),
    "MLP, deep": partial(mlp, 256, (256,) * 33),
    "MLP, narrowing": partial(mlp, 256, (2048, 1024, 512, 512, 256, 256, 128, 128)),
    "conv net": partial(convolutions, 32, (16, 16, 32, 32, 64, 64), 32),
    "encoder of torch": partial(encoder, 16),
    "llama": partial(llama, 16),
}
