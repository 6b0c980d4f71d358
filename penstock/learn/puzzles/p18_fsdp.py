"""FSDP by hand.

Replicas each hold all weights: P times the memory for the same numbers. Instead, each of P ranks keeps a P-th of a weight, with
its gradient and Adam's averages. Before the layer runs, the ranks gather the weight; afterwards they free it. After the
backward they sum the gradients, and each keeps its own shard: a reduce-scatter.

Write `step(shard, x, dy)` for y = x Wt, where each rank has its own rows of x and dy: `shard` is (N / P, K), this rank's rows
of W. `gather(shard)` returns all ranks' shards, joined; `reduce_scatter(tensor)` sums over the ranks and returns this rank's
rows of the sum. Return (y, gradient of the shard); the gradient is the mean over the ranks, as for replicas.

Target: y and gradients of one process with all rows, to 1e-12; one gather and one reduce-scatter; the whole weight is freed
when `step` returns.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, run_on_ranks, solution
from penstock.learn.puzzles.tools import calls, gather, gathered_weights, reduce_scatter


@solution
def step(shard: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return y, (rows, N), and the gradient of the shard, (N / P, K), from (N / P, K), (rows, K), (rows, N)."""
    weight = gather(shard)
    y = x @ weight.t()
    del weight
    ranks = len(dy[0]) // len(shard)
    return y, reduce_scatter(dy.t() @ x) / ranks


HINTS = (
    "dW = dyt x does not need the weight, so you can free it right after the forward. (dx = dy W would need it again.)",
    "reduce_scatter sums; the mean over P replicas is the sum over P.",
)
EXPLANATION = """Gather, compute, free; reduce-scatter, update. It sends one and a half times as much as a plain all-reduce
of gradients, and holds a P-th. In a pipeline a stage's weights are gathered once a step, not once for each microbatch.
`Pipeline(.., data_parallel="fsdp")` does this."""


def check(answers: Any) -> CheckPassed:
    """Compare with one process on 2 and 4 ranks. Raises CheckFailed."""
    for ranks in (2, 4):
        weight, x, dy = make_tensors(ranks)
        full_gradient = dy.t() @ x / ranks
        for rank, (y, gradient, call_names, is_held) in enumerate(run_on_ranks(_run_step, ranks, answers)):
            rows = slice(rank * 3, rank * 3 + 3)
            if y.shape != (3, 8) or (y - (x @ weight.t())[rows]).abs().max() > 1e-12:
                raise CheckFailed(f"rank {rank} of {ranks}: y is not x Wt of the whole weight")
            shard = full_gradient.chunk(ranks)[rank]
            if gradient.shape != shard.shape:
                shapes = f"{tuple(gradient.shape)}, the shard {tuple(shard.shape)}"
                raise CheckFailed(f"rank {rank} of {ranks}: the gradient is {shapes}")
            if (gradient - shard).abs().max() > 1e-12:
                ratio = (gradient.norm() / shard.norm()).item()
                raise CheckFailed(f"rank {rank} of {ranks}: the gradient is off; its norm is {ratio:.3g} times the mean's")
            if call_names != ["gather", "reduce_scatter"]:
                wrong_calls = ", ".join(call_names) or "nothing"
                raise CheckFailed(f"rank {rank} of {ranks} calls {wrong_calls}: call gather once, then reduce_scatter once")
            if is_held:
                raise CheckFailed(f"rank {rank} of {ranks} still holds the whole weight when step returns")
    return CheckPassed("the numbers of one process, with a P-th of the weight on each rank")


def make_tensors(ranks: int) -> list[Tensor]:
    """Return W, and all rows of x and dy, the same in every process."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((8, 5), (3 * ranks, 5), (3 * ranks, 8))]


def _run_step(answers: Any) -> Any:
    """Run the learner's step on this rank. Return y, the gradient, the calls, and whether the weight is still held."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight, x, dy = make_tensors(ranks)
    calls.clear()
    y, gradient = require_answer(
        answers.step(weight.chunk(ranks)[rank].clone(), x.chunk(ranks)[rank], dy.chunk(ranks)[rank]), "step()"
    )
    is_held = any(reference() is not None for reference in gathered_weights)
    return y.clone(), gradient, [name for name, _ in calls], is_held
