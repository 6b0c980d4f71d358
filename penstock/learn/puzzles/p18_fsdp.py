"""FSDP by hand.

Replicas each hold all weights: P times the memory for the same numbers. Instead each of P ranks keeps a P-th of a weight,
and its gradient and Adam's averages for that. Before the layer runs the ranks gather it; after that they let it go; after
the backward they sum the gradients, each keeping its own part: a reduce-scatter.

Write `step(shard, x, dy)` for y = x Wt, each rank with rows of its own: `shard` is (N / P, K), this rank's rows of W.
`gather(shard)` returns all ranks' shards, joined; `reduce_scatter(tensor)` sums over ranks and returns this rank's part of
the rows. Return (y, gradient of the shard): the mean over the ranks, as for replicas.

Target: y and gradients as of one process with all rows, to 1e-12; one gather and one reduce-scatter; the whole weight is
gone when `step` returns.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.judge import Missed, Passed, on_ranks, written, yours
from penstock.learn.puzzles.tools import called, gather, gathered, reduce_scatter


@yours
def step(shard: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(N / P, K), (rows, K), (rows, N) -> y (rows, N) and the gradient of the shard (N / P, K)."""
    weight = gather(shard)
    y = x @ weight.t()
    del weight
    ranks = len(dy[0]) // len(shard)
    return y, reduce_scatter(dy.t() @ x) / ranks


HINTS = (
    "dW = dyt x needs no weight: it can be let go right after the forward here. (dx = dy W would need it again.)",
    "reduce_scatter sums; the mean over P replicas is that over P.",
)
EXPLANATION = """Gather, compute, free; reduce-scatter, update. It moves half as much again as a plain all-reduce of
gradients, and holds a P-th. In a pipeline one gathers a stage's weights once a step, not once for each microbatch.
`Pipeline(.., data_parallel="fsdp")`."""


def check(answers: Any) -> Passed:
    """Beside one process."""
    for ranks in (2, 4):
        weight, x, dy = problem(ranks)
        full_gradient = dy.t() @ x / ranks
        for rank, (y, gradient, calls, is_held) in enumerate(on_ranks(_on_rank, ranks, answers)):
            rows = slice(rank * 3, rank * 3 + 3)
            if y.shape != (3, 8) or (y - (x @ weight.t())[rows]).abs().max() > 1e-12:
                raise Missed(f"rank {rank} of {ranks}: y is not x Wt of the whole weight")
            shard = full_gradient.chunk(ranks)[rank]
            if gradient.shape != shard.shape:
                raise Missed(f"rank {rank} of {ranks}: the gradient is {tuple(gradient.shape)}, the shard {tuple(shard.shape)}")
            if (gradient - shard).abs().max() > 1e-12:
                ratio = (gradient.norm() / shard.norm()).item()
                raise Missed(f"rank {rank} of {ranks}: the gradient is off; its norm is {ratio:.3g} times the mean's")
            if calls != ["gather", "reduce_scatter"]:
                raise Missed(
                    f"rank {rank} of {ranks} calls {', '.join(calls) or 'nothing'}: one gather, then one reduce-scatter"
                )
            if is_held:
                raise Missed(f"rank {rank} of {ranks} still holds the whole weight when step returns")
    return Passed("the numbers of one process, with a P-th of the weight on each rank")


def problem(ranks: int) -> list[Tensor]:
    """W, all rows of x and of dy, the same in every process."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((8, 5), (3 * ranks, 5), (3 * ranks, 8))]


def _on_rank(answers: Any) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight, x, dy = problem(ranks)
    called.clear()
    y, gradient = written(
        answers.step(weight.chunk(ranks)[rank].clone(), x.chunk(ranks)[rank], dy.chunk(ranks)[rank]), "step()"
    )
    return y.clone(), gradient, [call_name for call_name, _ in called], any(reference() is not None for reference in gathered)
