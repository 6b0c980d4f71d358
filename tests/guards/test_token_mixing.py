"""Layers that mix tokens beside `ps.attention` are named where tokens are cut; all others are left alone, as they were."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_text import error_text
from models import toy
from runners import on_ranks
from slow_cases import slow_except
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps

TIME, WIDTH = 12, 8


class Layer(nn.Module):
    """Applies a function beside a linear layer, around it or before."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.function(x))


class Attend(nn.Module):
    """Attention by `ps.attention`, with dropout of its weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.heads(x).chunk(3, -1))
        return x + ps.attention(query, key, value, dropout=self.dropout).transpose(1, 2).flatten(2)


def own_batch_norm() -> nn.Module:
    return toy(lambda self, x: self.norm(x.mT).mT, norm=nn.BatchNorm1d(WIDTH))


def own_convolution() -> nn.Module:
    """A convolution as a function: by its class it would be refused before the first step."""
    forward = lambda self, x: functional.conv1d(functional.pad(x.mT, (2, 0)), self.weight).mT  # noqa: E731
    return toy(forward, "OwnConvolution", weight=nn.Parameter(torch.ones(WIDTH, WIDTH, 3) / WIDTH))


class OwnRecurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(len(x), WIDTH)]
        for token in x.unbind(1):
            states.append(self.cell(token, states[-1]))
        return torch.stack(states[1:], 1)


def own_attention(x: Tensor) -> Tensor:
    return (x @ x.mT + torch.full((x.shape[1],) * 2, -torch.inf).triu(1)).softmax(-1) @ x


def torch_attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def numbered(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1])[:, None] / TIME


MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shift": (lambda: Layer(lambda x: functional.pad(x, (0, 0, 1, -1))), "1, a Layer, .*what it gives to 1.linear is"),
    "shift back": (lambda: Layer(lambda x: functional.pad(x, (0, 0, -1, 1))), "1, a Layer, .*what it gives to 1.linear is"),
    "roll": (lambda: Layer(lambda x: x.roll(1, 1)), "1, a Layer, .*what it gives to 1.linear is"),
    "cumsum": (lambda: Layer(lambda x: x.cumsum(1)), "1, a Layer, .*what it gives to 1.linear is"),
    "mean": (lambda: Layer(lambda x: x.mean(1, keepdim=True)), "1, a Layer, .*its output is"),
    "gate": (lambda: Layer(lambda x: x * x.mean(1, keepdim=True).sigmoid()), "1, a Layer, .*what it gives to 1.linear is"),
    "batch norm": (own_batch_norm, "1.norm, a BatchNorm1d, .*its output is"),
    "convolution": (own_convolution, "1, a OwnConvolution, .*its output is"),
    "recurrence": (OwnRecurrence, "1, a OwnRecurrence, "),
    "attention": (lambda: Layer(own_attention), "1, a Layer, .*what it gives to 1.linear is"),
    "torch's attention": (lambda: Layer(torch_attention), "1, a Layer, which calls scaled_dot_product_attention: call ps.att"),
    "numbers": (lambda: Layer(numbered), "1, a Layer, .*or numbers them from 0.*ps.cache.first_position"),
}


def model(layer: nn.Module, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attend(dropout), layer, nn.Dropout(dropout), Attend(dropout), nn.Linear(WIDTH, WIDTH))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, TIME, WIDTH, generator=generator), torch.randn(4, TIME, WIDTH, generator=generator)


def step(layer: nn.Module, schedule: str = "1f1b", slices: Any = 3, training: bool = True, **arguments: Any) -> ps.Pipeline:
    pipe = ps.Pipeline(model(layer), functional.mse_loss, schedule, 2, slices=slices, **arguments)
    inputs, target = batch()
    if training:
        pipe.step(inputs, target=target)
    else:
        pipe.eval(inputs)
    return pipe


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_tokens_in_its_own_way_is_named(name: str) -> None:
    layer, text = MIXING[name]
    with pytest.raises(ps.MismatchError, match=f"the tokens of a sequence cannot be cut before {text}"):
        step(layer(), topology=ps.Topology())


@pytest.mark.parametrize(("slices", "training", "recompute"), [([2, 6, 4], True, "block"), ([9, 2, 1], False, None)])
def test_it_is_named_in_slices_of_any_lengths_in_evaluations_and_where_layers_are_recomputed(
    slices: Any, training: bool, recompute: Any
) -> None:
    with pytest.raises(ps.MismatchError, match="cannot be cut before 1, a Layer, which mixes them outside"):
        step(MIXING["shift"][0](), "gpipe", slices, training, topology=ps.Topology(), recompute=recompute)


# -- layers that treat tokens one by one ---------------------------------------------------------------------------------


class Numbered(nn.Module):
    """Numbers its tokens from the first of its part."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], dtype=x.dtype) + ps.cache.first_position()
        return x + positions[:, None] / TIME


