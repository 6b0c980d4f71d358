"""Under autocast a pipeline has the bits of plain PyTorch: forwards inside, backwards outside, a cast for each microbatch."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import attends, has_auxiliary_loss, toy
from reference import assert_same, gradients, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from penstock.stage.auxiliary import AuxiliaryLossCollector
from penstock.stage.stage import Stage

M = 3  # microbatches
ROWS = 2  # of each
CPU = torch.device("cpu")


def exact() -> nn.Module:
    """A layer that computes in the precision of its weights, inside a model that does not."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(hidden.float())) @ self.linear.weight

    return toy(forward, linear=nn.Linear(8, 8))


def penalised() -> nn.Module:
    """Adds an auxiliary loss, of activations and of weights."""
    linear = nn.Linear(8, 8)
    return has_auxiliary_loss(lambda output: output.float().square().mean() + linear.weight.square().sum(), after=linear)


class TiedProducts(nn.Module):
    """One matrix: an embedding and three products between them, one of them transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(width, width), nn.Linear(width, width)
        self.middle.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.embedding(tokens))) + self.embedding(tokens.flip(0))
        return self.middle(torch.tanh(hidden.float())) @ self.embedding.weight


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(M * ROWS, *shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(8, (M * ROWS, *shape))


Case = tuple[Callable[[], nn.Sequential], Callable[[], Tensor]]
MODELS: dict[str, Case] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), rows(8)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.ConvTranspose1d(6, 4, 3), nn.BatchNorm1d(4), nn.Flatten()),
        rows(4, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)), tokens(5)),
    "an exact layer inside": (lambda: nn.Sequential(nn.Linear(8, 8), exact(), nn.Linear(8, 8), exact()), rows(8)),
    "self attention": (lambda: nn.Sequential(attends(8), nn.Linear(8, 8)), rows(5, 8)),
    "cross attention": (lambda: nn.Sequential(attends(8, lambda x: (x.flip(1),) * 2), nn.Linear(8, 8)), rows(5, 8)),
    "transformer": (
        lambda: nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]),
        rows(5, 8)),
    "gpt": (lambda: make("gpt")[0], tokens(6)),
    "tied": (lambda: nn.Sequential(TiedProducts(8), nn.Linear(8, 8)), tokens(5)),
    "auxiliary losses": (lambda: nn.Sequential(nn.Linear(8, 8), penalised(), nn.Linear(8, 8), penalised()), rows(8)),
}  # fmt: skip


def loss_fn(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean() + output.float().sin().sum()


def case(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    model, batch = MODELS[name]
    return model(), batch()


def plain(name: str, forwards_first: bool) -> dict[str, Tensor | None]:
    """Gradients of two steps of plain PyTorch."""
    model, batch = case(name)
    for _ in range(2):
        losses = []
        for microbatch in batch.chunk(M):
            with torch.autocast("cpu", torch.bfloat16), AuxiliaryLossCollector() as auxiliary:
                loss = loss_fn(model(microbatch), None)
                losses.append([loss, *auxiliary])
            if not forwards_first:
                torch.autograd.backward(losses[-1], [torch.full_like(value, 1 / M) for value in losses[-1]])
        for item in losses if forwards_first else ():
            torch.autograd.backward(item, [torch.full_like(value, 1 / M) for value in item])
    return gradients(model.named_parameters())


def ours(name: str, schedule: Any, **options: Any) -> dict[str, Tensor | None]:
    model, batch = case(name)
    pipe = ps.Pipeline(model, loss_fn, schedule, M, topology=ps.Topology(), seed=None, **options)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(batch, target=torch.zeros(len(batch)))
    return gradients(pipe.named_parameters())


@pytest.mark.costly
@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_gradients_have_the_bits_of_plain_pytorch(number: int, name: str) -> None:
    """Each model with each schedule and each way to recompute; over the models, each schedule meets each way."""
    expected = plain(name, forwards_first=True)
    assert_same(plain(name, forwards_first=False), expected)
    for place, schedule in enumerate(("gpipe", "1f1b", "zb-h1")):
        recompute = (None, "stage", "block")[(number + place) % 3]
        assert_same(ours(name, schedule, recompute=recompute), expected)


class Casts(TorchDispatchMode):
    """Notes, by weak reference, what is made of tensors of `shape` in another precision."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.made = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "_to_copy" in func.__name__ and output.shape == self.shape:
            self.made.append(weakref.ref(output))
        return output


@pytest.mark.parametrize("transposed", [False, True])
def test_microbatches_of_a_split_backward_share_one_cast_of_each_weight_until_the_step_ends(transposed: bool) -> None:
    layer = toy(lambda self, hidden: hidden @ self.weight.t(), weight=(5, 8)) if transposed else nn.Linear(8, 5, bias=False)
    stage = Stage(1, layer, CPU)
    with torch.autocast("cpu", torch.bfloat16), Casts(*((8, 5) if transposed else (5, 8))) as casts:
        for step in range(1, 3):
            stage.begin_step()
            outputs = [stage.forward(m, [torch.randn(4, 8)], split_backward=True) for m in range(M)]
            assert len(casts.made) == step
            for m, output in enumerate(outputs):
                stage.backward(m, [torch.ones_like(output)])
                stage.backward_weight(m, is_last=m == M - 1)
            assert all(cast() is None for cast in casts.made)
            casts.made = casts.made[:step]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_weights_that_change_between_the_steps_of_one_autocast_block_are_cast_anew(schedule: str) -> None:
    found = []
    for blocks in (1, 2):
        model, batch = case("linear")
        pipe = ps.Pipeline(model, loss_fn, schedule, M, topology=ps.Topology(), seed=None)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        for _ in range(blocks):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(2 // blocks):
                    pipe.step(batch, target=torch.zeros(len(batch)))
                    optimizer.step()
        found.append(pipe.state_dict())
    assert_same(*found)


def test_a_cast_is_not_taken_for_that_of_another_tensor_in_the_same_place():
    def forward(self, hidden):  # a bias is memory that the next microbatch may be given again
        return nn.functional.conv1d(hidden, self.weight, hidden.detach().mean().expand(16).contiguous())

    model = toy(forward, weight=nn.Parameter(torch.zeros(16, 4, 1)))
    pipe = ps.Pipeline(model, lambda output, target: (output.float() - target).abs().mean(), "zb-h1", 6)
    inputs = torch.arange(6.0)[:, None, None].expand(6, 4, 3).contiguous()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(inputs, target=torch.arange(6.0)[:, None, None].expand(6, 16, 3).contiguous())
        assert loss.item() == 0
