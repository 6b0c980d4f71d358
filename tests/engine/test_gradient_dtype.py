"""FP32 gradients of BF16 parameters (`parameter.grad_dtype`): summed in FP32 wherever one process sums them in FP32."""

from functools import cache
from typing import Any

import pytest
import torch
from reference import OneProcess, assert_as_one_process, gradients, pieces
from runners import cases_on_ranks, on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps

pytestmark = pytest.mark.ranks

WORDS, WIDTH, M = 17, 32, 4
STAGES = ["two", "three", "head"]  # a matrix is in all four


class Block(nn.Module):
    """Uses its matrix, its bias and the model's embedding twice each."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.LayerNorm(WIDTH)
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6), nn.Parameter(torch.randn(WIDTH) / 8)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(nn.functional.linear(self.norm(hidden), self.weight, self.bias))
        inner = torch.tanh(nn.functional.linear(inner, self.weight, self.bias))
        words, heads = self.embedding.weight, inner.unflatten(-1, (4, -1)).transpose(1, 2)
        attended = ps.attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return hidden + attended + (hidden @ words.t()).softmax(-1) @ words


class Net(nn.Module):
    """Tokens (B, T) -> (B, T, WORDS), in BF16 with FP32 gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Embedding(WORDS, WIDTH)
        self.two, self.three = (Block(self.one) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.one.weight
        self.bfloat16()
        for parameter in self.parameters():
            parameter.grad_dtype = torch.float32

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.three(self.two(self.one(tokens))))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randint(WORDS, (rows, 6), generator=torch.Generator().manual_seed(step))


def trains(pipeline: Any, schedule: str, how: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """Gradients of two batches, their norm, and the weights after a step with them."""
    cuts = {"V": STAGES, "moved": STAGES[-1:], "one": None}.get(how, ["three"])
    pipe: Any = pipeline(Net(), loss_fn, schedule, M, cuts=cuts, **dict(options))
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        tokens = batch(step)
        if "list" in how:
            parts = list(pieces(tokens, M))
            pipe.step_microbatches(parts, parts)
        else:
            pipe.step(tokens, target=tokens)
        if how == "moved" and step == 0:
            pipe, optimizer = pipe.rebuild(cuts=["two"], optimizer=optimizer)
    grads = gradients(pipe.named_parameters())
    norm = nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
    optimizer.step()
    return grads, norm, {name: p.detach().clone() for name, p in pipe.named_parameters()}


def train(*case: Any) -> Any:
    return trains(ps.Pipeline, *case)


@cache
def one_process() -> Any:
    return trains(OneProcess, "", "", ())


CASES: dict[str, tuple[Any, ...]] = {
    "1f1b": ("1f1b", "", ()),
    "zb-h1": ("zb-h1", "", ()),
    "zb-v, recomputed": ("zb-v", "V", (("recompute", "block"),)),
    "a list": ("zb-h1", "list", ()),
    "slices": ("zb-h1", "slices", (("slices", 2),)),
    "rebuilt": ("1f1b", "moved", ()),
    "gpipe": ("gpipe", "", ()),
    "interleaved": ("interleaved-1f1b", "V", ()),
    "interleaved-zb, recomputed": ("interleaved-zb", "V", (("recompute", "stage"),)),
}


QUICK = ("1f1b", "zb-v, recomputed", "slices")


@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_they_have_the_bits_of_one_process_and_so_has_the_step_of_the_optimizer(case: str) -> None:
    launched = tuple(CASES[name] for name in CASES if (name in QUICK) == (case in QUICK))
    everyone = cases_on_ranks(train, 2, launched)[CASES[case]]
    expected = on_ranks(train, 1, "zb-h1", "one", (("slices", 2),))[0] if case == "slices" else one_process()
    assert {grad.dtype for grad in expected[0].values()} == {torch.float32}
    assert_as_one_process(everyone, expected)


def build_replicas(data_parallel: str) -> str:
    mesh = ps.comms.init_mesh(dp=2)
    with pytest.raises(ps.MismatchError) as error:
        ps.Pipeline(Net(), loss_fn, mesh=mesh, data_parallel=data_parallel)
    return str(error.value)


@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_replicas_which_torch_would_average_in_bfloat16_are_refused(data_parallel: str) -> None:
    for text in on_ranks(build_replicas, 2, data_parallel):
        assert "one.weight is torch.bfloat16 and has grad_dtype=torch.float32" in text
        assert "reduce_dtype=torch.float32" in text
