"""I and W together are the full backward, to the bit: for any module, hook and wrapper; and the memory in between."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import attends, tied, toy
from runners import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.mesh.data_parallel import data_parallel_hooks_of
from penstock.stage.backward import deferred, weight_gradients
from penstock.stage.backward import split as split_backward
from penstock.stage.hooks import DataParallelHooks
from penstock.stage.stage import Stage

CPU = torch.device("cpu")


class ThreeTimesTied(nn.Module):
    """One matrix used three times, twice as it is and once transposed, and its bias twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) @ self.a.weight


class Adapted(nn.Module):
    """A frozen matrix and a small trainable product beside it, as adapters of low rank are; `merged`: their sum is used."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down, self.up, self.merged = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False), merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.up.weight @ self.down.weight * 0.5, self.base.bias)
        return self.base(x) + self.up(self.down(x)) * 0.5


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.flip(1), x.flip(1)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def frozen_bias() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.bias.requires_grad_(False)
    return layer


def added(y: Tensor, x: Tensor) -> Tensor:
    y[..., :2] += x[..., :2]
    return y


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape)


def sequential(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[copy.deepcopy(layer) for layer in layers])


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), lambda: rows(7, 6)),
    "mlp in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 5), nn.ReLU(True)), lambda: rows(7, 6)),
    "mlp in place, in 3 dimensions": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 6, bias=False), nn.ReLU(True)),
        lambda: rows(3, 4, 6)),
    "linear in place, in part": (
        lambda: toy(lambda self, x: added(F.linear(x, self.w, self.b), x), w=(6, 6), b=(6,)),
        lambda: rows(3, 4, 6)),
    "linear in place, bias frozen": (lambda: nn.Sequential(frozen_bias(), nn.ReLU(True)), lambda: rows(3, 4, 6)),
    "x @ w in place": (lambda: toy(lambda self, x: (x @ self.w).add_(x), w=(6, 6)), lambda: rows(3, 4, 6)),
    "embedding in place": (lambda: toy(lambda self, x: F.embedding(x, self.w).mul_(2), w=(7, 6)), lambda: tokens(3, 4)),
    "conv1d in place": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(True)), lambda: rows(3, 4, 8)),
    "wide mlp": (lambda: nn.Sequential(nn.Linear(300, 400), nn.GELU(), nn.Linear(400, 300)), lambda: rows(33, 300)),
    "linear of one row": (lambda: nn.Linear(6, 5), lambda: rows(1, 6)),
    "linear to one feature": (lambda: nn.Linear(6, 1), lambda: rows(7, 6)),
    "linear from one feature": (lambda: nn.Linear(1, 6), lambda: rows(7, 1)),
    "linear of a vector": (lambda: toy(lambda self, x: F.linear(x[0], self.w), w=(5, 6)), lambda: rows(7, 6)),
    "linear in 3 dimensions": (lambda: nn.Linear(6, 5), lambda: rows(3, 4, 6)),
    "linear in 3 dimensions without bias": (lambda: nn.Linear(6, 5, bias=False), lambda: rows(3, 4, 6)),
    "linear in 4 dimensions": (lambda: nn.Linear(6, 5), lambda: rows(3, 2, 4, 6)),
    "linear of transposed rows": (lambda: nn.Linear(6, 5), lambda: rows(6, 7).t()),
    "linear of a transposed batch": (lambda: nn.Linear(60, 50), lambda: rows(4, 33, 60).transpose(0, 1)),
    "linear of a transposed batch without bias": (
        lambda: nn.Linear(60, 50, bias=False),
        lambda: rows(4, 33, 60).transpose(0, 1)),
    "linear of transposed features": (lambda: nn.Linear(40, 50), lambda: rows(3, 40, 30).transpose(1, 2)),
    "x @ w": (lambda: toy(lambda self, x: x @ self.w + self.b, w=(6, 5), b=(5,)), lambda: rows(7, 6)),
    "x @ w in 3 dimensions": (lambda: toy(lambda self, x: torch.matmul(x, self.w), w=(6, 5)), lambda: rows(3, 4, 6)),
    "x @ w of a transposed batch": (
        lambda: toy(lambda self, x: x @ self.w, w=(60, 50)),
        lambda: rows(4, 33, 60).transpose(0, 1)),
    "x @ w.t()": (lambda: toy(lambda self, x: x @ self.w.t(), w=(50, 60)), lambda: rows(33, 60)),
    "x @ w.T": (lambda: toy(lambda self, x: x @ self.w.T, w=(50, 60)), lambda: rows(33, 60)),
    "x @ w.mT": (lambda: toy(lambda self, x: x @ self.w.mT, w=(50, 60)), lambda: rows(2, 33, 60)),
    "w @ x": (lambda: toy(lambda self, x: self.w @ x, w=(5, 7)), lambda: rows(7, 6)),
    "addmm": (lambda: toy(lambda self, x: torch.addmm(self.b, x, self.w), b=(5,), w=(6, 5)), lambda: rows(7, 6)),
    "addmm, scaled": (
        lambda: toy(lambda self, x: torch.addmm(self.b, x, self.w, beta=2), b=(5,), w=(6, 5)),
        lambda: rows(7, 6)),
    "einsum": (lambda: toy(lambda self, x: torch.einsum("ij,jk->ik", x, self.w), w=(6, 5)), lambda: rows(7, 6)),
    "bias from activations": (lambda: toy(lambda self, x: F.linear(x, self.w, x.sum(0)), w=(6, 6)), lambda: rows(7, 6)),
    "bias cut": (lambda: toy(lambda self, x: F.linear(x, self.w, self.b[:6]), w=(6, 6), b=(8,)), lambda: rows(7, 6)),
    "bias scaled": (lambda: toy(lambda self, x: F.linear(x, self.w, self.b * 2), w=(5, 6), b=(5,)), lambda: rows(3, 4, 6)),
    "bias used three times": (
        lambda: toy(lambda self, x: F.linear(F.linear(x, self.w, self.b).relu(), self.w, self.b) + self.b, w=(6, 6), b=(6,)),
        lambda: rows(3, 4, 6)),
    "bias a matrix": (
        lambda: toy(lambda self, x: torch.addmm(self.b.t(), x, self.w), w=(6, 5), b=(5, 7)),
        lambda: rows(7, 6)),
    "weight from activations": (lambda: toy(lambda self, x: F.linear(x @ self.w, x.t() @ x), w=(6, 6)), lambda: rows(7, 6)),
    "weight cut and scaled": (lambda: toy(lambda self, x: F.linear(x, self.w[:4] * 2), w=(6, 6)), lambda: rows(7, 6)),
    "weight only": (lambda: toy(lambda self, x: self.w @ self.v + x.mean(), w=(6, 6), v=(6, 6)), lambda: rows(7, 6)),
    "no input": (lambda: toy(lambda self, x: self.w * 1, w=(6, 6)), lambda: rows(7, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5)), lambda: tokens(3, 4)),
    "embedding, padded": (lambda: nn.Embedding(7, 6, padding_idx=-2), lambda: tokens(3, 9)),
    "embedding, by frequency": (lambda: nn.Embedding(7, 6, scale_grad_by_freq=True), lambda: tokens(3, 9)),
    "embedding, renormalized": (lambda: nn.Embedding(7, 6, max_norm=0.5), lambda: tokens(3, 9)),
    "embedding of one index": (
        lambda: toy(lambda self, x: x @ self.v + F.embedding(torch.tensor(1), self.w), v=(6, 6), w=(3, 6)),
        lambda: rows(7, 6)),
    "embedding = head": (lambda: tied(7, 6), lambda: tokens(3, 4)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 4, 2, stride=2)),
        lambda: rows(3, 4, 8)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.Tanh(), nn.Conv2d(6, 4, (1, 2), dilation=2, groups=2)),
        lambda: rows(3, 4, 9, 9)),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), lambda: rows(3, 4, 9, 9)),
    "conv2d, circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), lambda: rows(3, 4, 9, 9)),
    "conv2d of one image": (lambda: nn.Conv2d(4, 6, 3), lambda: rows(4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), lambda: rows(2, 2, 4, 4, 4)),
    "conv transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 3, 2, 1, 1)),
        lambda: rows(3, 4, 8)),
    "conv2d transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), lambda: rows(3, 4, 5, 5)),
    "norms": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.BatchNorm1d(6)),
        lambda: rows(7, 6)),
    "norm of a matrix": (lambda: nn.LayerNorm((4, 6)), lambda: rows(3, 4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), lambda: rows(3, 4, 6)),
    "self attention": (lambda: attends(6), lambda: rows(3, 4, 6)),
    "cross attention": (lambda: attends(6, turned), lambda: rows(3, 4, 6)),
    "attention of other widths": (lambda: attends(6, turned, kdim=6, vdim=6, bias=False), lambda: rows(3, 4, 6)),
    "lstm": (lambda: toy(lambda self, x: self.lstm(x)[0]), lambda: rows(3, 4, 6)),
    "bilinear": (lambda: toy(lambda self, x: F.bilinear(x, x, self.w), w=(5, 6, 6)), lambda: rows(7, 6)),
    "tied": (ThreeTimesTied, lambda: rows(7, 6)),
    "weight norm": (parametrized, lambda: rows(7, 6)),
    "partly frozen": (partly_frozen, lambda: rows(7, 6)),
    "adapter": (Adapted, lambda: rows(3, 4, 6)),
    "adapter, merged": (lambda: Adapted(True), lambda: rows(3, 4, 6)),
    "several outputs": (
        lambda: toy(lambda self, x: (x @ self.w, {"b": x @ self.v, "n": None}), w=(6, 5), v=(6, 4)),
        lambda: rows(7, 6)),
    "unused parameter": (lambda: toy(lambda self, x: x @ self.w, w=(6, 5), unused=(3, 3)), lambda: rows(7, 6)),
    "complex": (
        lambda: nn.Sequential(
            toy(lambda self, x: torch.complex(x, x.sin())),
            nn.Linear(6, 5, dtype=torch.complex64),
            nn.Conv1d(5, 4, 1, dtype=torch.complex64)),
        lambda: rows(5, 6)),
    "torch.func": (
        lambda: toy(
            lambda self, x: torch.func.grad(lambda y: torch.tanh(y @ self.w).sum())(x) + torch.vmap(lambda y: y @ self.v)(x),
            w=(6, 6), v=(6, 6)),
        lambda: rows(3, 4, 6)),
    "double": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double(), lambda: rows(7, 6).double()),
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    module = MODULES[name][0]()
    if name == "lstm":
        module.lstm = nn.LSTM(6, 5, batch_first=True)
    return module


def run(stage: Stage, batches: list[Tensor], split: bool, late: bool = True) -> tuple[list[Any], list[Any]]:
    """A step: all forwards, all backwards (and all W, `late` or each at once): outputs and input gradients."""
    stage.begin_step()
    outputs, gradients = [], []
    for m, batch in enumerate(batches):
        value = batch.clone(memory_format=torch.preserve_format)
        output = stage.forward(m, [value.requires_grad_(batch.is_floating_point() and m != 1)], split_backward=split)
        outputs.append([leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)])
    for m in range(len(batches)):
        generator = torch.Generator().manual_seed(m)
        seeds = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs[m] if out.requires_grad]
        gradients.append(stage.backward(m, seeds)[0])
        if split and not late:
            stage.backward_weight(m)
    if split and late:
        for m in range(len(batches)):
            stage.backward_weight(m)
    return outputs, gradients


def compare(module: nn.Module, batches: list[Tensor], late: bool = True, in_order: bool = False) -> None:
    """Split against full, from the same weights, three steps without clearing the gradients."""
    other = copy.deepcopy(module)
    stage, plain = Stage(1, module, CPU, in_order=in_order), Stage(1, other, CPU)
    for _ in range(3):
        ours, theirs = run(stage, batches, split=True, late=late), run(plain, batches, split=False)
        assert all(torch.equal(a, b) for x, y in zip(ours[0], theirs[0], strict=True) for a, b in zip(x, y, strict=True))
        for x, y in zip(ours[1], theirs[1], strict=True):
            for a, b in zip(x, y, strict=True):
                assert a is b is None or torch.equal(a, b)
        for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name


AUTOCAST = [
    "mlp",
    "transformer",
    "self attention",
    "conv2d",
    "tied",
    "x @ w.t()",
    "embedding = head",
    "norms",
    "bias used three times",
]
WAYS: dict[str, dict[str, bool]] = {  # options of `compare`
    "W at the end": {},
    "W behind its I": {"late": False},
    "biases in I": {"in_order": True},
}
CASES = [
    pytest.param(
        name,
        way,
        casts,
        marks=[] if way == "biases in I" else [pytest.mark.kernels, *[pytest.mark.costly] * (not casts)],
        id=f"{name}, {way}{', autocast' * casts}",
    )
    for way in WAYS
    for casts, names in ((False, MODULES), (True, AUTOCAST))
    for name in names
    if not casts or way != "W behind its I"
]


@pytest.mark.parametrize(("name", "way", "casts"), CASES)
def test_a_split_backward_has_the_bits_of_a_full_one(name: str, way: str, casts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "biases in I":
        monkeypatch.setattr(split_backward, "MIN_DEFERRED_MULTIPLICATIONS", 0)  # so that all products are deferred
    module = make(name)
    batches = [MODULES[name][1]() for _ in range(2 if casts or way == "biases in I" else 3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        compare(module, batches, **WAYS[way])


# -- what happens when ----------------------------------------------------------------------------------------------


def split_stage(module: nn.Module, data_parallel: DataParallelHooks | None = None) -> Stage:
    stage = Stage(1, module, CPU, data_parallel=data_parallel)
    stage.begin_step()
    return stage


def batch(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


@pytest.mark.parametrize("name", [name for name in MODULES if name != "lstm"])
def test_nothing_reaches_the_parameters_before_w(name: str) -> None:
    module = make(name)
    stage = split_stage(module)
    value = MODULES[name][1]()
    output = stage.forward(0, [value.requires_grad_(value.is_floating_point())], split_backward=True)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    stage.backward(0, [torch.ones_like(leaf) for leaf in leaves])
    assert all(parameter.grad is None for parameter in module.parameters())
    stage.backward_weight(0)
    assert any(parameter.grad is not None for parameter in module.parameters())


PUT_OFF = {
    "mlp": 2, "mlp in place, in 3 dimensions": 2, "linear in 3 dimensions": 1, "linear of a transposed batch": 1,
    "x @ w": 1, "x @ w.t()": 1, "x @ w.T": 1, "x @ w.mT": 1, "addmm": 1,
    "embedding": 2, "embedding = head": 2, "conv1d": 2, "conv2d": 2, "conv2d, circular": 1, "conv3d": 1,
    "conv transposed": 2, "transformer": 4, "self attention": 2, "cross attention": 4, "tied": 3, "partly frozen": 1,
    "adapter": 2, "bias from activations": 1, "bias scaled": 1, "bias used three times": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", PUT_OFF)
def test_the_weight_gradients_of_products_are_put_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    original = deferred.WeightUse.compute
    monkeypatch.setattr(deferred.WeightUse, "compute", lambda use, gradient: computed.append(use) or original(use, gradient))
    stage = split_stage(make(name))
    value = MODULES[name][1]()
    output = stage.forward(0, [value.requires_grad_(value.is_floating_point())], split_backward=True)
    stage.backward(0, [torch.ones_like(output)])
    assert not computed
    stage.backward_weight(0)
    assert len(computed) == PUT_OFF[name]


def test_hooks_on_parameters_see_each_microbatchs_whole_gradient_once_in_w() -> None:
    seen: dict[bool, list[Any]] = {True: [], False: []}
    for split in (True, False):
        torch.manual_seed(3)
        module = ThreeTimesTied().double()
        module.a.weight.register_hook(lambda grad, split=split: seen[split].append(grad.clone()) or grad * 2)
        module.a.bias.register_post_accumulate_grad_hook(lambda p, split=split: seen[split].append(p.grad.clone()))
        stage = split_stage(module)
        for m in range(2):
            output = stage.forward(m, [batch(7, 6).double().detach().requires_grad_()], split_backward=split)
            before = len(seen[split])
            stage.backward(m, [torch.ones_like(output)])
            if split:
                assert len(seen[split]) == before
                stage.backward_weight(m)
            assert len(seen[split]) == before + 2
        seen[split].append(module.a.weight.grad)
    assert sorted(map(str, seen[True])) == sorted(map(str, seen[False]))


class RecomputedBlocks(nn.Module):
    """Two blocks, each recomputed in the backward; counts its forwards."""

    def __init__(self, reentrant: bool, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.LayerNorm(width))
            for _ in range(2)
        )
        self.reentrant, self.forwards = reentrant, 0

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(self.run, block, hidden, use_reentrant=self.reentrant)
        return hidden

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        self.forwards += 1
        return block(hidden)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_recomputed_once_in_i(reentrant: bool) -> None:
    torch.manual_seed(1)
    module = RecomputedBlocks(reentrant)
    stage = split_stage(module)
    output = stage.forward(0, [batch(7, 6)], split_backward=True)
    assert module.forwards == 2
    stage.backward(0, [torch.ones_like(output)])
    assert module.forwards == 4
    assert all(parameter.grad is None for parameter in module.parameters())
    stage.backward_weight(0)
    assert module.forwards == 4
    torch.manual_seed(1)
    batches = [torch.randn(7, 6) for _ in range(3)]
    if reentrant:  # its input must require a gradient
        other = copy.deepcopy(module)
        for item, split in ((module, True), (other, False)):
            item.zero_grad()
            again = split_stage(item)
            for m, value in enumerate(batches):
                output = again.forward(m, [value.clone().requires_grad_()], split_backward=split)
                again.backward(m, [torch.ones_like(output)])
                if split:
                    again.backward_weight(m)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), other.parameters(), strict=True))
    else:
        module.zero_grad()
        compare(module, batches)


def test_a_checkpointed_block_keeps_no_activation_between_forward_and_i() -> None:
    module, alive = RecomputedBlocks(False, 64), []
    stage = split_stage(module)
    for block in module.blocks:
        block[1].register_forward_hook(lambda _, inputs, output: alive.append(weakref.ref(output)))
    stage.forward(0, [batch(33, 64)], split_backward=True)
    gc.collect()
    assert len(alive) == 2
    assert all(process() is None for process in alive)


def test_activations_no_weight_needs_go_with_i_and_the_rest_with_w() -> None:
    alive = {}
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.GELU(), nn.Linear(6, 6))
    for number, layer in enumerate(module):
        layer.register_forward_hook(lambda _, inputs, out, number=number: alive.update({number: weakref.ref(out)}))
    stage = split_stage(module)
    output = stage.forward(0, [batch(7, 6)], split_backward=True)
    seed = torch.ones_like(output)
    del output
    assert [alive[number]() is not None for number in range(4)] == [False, True, True, False]
    stage.backward(0, [seed])
    assert [alive[number]() is not None for number in range(4)] == [False, False, True, False]
    stage.backward_weight(0)
    assert [alive[number]() is not None for number in range(4)] == [False, False, False, False]


def test_an_input_changed_in_place_is_an_error_as_in_a_full_backward() -> None:
    def spoil(self: Any, x: Tensor) -> Tensor:
        hidden = x * 1
        output = F.linear(hidden, self.w)
        hidden.add_(1)
        return output

    stage = split_stage(toy(spoil, w=(5, 6)))
    output = stage.forward(0, [batch(7, 6)], split_backward=True)
    stage.backward(0, [torch.ones_like(output)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.backward_weight(0)


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_forward_that_differentiates_inside_is_refused_since_the_weights_part_in_that_would_be_lost(create_graph):
    def force(self: Any, x: Tensor) -> Tensor:
        energy = torch.tanh(x @ self.w).sum()
        return x + torch.autograd.grad(energy, x, create_graph=create_graph)[0]

    stage = split_stage(toy(force, w=(6, 6)))
    output = stage.forward(0, [batch(7, 6)], split_backward=True)
    with pytest.raises(ps.StageError, match=r"differentiates inside .*: use a schedule without I and W, '1f1b' for instance"):
        stage.backward(0, [torch.ones_like(output)])


def test_the_parameters_are_back_in_their_places_whatever_happens() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 6))
    before = dict(module.named_parameters())
    stage = split_stage(module)
    with pytest.raises(RuntimeError):
        stage.forward(0, [batch(7, 6)], split_backward=True)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_parameters_may_be_frozen_replaced_and_moved_between_steps() -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    changes = [
        lambda net: net[1].weight.requires_grad_(False),
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.eye(6))),
        lambda net: net.double(),
        lambda net: net[1].weight.requires_grad_(True),
    ]
    stage, other = split_stage(module), split_stage(copy.deepcopy(module))
    value = torch.randn(7, 6)
    for change in (lambda net: None, *changes):
        for item, split in ((stage, True), (other, False)):
            change(item.module)
            item.module.zero_grad()
            item.begin_step()
            output = item.forward(0, [value.to(item.module[0].weight.dtype)], split_backward=split)
            item.backward(0, [torch.ones_like(output)])
            if split:
                item.backward_weight(0)
        for p, q in zip(module.parameters(), other.module.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


class Constrained(nn.Conv1d):
    """As in EEGNet: a new weight, of no more than a norm, takes the place of the weight's values before each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        self.bias.data = self.bias.data.clamp(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("in_order", [True, False])
