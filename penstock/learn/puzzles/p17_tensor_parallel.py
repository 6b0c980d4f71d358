"""Two linear layers, sharded over ranks.

y = relu(x At) Bt, with A of (hidden, width) and B of (width, hidden). Each of P ranks has some rows of A and the same columns
of B. It computes its shard of the hidden activations and a partial sum of y. One all-reduce in the forward makes y. Each rank
also computes only a partial sum of the gradient of x, which needs one all-reduce in the backward.

Write `forward(x, a, b)` and `backward(dy, x, a, b)` for one rank: `a` is (hidden / P, width), `b` (width, hidden / P). forward
returns y; backward returns (dx, da, db). `all_reduce(tensor)` returns the sum over the ranks.

Target: on 2 and 4 ranks, autograd's results in one process to 1e-12 (the order of the sums differs), with one all-reduce in
each direction.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, run_on_ranks, solution
from penstock.learn.puzzles.tools import all_reduce, calls


@solution
def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y of (rows, width), the same on every rank."""
    return all_reduce(torch.relu(x @ a.t()) @ b.t())


@solution
def backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (whole), a and b (this rank's shards)."""
    preactivation = x @ a.t()
    hidden = torch.relu(preactivation)
    dhidden = (dy @ b) * (preactivation > 0)
    return all_reduce(dhidden @ a), dhidden.t() @ x, dy.t() @ hidden


HINTS = (
    "relu works on each hidden element by itself, so the ranks exchange nothing between the two layers.",
    "dy is the same on every rank. The gradients of a and b need no other rank; that of x is a sum over the ranks, as y is.",
)
EXPLANATION = """Shard the first weight along its outputs (column-parallel in Megatron's words), the second along its inputs
(row-parallel): between them nothing is sent. Each such pair takes one all-reduce in the forward and one in the backward.
That is much communication, so ranks along tp should be close to each other. In Penstock: `tensor_parallel={"up":
ColwiseParallel(), "down": RowwiseParallel()}`."""


def check(answers: Any) -> CheckPassed:
    """Compare with autograd in one process. Raises CheckFailed."""
    for ranks in (2, 4):
        x, a, b, dy = make_tensors()
        leaves = [value.requires_grad_() for value in (x, a, b)]
        y = torch.relu(x @ a.t()) @ b.t()
        dx, da, db = torch.autograd.grad(y, leaves, dy)
        for rank, (output, gradients, counts) in enumerate(run_on_ranks(_run_layers, ranks, answers)):
            shard = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            expected = {"y": y.detach(), "dx": dx, "da": da[shard], "db": db[:, shard]}
            for (name, uncut_shard), answer in zip(expected.items(), (output, *gradients), strict=True):
                if answer.shape != uncut_shard.shape:
                    raise CheckFailed(
                        f"rank {rank} of {ranks}: {name} has the shape {tuple(answer.shape)}, not {tuple(uncut_shard.shape)}"
                    )
                if (difference := (answer - uncut_shard).abs().max().item()) > 1e-12:
                    raise CheckFailed(f"rank {rank} of {ranks}: {name} is off by {difference:.3g}: is it a partial sum?")
            if max(counts) > 1:
                raise CheckFailed(f"forward calls {counts[0]} all-reduces and backward {counts[1]}: one each is enough")
    return CheckPassed("y and all gradients are those of one process, with one all-reduce in each direction")


def make_tensors() -> list[Tensor]:
    """Return x, A, B and dy, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 4), (8, 4), (4, 8), (5, 4))]


def _run_layers(answers: Any) -> Any:
    """Run the learner's functions on this rank. Return y, the gradients, and the numbers of all-reduces."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, a, b, dy = make_tensors()
    a, b = a.chunk(ranks)[rank].clone(), b.chunk(ranks, 1)[rank].clone()
    calls.clear()
    y = require_answer(answers.forward(x, a, b), "forward()")
    num_forward_calls = len(calls)
    gradients = require_answer(answers.backward(dy, x, a, b), "backward()")
    return y, tuple(gradients), (num_forward_calls, len(calls) - num_forward_calls)
