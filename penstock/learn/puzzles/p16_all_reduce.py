"""All-reduce, from sends and receives.

Every rank has a tensor; in the end every rank is to have the sum of all. If each sends its whole to every other, (P-1) n
numbers leave each rank. In a ring 2 (P-1)/P n will do: first each piece goes around once and is added up on its way, then
each sum goes around once.

Write `all_reduce(tensor, rank, ranks)`: returns the sum, on every rank. `swap(piece)` sends `piece` to the next rank and
returns what the one before sends, in one. Pieces that meet must have the same number of elements; `tensor` has a multiple
of `ranks`.

Target: the sum, with 2 (P-1) swaps of n/P numbers each on every rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.judge import Missed, Passed, on_ranks, written, yours
from penstock.learn.puzzles.tools import called, swap


@yours
def all_reduce(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The sum of all ranks' tensors."""
    pieces = list(tensor.clone().chunk(ranks))
    for turn in range(ranks - 1):
        received = swap(pieces[(rank - turn) % ranks])
        pieces[(rank - turn - 1) % ranks] = pieces[(rank - turn - 1) % ranks] + received
    for turn in range(ranks - 1):
        pieces[(rank - turn) % ranks] = swap(pieces[(rank - turn + 1) % ranks])
    return torch.cat(pieces)


HINTS = (
    "Cut the tensor into P pieces. In turn t rank r sends piece r - t and adds what it gets to piece r - t - 1.",
    "After P-1 turns rank r has the whole sum of piece r + 1. Send that around P-1 times, without adding.",
)
EXPLANATION = """The first half is a reduce-scatter, the second an all-gather: an all-reduce is the two together, and FSDP
uses them apart. Each rank sends 2 (P-1)/P n numbers whatever P is, which is the least there is; the price is 2 (P-1)
messages, one after the other."""


def check(answers: Any) -> Passed:
    """The sums, and what was sent."""
    for ranks in (2, 3, 4):
        count = 12 * ranks
        for rank, (answer, sent_counts) in enumerate(on_ranks(_on_rank, ranks, answers, count)):
            expected = torch.arange(count, dtype=torch.float64) * ranks + sum(1000.0 * index for index in range(ranks))
            if not torch.equal(written(answer, "all_reduce()").double(), expected):
                difference = f"the first numbers are {answer[:3].tolist()}, not {expected[:3].tolist()}"
                raise Missed(f"rank {rank} of {ranks} has not the sum: {difference}")
            fewest = 2 * (ranks - 1) * count // ranks
            if sum(sent_counts) > fewest:
                raise Missed(
                    f"rank {rank} of {ranks} sends {sum(sent_counts)} numbers of a tensor of {count}, the target is {fewest}"
                )
    return Passed("the sum on every rank of 2, 3 and 4, with 2 (P-1)/P of the tensor sent")


def _on_rank(answers: Any, count: int) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    called.clear()
    answer = answers.all_reduce(torch.arange(count, dtype=torch.float64) + 1000 * rank, rank, ranks)
    return answer, [numbers for _, numbers in called]