def test_values_that_a_forward_puts_in_the_place_of_a_parameters_stay_there(in_order: bool) -> None:
    torch.manual_seed(5)
    module = nn.Sequential(Constrained(2, 3, 3), nn.Tanh(), Constrained(3, 2, 3))
    other = copy.deepcopy(module)
    stage = Stage(1, module, CPU, in_order=in_order)
    values = [torch.randn(4, 2, 9) for _ in range(3)]
    optimizers = [torch.optim.SGD(value.parameters(), lr=1.0) for value in (module, other)]
    for _ in range(3):
        stage.begin_step()
        for m, value in enumerate(values):
            output = stage.forward(m, [value], split_backward=True)
            expected = other(value)
            assert torch.equal(output, expected)
            expected.backward(torch.ones_like(expected))
            stage.backward(m, [torch.ones_like(output)])
        for m in range(3):
            stage.backward_weight(m, is_last=m == 2)
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_weight_kept_from_one_microbatch_to_the_next_loses_nothing() -> None:
    def cached(self: Any, x: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None:
            self.cache = self.w.t()
        return x @ self.cache

    torch.manual_seed(4)
    sums = []
    for split in (True, False):
        torch.manual_seed(4)
        module = toy(cached, w=(5, 6)).double()
        stage = split_stage(module)
        values = [torch.randn(7, 6).double() for _ in range(3)]
        for m, value in enumerate(values):
            stage.forward(m, [value], split_backward=split)
        for m in range(3):
            stage.backward(m, [torch.ones(7, 5).double()])
            if split:
                stage.backward_weight(m, is_last=m == 2)
        sums.append(module.w.grad)
    assert torch.allclose(*sums, rtol=1e-12, atol=0)


@pytest.mark.costly
def test_a_compiled_stage_does_all_of_it_in_i() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    compiled, plain = copy.deepcopy(module), copy.deepcopy(module)
    compiled.compile(backend="eager")
    batches = [torch.randn(7, 6) for _ in range(2)]
    run(Stage(1, compiled, CPU), batches, split=True)
    run(Stage(1, plain, CPU), batches, split=False)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(compiled.parameters(), plain.parameters(), strict=True))


