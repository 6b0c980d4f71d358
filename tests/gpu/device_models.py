"""What `tests/gpu` runs: models and batches that are tiny on the CPU and worth a GPU's while on one, and plain PyTorch on them.

Every rank function takes the kind of device, so that the same test runs on the CPU, in the ordinary suite, and on a GPU, where
all ranks share the first one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from reference import accumulate, gradients
from torch import Tensor, nn

import penstock as ps
from penstock.model import GPT, GPTConfig, mlp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Size(NamedTuple):
    """Of a model and its batches."""

    width: int
    heads: int
    vocabulary: int
    time: int
    rows: int  # of a microbatch


SIZES = {"cpu": Size(8, 2, 17, 6, 1), "cuda": Size(512, 8, 1024, 256, 4)}


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def made(kind: str, device: str, layers: int = 6) -> tuple[nn.Sequential, Callable[..., Tensor]]:
    """A model on the CPU and its loss, always the same."""
    torch.manual_seed(7)
    size = SIZES[device]
    if kind == "mlp":
        return mlp(size.width, total_layers=layers, classes=3), nn.functional.cross_entropy
    return GPT(GPTConfig(size.vocabulary, size.time, size.width, layers, size.heads)), token_loss


def batch(kind: str, device: str, microbatches: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """On the CPU, with a row more than divides: pieces are not equal."""
    size, generator = SIZES[device], torch.Generator().manual_seed(seed)
    rows = size.rows * microbatches + 1
    if kind == "mlp":
        return torch.randn(rows, size.width, generator=generator), torch.randint(3, (rows,), generator=generator)
    tokens = torch.randint(size.vocabulary, (rows, size.time + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def on(device: str) -> ps.comms.Topology:
    """This rank, deterministic, on the first device of its kind."""
    torch.set_num_threads(1)
    where = torch.device(device, 0 if device == "cuda" else None)
    return ps.comms.init_distributed("gloo", timeout=120, device=where, deterministic=True)


@contextmanager
def deterministic() -> Iterator[None]:
    """The same for plain PyTorch in this process, and afterwards not."""
    before = torch.are_deterministic_algorithms_enabled()
    ps.randomness.use_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


Result = tuple[list[float], dict[str, Any]]  # losses of two steps, gradients


def plain(kind: str, device: str, microbatches: int) -> Result:
    """Two batches by plain PyTorch, without an optimizer between. Fails where that itself does not repeat."""
    twice = []
    with deterministic():
        for _ in range(2):
            model, loss_fn = made(kind, device)
            model.to(device)
            batches = [[microbatch.to(device) for microbatch in batch(kind, device, microbatches, seed)] for seed in (3, 4)]
            losses = [accumulate(model, loss_fn, value, microbatches).item() for value in batches]
            twice.append((losses, on_host(model.named_parameters())))
    assert twice[0][0] == twice[1][0], "plain PyTorch itself does not repeat its losses here"
    assert all(torch.equal(a, twice[1][1][name]) for name, a in twice[0][1].items()), "plain PyTorch itself does not repeat"
    return twice[0]


def on_host(named: Any) -> dict[str, Any]:
    return {name: None if gradient is None else gradient.cpu() for name, gradient in gradients(named).items()}
