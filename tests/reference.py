"""One process that runs the same microbatches with gradient accumulation: what every pipeline must equal, to the bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.commands.train.setup import token_loss
from penstock.model import GPT, GPTConfig, mlp

Batch = tuple[Tensor, Tensor]


def pieces(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.tensor_split(min(count, len(tensor)))


def accumulate(
    model: nn.Module, loss_fn: Any, batch: Batch, count: int, weight: Callable[[Tensor], float] = len, order: Any = None
) -> Tensor:
    """Loss and gradients of one batch, microbatch by microbatch; `order` is that of the backwards."""
    inputs, targets = (pieces(tensor, count) for tensor in batch)
    weights = [float(weight(target)) for target in targets]
    shares = [weight / sum(weights) for weight in weights]
    counted = [m for m in range(len(inputs)) if weights[m]]
    losses = {m: loss_fn(model(inputs[m]), targets[m]) for m in counted}
    for m in order or counted:
        losses[m].backward(torch.full_like(losses[m], shares[m]))
    return sum(losses[m].detach() * shares[m] for m in counted)


def gradients(named: Any) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts as one; where two ranks have a name (a tied parameter), both must have the same."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in whole or same(whole[name], value), name
            whole[name] = value
    return whole


def same(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    different = [name for name in expected if not same(ours[name], expected[name])]
    assert not different, different


class RepeatedMatrix(nn.Module):
    """One matrix, used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))


def mixed(depth: int) -> nn.Sequential:
    """A frozen part, convolutions, norms, tied weights: (B, 12) -> (B, 3), `depth` layers between."""
    kinds = [
        lambda: nn.Conv1d(2, 2, 3, padding=1),
        lambda: nn.LayerNorm(6),
        lambda: RepeatedMatrix(6),
        nn.Tanh,
        lambda: nn.Linear(6, 6),
    ]
    layers = [kinds[index % len(kinds)]() for index in range(depth)]
    model = nn.Sequential(nn.Unflatten(1, (2, 6)), nn.Linear(6, 6), *layers, nn.Flatten(), nn.Linear(12, 3))
    model[1].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def make(kind: str, dropout: float = 0.0, depth: int = 3) -> tuple[nn.Sequential, Any]:
    """A model and its loss, always the same."""
    torch.manual_seed(7)
    if kind == "mlp":
        return mlp(12, total_layers=depth + 2, classes=3), nn.functional.cross_entropy
    if kind == "mixed":
        return mixed(depth), nn.functional.cross_entropy
    shape = GPTConfig(vocabulary=17, context=6, width=8, layers=depth, heads=2, dropout=dropout)
    return GPT(shape), token_loss


def data(kind: str, rows: int, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if kind in ("mlp", "mixed"):
        return torch.randn(rows, 12, generator=generator), torch.randint(3, (rows,), generator=generator)
    tokens = torch.randint(17, (rows, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