@pytest.mark.costly
def test_around_a_compiled_layer_the_others_are_split() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    compiled, plain = copy.deepcopy(module), copy.deepcopy(module)
    compiled[1].compile(backend="eager")
    stage, batches = split_stage(compiled), [torch.randn(64, 64) for _ in range(2)]
    stage.backward(0, [torch.ones_like(stage.forward(0, [batches[0]], split_backward=True))])
    assert compiled[1].weight.grad is not None
    assert compiled[0].weight.grad is compiled[2].weight.grad is None
    stage.backward_weight(0)
    assert compiled[0].weight.grad is not None
    compiled.zero_grad()
    run(stage, batches, split=True)
    run(Stage(1, plain, CPU), batches, split=False)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(compiled.parameters(), plain.parameters(), strict=True))


def test_gradients_are_added_in_one_go_where_nobody_listens(monkeypatch: Any) -> None:
    added: list[int] = []
    real = weight_gradients.foreach_add
    monkeypatch.setattr(weight_gradients, "foreach_add", lambda sums, terms: added.append(len(sums)) or real(sums, terms))
    for hooked, expected in ((False, [3, 3]), (True, [])):
        module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        plain, seen = copy.deepcopy(module), list[Tensor]()
        with torch.no_grad():
            for value in (*module, *plain):
                value.weight.grad = torch.zeros(64 * 64).view(64, 64)  # as people make it who keep all gradients in one piece
        if hooked:
            module[1].weight.register_hook(seen.append)
        batches = [torch.randn(64, 64) for _ in range(2)]
        run(split_stage(module), batches, split=True)
        run(Stage(1, plain, CPU), batches, split=False)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
        assert (added, len(seen)) == (expected, 2 * hooked)
        added.clear()


