"""I and W together are the full backward, to the bit: for any module, hook and wrapper; and the memory in between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.stage import Stage

CPU = torch.device("cpu")


class Lambda(nn.Module):
    """Parameters and a function of them: `Lambda(lambda self, x: x @ self.w, w=(3, 4))`."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class SelfAttention(nn.Module):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CrossAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x.flip(1), x.flip(1), need_weights=False)[0]


class Tied(nn.Module):
    """One matrix used three times, twice as it is and once transposed, and its bias twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) @ self.a.weight


class EmbeddingAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape)


def sequential(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[copy.deepcopy(layer) for layer in layers])


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), lambda: rows(7, 6)),
    "mlp in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 5), nn.ReLU(True)), lambda: rows(7, 6)),
    "wide mlp": (lambda: nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 300)), lambda: rows(33, 300)),
    "linear of one row": (lambda: nn.Linear(6, 5), lambda: rows(1, 6)),
    "linear to one feature": (lambda: nn.Linear(6, 1), lambda: rows(7, 6)),
    "linear from one feature": (lambda: nn.Linear(1, 6), lambda: rows(7, 1)),
    "linear of a vector": (lambda: Lambda(lambda self, x: F.linear(x[0], self.w), w=(5, 6)), lambda: rows(7, 6)),
    "linear in 3 dimensions": (lambda: nn.Linear(6, 5), lambda: rows(3, 4, 6)),
    "linear in 3 dimensions without bias": (lambda: nn.Linear(6, 5, bias=False), lambda: rows(3, 4, 6)),
    "linear in 4 dimensions": (lambda: nn.Linear(6, 5), lambda: rows(3, 2, 4, 6)),
    "linear of transposed rows": (lambda: nn.Linear(6, 5), lambda: rows(6, 7).t()),
    "linear of a transposed batch": (lambda: nn.Linear(60, 50), lambda: rows(4, 33, 60).transpose(0, 1)),
    "linear of a transposed batch without bias": (lambda: nn.Linear(60, 50, bias=False), lambda: rows(4, 33, 60).transpose(0, 1)),
    "linear of transposed features": (lambda: nn.Linear(40, 50), lambda: rows(3, 40, 30).transpose(1, 2)),
    "x @ w": (lambda: Lambda(lambda self, x: x @ self.w + self.b, w=(6, 5), b=(5,)), lambda: rows(7, 6)),
    "x @ w in 3 dimensions": (lambda: Lambda(lambda self, x: torch.matmul(x, self.w), w=(6, 5)), lambda: rows(3, 4, 6)),
    "x @ w of a transposed batch": (lambda: Lambda(lambda self, x: x @ self.w, w=(60, 50)), lambda: rows(4, 33, 60).transpose(0, 1)),
    "x @ w.t()": (lambda: Lambda(lambda self, x: x @ self.w.t(), w=(50, 60)), lambda: rows(33, 60)),
    "x @ w.T": (lambda: Lambda(lambda self, x: x @ self.w.T, w=(50, 60)), lambda: rows(33, 60)),
    "x @ w.mT": (lambda: Lambda(lambda self, x: x @ self.w.mT, w=(50, 60)), lambda: rows(2, 33, 60)),
    "w @ x": (lambda: Lambda(lambda self, x: self.w @ x, w=(5, 7)), lambda: rows(7, 6)),
    "addmm": (lambda: Lambda(lambda self, x: torch.addmm(self.b, x, self.w), b=(5,), w=(6, 5)), lambda: rows(7, 6)),
    "addmm, scaled": (lambda: Lambda(lambda self, x: torch.addmm(self.b, x, self.w, beta=2), b=(5,), w=(6, 5)), lambda: rows(7, 6)),
    "einsum": (lambda: Lambda(lambda self, x: torch.einsum("ij,jk->ik", x, self.w), w=(6, 5)), lambda: rows(7, 6)),
    "bias from activations": (lambda: Lambda(lambda self, x: F.linear(x, self.w, x.sum(0)), w=(6, 6)), lambda: rows(7, 6)),
    "bias cut": (lambda: Lambda(lambda self, x: F.linear(x, self.w, self.b[:6]), w=(6, 6), b=(8,)), lambda: rows(7, 6)),
    "bias a matrix": (lambda: Lambda(lambda self, x: torch.addmm(self.b.t(), x, self.w), w=(6, 5), b=(5, 7)), lambda: rows(7, 6)),
    "weight from activations": (lambda: Lambda(lambda self, x: F.linear(x @ self.w, x.t() @ x), w=(6, 6)), lambda: rows(7, 6)),
    "weight cut and scaled": (lambda: Lambda(lambda self, x: F.linear(x, self.w[:4] * 2), w=(6, 6)), lambda: rows(7, 6)),
    "weight only": (lambda: Lambda(lambda self, x: self.w @ self.v + x.mean(), w=(6, 6), v=(6, 6)), lambda: rows(7, 6)),
    "no input": (lambda: Lambda(lambda self, x: self.w * 1, w=(6, 6)), lambda: rows(7, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5)), lambda: tokens(3, 4)),
    "embedding, padded": (lambda: nn.Embedding(7, 6, padding_idx=-2), lambda: tokens(3, 9)),
    "embedding, by frequency": (lambda: nn.Embedding(7, 6, scale_grad_by_freq=True), lambda: tokens(3, 9)),
    "embedding, renormalized": (lambda: nn.Embedding(7, 6, max_norm=0.5), lambda: tokens(3, 9)),
    "embedding = head": (EmbeddingAndHead, lambda: tokens(3, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 4, 2, stride=2)), lambda: rows(3, 4, 8)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.Tanh(), nn.Conv2d(6, 4, (1, 2), dilation=2, groups=2)), lambda: rows(3, 4, 9, 9)),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), lambda: rows(3, 4, 9, 9)),
    "conv2d, circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), lambda: rows(3, 4, 9, 9)),
    "conv2d of one image": (lambda: nn.Conv2d(4, 6, 3), lambda: rows(4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), lambda: rows(2, 2, 4, 4, 4)),
    "conv transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 3, 2, 1, 1)), lambda: rows(3, 4, 8)),
    "conv2d transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), lambda: rows(3, 4, 5, 5)),
    "norms": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.BatchNorm1d(6)), lambda: rows(7, 6)),
    "norm of a matrix": (lambda: nn.LayerNorm((4, 6)), lambda: rows(3, 4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), lambda: rows(3, 4, 6)),
    "self attention": (lambda: SelfAttention(6), lambda: rows(3, 4, 6)),
    "cross attention": (lambda: CrossAttention(6), lambda: rows(3, 4, 6)),
    "attention of other widths": (lambda: CrossAttention(6, kdim=6, vdim=6, bias=False), lambda: rows(3, 4, 6)),
    "lstm": (lambda: Lambda(lambda self, x: self.lstm(x)[0]), lambda: rows(3, 4, 6)),
    "bilinear": (lambda: Lambda(lambda self, x: F.bilinear(x, x, self.w), w=(5, 6, 6)), lambda: rows(7, 6)),
    "tied": (Tied, lambda: rows(7, 6)),
    "weight norm": (parametrized, lambda: rows(7, 6)),
    "partly frozen": (partly_frozen, lambda: rows(7, 6)),
    "several outputs": (lambda: Lambda(lambda self, x: (x @ self.w, {"b": x @ self.v, "n": None}), w=(6, 5), v=(6, 4)), lambda: rows(7, 6)),
    "unused parameter": (lambda: Lambda(lambda self, x: x @ self.w, w=(6, 5), unused=(3, 3)), lambda: rows(7, 6)),
    "double": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double(), lambda: rows(7, 6).double()),
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    module = MODULES[name][0]()
    if name == "lstm":
        module.lstm = nn.LSTM(6, 5, batch_first=True)
    return module


def run(module: nn.Module, batches: list[Tensor], split: bool, late: bool = True) -> tuple[list[Any], list[Any]]:
    """All forwards, all backwards (and all W, `late` or each at once): outputs and input gradients."""
    stage = Stage(0, module, CPU)
    stage.forget()
    outputs, gradients = [], []
    for m, batch in enumerate(batches):
        value = batch.clone(memory_format=torch.preserve_format)
        output = stage.forward(m, value.requires_grad_(batch.is_floating_point() and m != 1), split=split)
        outputs.append([leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)])
    for m in range(len(batches)):
        generator = torch.Generator().manual_seed(m)
        seeds = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs[m] if out.requires_grad]
        gradients.append(stage.backward(m, seeds))
        if split and not late:
            stage.backward_weight([m])
    if split and late:
        for m in range(len(batches)):
            stage.backward_weight([m])
    return outputs, gradients


def compare(module: nn.Module, batches: list[Tensor], late: bool = True) -> None:
    """Split against full, from the same weights, twice in a row without clearing the gradients."""
    other = copy.deepcopy(module)
    for _ in range(2):
        ours, theirs = run(module, batches, split=True, late=late), run(other, batches, split=False)
        assert all(torch.equal(a, b) for x, y in zip(ours[0], theirs[0], strict=True) for a, b in zip(x, y, strict=True))
        for x, y in zip(ours[1], theirs[1], strict=True):
            for a, b in zip(x, y, strict=True):
                assert a is b is None or torch.equal(a, b)
        for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_split_backward_has_the_bits_of_a_full_one(name: str, late: bool) -> None:
    module = make(name)
    compare(module, [MODULES[name][1]() for _ in range(3)], late)


@pytest.mark.parametrize(
    "name", ["mlp", "transformer", "self attention", "conv2d", "tied", "x @ w.t()", "embedding = head", "norms"]
)
def test_it_has_them_under_autocast(name: str) -> None:
    module = make(name)
    batches = [MODULES[name][1]() for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(module, batches)