class Experts(nn.Module):
    """Each token goes to the expert that it scores highest; an expert is given another number of tokens each time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if (rows := (chosen == number).nonzero()[:, 0]).numel():
                output = output.index_add(0, rows, expert(tokens[rows]).to(x.dtype))
        return x + (output * scores[:, None]).view_as(x)


class Transposed(nn.Module):
    """Works on (time, rows, width), in place, and turns tokens around and back inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x.transpose(0, 1).flip(0))).flip(0).transpose(0, 1)


class CountsCalls(nn.Module):
    """Has a buffer and an attribute that each forward changes, and draws numbers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls, self.dropout = 0, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.num_calls += 1
        return self.dropout(x) * (1 + random.random()) + torch.rand_like(x)


TOKENWISE = {"numbers": Numbered, "experts": Experts, "transposed": Transposed, "noise": CountsCalls}


@pytest.mark.costly
@pytest.mark.filterwarnings("error:tokens are cut, but:RuntimeWarning")
@pytest.mark.parametrize("name", TOKENWISE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_that_treat_tokens_one_by_one_are_left_alone(name: str, dtype: torch.dtype) -> None:
    inputs, target = (value.to(dtype) for value in batch())
    whole = model(TOKENWISE[name](), dropout=0.2).to(dtype)
    pipe = ps.Pipeline(whole, functional.mse_loss, "zb-h1", 2, slices=3, topology=ps.Topology())
    pipe.step(inputs, target=target)
    pipe.eval(inputs, target=target)


@pytest.mark.filterwarnings("error:tokens are cut, but:RuntimeWarning")
@pytest.mark.parametrize(("seed", "autocast"), [(0, False), (None, False), (0, True)])
def test_the_first_step_has_the_bits_and_leaves_the_state_of_one_that_checks_nothing(
    seed: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr("penstock.guards.token_mixing._StageCheck.run", lambda _: None)
        layer = CountsCalls()
        random.seed(2)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pipe = step(layer, topology=ps.Topology(), seed=seed)
        values = [*(parameter.grad for parameter in pipe.parameters()), *pipe.state_dict().values(), torch.get_rng_state()]
        found.append((values, layer.num_calls, random.random()))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1:] == found[1][1:] == (6, found[0][2])


def test_it_costs_nothing_after_the_first_step_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("penstock.guards.token_mixing._StageCheck.run", lambda check: calls.append(check))
    pipe, (inputs, target) = step(Numbered(), topology=ps.Topology()), batch()
    pipe.step(inputs, target=target)
    assert len(calls) == 1
    pipe.eval(inputs)
    pipe.eval(inputs)
    assert len(calls) == 2


# -- several ranks -------------------------------------------------------------------------------------------------------


def refusals(cases: list[tuple[str, str]]) -> list[str]:
    """The error of each layer with a schedule, or along cp."""

    def on(schedule: str) -> dict[str, Any]:
        return {"mesh": ps.comms.init_mesh(pp=1, cp=2), "slices": 1} if schedule == "cp" else {"schedule": schedule}

    step(Experts(), **on("cp"))
    return [
        error_text(lambda layer=MIXING[name][0], schedule=schedule: step(layer(), **on(schedule)), ps.MismatchError)
        for name, schedule in cases
    ]


CASES = [("shift", "1f1b"), ("attention", "cp")]
MORE_CASES = [
    [("roll", "gpipe"), ("shift back", "cp")],
    [("roll", "zb-h1"), ("batch norm", "cp")],
    [("roll", "interleaved-1f1b"), ("numbers", "cp")],
]


@pytest.mark.ranks
@pytest.mark.parametrize("cases", slow_except([CASES], [CASES, *MORE_CASES]))
def test_every_rank_names_the_layer_in_slices_of_any_schedule_and_along_cp(cases: list[tuple[str, str]]) -> None:
    for texts in on_ranks(refusals, 2, cases):
        for (name, _), text in zip(cases, texts, strict=True):
            assert "the tokens of a sequence cannot be cut before 1" in text, name