# -- replicas -------------------------------------------------------------------------------------------------------


def rank_replicas(split: bool, find_unused: bool) -> tuple[dict[str, Tensor], int]:
    topology = ps.comms.init_distributed()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).double()
    if find_unused:
        module.register_parameter("unused", nn.Parameter(torch.zeros(1).double()))
    parallel = nn.parallel.DistributedDataParallel(module, find_unused_parameters=find_unused)
    sums = 0

    def counted(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal sums
        sums += 1
        return allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, counted)
    stage = split_stage(module, data_parallel_hooks_of(module, parallel))
    generator = torch.Generator().manual_seed(10 + topology.rank)
    for _ in range(2):
        stage.begin_step()
        for m in range(3):
            stage.forward(m, [torch.randn(7, 6, generator=generator).double()], split_backward=split)
        for m in range(3):
            stage.backward(m, [torch.ones(7, 5).double()], is_last=m == 2 and not split)
        if split:
            for m in range(3):
                stage.backward_weight(m, is_last=m == 2)
        stage.data_parallel.finish_step(training=True)
    return {name: p.grad for name, p in module.named_parameters()}, sums


@pytest.mark.ranks
@pytest.mark.parametrize("find_unused", [False, True])
def test_replicas_stay_equal_and_sum_once_a_step(find_unused: bool) -> None:
    split = on_ranks(rank_replicas, 2, True, find_unused)
    full = on_ranks(rank_replicas, 2, False, find_unused)
    for (ours, sums), (theirs, expected) in zip(split, full, strict=True):
        assert sums == expected == 2
        for name in ours:
            assert ours[name] is theirs[name] is None or torch.equal(ours[name], theirs[name])
            assert ours[name] is None or torch.equal(ours[name], split[0][0][name])


