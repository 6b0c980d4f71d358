"""Two linear layers, shared out.

y = relu(x At) Bt, with A (hidden, width) and B (width, hidden). Each of P ranks has rows of A, and the columns of B that go
with them: it computes its part of the hidden numbers and a part of the sum that y is. One all-reduce in the forward makes
y; and the gradient of x, of which each rank makes a part, needs one in the backward.

Write `forward(x, a, b)` and `backward(dy, x, a, b)` for one rank: `a` (hidden / P, width), `b` (width, hidden / P). forward
returns y; backward returns (dx, da, db). `all_reduce(tensor)` returns the sum over the ranks.

Target: on 2 and 4 ranks what autograd computes in one process, to 1e-12 (sums have another order), with one all-reduce
each.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.judge import Missed, Passed, on_ranks, written, yours
from penstock.learn.puzzles.tools import all_reduce, called


@yours
def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(rows, width) -> (rows, width), the same on every rank."""
    return all_reduce(torch.relu(x @ a.t()) @ b.t())


@yours
def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (whole), a and b (this rank's parts)."""
    preactivation = x @ a.t()
    hidden = torch.relu(preactivation)
    dhidden = (dy @ b) * (preactivation > 0)
    return all_reduce(dhidden @ a), dhidden.t() @ x, dy.t() @ hidden


HINTS = (
    "The relu works on each hidden number by itself, so nothing need be exchanged between the two layers.",
    "dy is the same on every rank. The gradients of a and b need nobody; that of x is a sum over the ranks, as y was.",
)
EXPLANATION = """Cut the first matrix by rows of its outputs (column-parallel in Megatron's words), the second by its
inputs (row-parallel): between them nothing travels. One all-reduce forward, one backward, for each such pair: much talk, so
ranks along tp sit next to each other. `tensor_parallel={"up": ColwiseParallel(), "down": RowwiseParallel()}` says it to
Penstock."""


def check(answers: Any) -> Passed:
    """Beside autograd in one process."""
    for ranks in (2, 4):
        x, a, b, dy = problem()
        leaves = [value.requires_grad_() for value in (x, a, b)]
        y = torch.relu(x @ a.t()) @ b.t()
        dx, da, db = torch.autograd.grad(y, leaves, dy)
        for rank, (output, gradients, counts) in enumerate(on_ranks(_on_rank, ranks, answers)):
            part = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            expected = {"y": y.detach(), "dx": dx, "da": da[part], "db": db[:, part]}
            for (name, part_of_uncut), answer in zip(expected.items(), (output, *gradients), strict=True):
                if answer.shape != part_of_uncut.shape:
                    raise Missed(
                        f"rank {rank} of {ranks}: {name} has the shape {tuple(answer.shape)}, not {tuple(part_of_uncut.shape)}"
                    )
                if (apart := (answer - part_of_uncut).abs().max().item()) > 1e-12:
                    raise Missed(f"rank {rank} of {ranks}: {name} is off by {apart:.3g}: is it a part of a sum?")
            if max(counts) > 1:
                raise Missed(f"forward takes {counts[0]} all-reduces and backward {counts[1]}: one each will do")
    return Passed("y and all gradients are those of one process, with one all-reduce each way")


def problem() -> list[Tensor]:
    """x, A, B and dy, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 4), (8, 4), (4, 8), (5, 4))]


def _on_rank(answers: Any) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, a, b, dy = problem()
    a, b = a.chunk(ranks)[rank].clone(), b.chunk(ranks, 1)[rank].clone()
    called.clear()
    y = written(answers.forward(x, a, b), "forward()")
    forwards = len(called)
    gradients = written(answers.backward(dy, x, a, b), "backward()")
    return y, tuple(gradients), (forwards, len(called) - forwards)