# -- products too small to be deferred ------------------------------------------------------------------------------------


def small_and_large() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.LayerNorm(512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))


def two_steps(stage: Stage, rows: int, order: tuple[int, ...]) -> list[dict[str, Tensor | None]]:
    """After all `I` of each step, the gradients there are."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(2):
        stage.begin_step()
        for m in range(3):
            stage.forward(m, [torch.randn(rows, 8, generator=generator).requires_grad_()], split_backward=True)
        for m in range(3):
            stage.backward(m, [torch.randn(rows, 8, generator=generator)])
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in stage.module.named_parameters()})
        for m in order:
            stage.backward_weight(m, is_last=m == order[-1])
        found.append({name: p.grad.clone() for name, p in stage.module.named_parameters()})
    return found


def test_gradients_too_small_to_be_put_off_come_in_i_from_the_second_step_on() -> None:
    """With 16 rows: 16 x 512 x 512 products are many, 16 x 8 x 512 are few."""
    ours, plain = (Stage(1, small_and_large(), CPU, in_order=in_order) for in_order in (True, False))
    first, _, second, last = two_steps(ours, 16, (0, 1, 2))
    expected = two_steps(plain, 16, (0, 1, 2))
    assert set(first.values()) == {None}
    changed = {name for name in second if not torch.equal(second[name], expected[1][name])}
    assert changed == {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias", "4.weight", "4.bias"}
    for name, gradient in last.items():
        assert torch.equal(gradient, expected[3][name]), name


def test_hooks_run_in_w_however_small_their_parameter_is() -> None:
    stage = Stage(1, small_and_large(), CPU, in_order=True)
    seen = []
    stage.module[0].bias.register_hook(lambda _: seen.append("hook"))
    stage.module[4].bias.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    _, before, second, _ = two_steps(stage, 16, (0, 1, 2))
    assert torch.equal(before["0.bias"], second["0.bias"])
    assert torch.equal(before["4.bias"], second["4.bias"])
    assert not torch.equal(before["0.weight"], second["0.weight"])
    assert sorted(seen) == 6 * ["after"] + 6 * ["hook"]


def test_where_w_comes_in_another_order_all_are_put_off() -> None:
    stage = Stage(1, small_and_large(), CPU)
    _, before, second, _ = two_steps(stage, 16, (2, 1, 0))
    for name in before:
        assert torch.equal(before[name], second[name])


def test_with_many_rows_small_weights_are_put_off_as_well() -> None:
    stage = Stage(1, small_and_large(), CPU, in_order=True)
    _, before, second, _ = two_steps(stage, 128, (0, 1, 2))
    assert {name for name in before if torch.equal(before[name], second[name])} == {"0.weight", "2.weight", "4.weight"}


def test_a_stage_with_small_weights_only_leaves_nothing_to_w() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    other = copy.deepcopy(module)
    stage = Stage(1, module, CPU, in_order=True)
    values = [torch.randn(4, 6) for _ in range(3)]
    for _ in range(3):
        stage.begin_step()
        for m, value in enumerate(values):
            stage.forward(m, [value], split_backward=True)
            stage.backward(m, [torch.ones(4, 5)])
            stage.backward_weight(m, is_last=m == 2)
            other(value).backward(torch.ones(4, 5))
    assert not stage._deferred
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
