"""All-reduce, from sends and receives.

Every rank has a tensor of n elements, and every rank needs the sum of all. If each rank sends its whole tensor to every other
rank, it sends (P-1) n elements. In a ring 2 (P-1)/P n are enough: first each piece goes around once and is summed on its way,
then each sum goes around once.

Write `all_reduce(tensor, rank, ranks)`: return the sum, on every rank. `swap(piece)` sends `piece` to the next rank of the
ring and returns the previous rank's piece. All pieces of a swap must have the same size. n is a multiple of `ranks`.

Target: the sum, with 2 (P-1) swaps of n/P elements on every rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, run_on_ranks, solution
from penstock.learn.puzzles.tools import calls, swap


@solution
def all_reduce(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the sum of all ranks' tensors."""
    pieces = list(tensor.clone().chunk(ranks))
    for step in range(ranks - 1):
        received = swap(pieces[(rank - step) % ranks])
        pieces[(rank - step - 1) % ranks] = pieces[(rank - step - 1) % ranks] + received
    for step in range(ranks - 1):
        pieces[(rank - step) % ranks] = swap(pieces[(rank - step + 1) % ranks])
    return torch.cat(pieces)


HINTS = (
    "Cut the tensor into P pieces. In step t rank r sends piece r - t, and adds what it receives to piece r - t - 1.",
    "After P-1 steps rank r has the whole sum of piece r + 1. Send the sums around in P-1 more steps, without adding.",
)
EXPLANATION = """The first half is a reduce-scatter, the second an all-gather: together they are an all-reduce, and FSDP uses
them separately. Each rank sends 2 (P-1)/P n elements: the minimum, and less than 2 n for any P. The price is 2 (P-1)
messages one after the other."""


def check(answers: Any) -> CheckPassed:
    """Check the sums and how many elements were sent, on 2 to 4 ranks. Raises CheckFailed."""
    for ranks in (2, 3, 4):
        count = 12 * ranks
        for rank, (answer, sent_counts) in enumerate(run_on_ranks(_run_all_reduce, ranks, answers, count)):
            expected = torch.arange(count, dtype=torch.float64) * ranks + sum(1000.0 * index for index in range(ranks))
            if not torch.equal(require_answer(answer, "all_reduce()").double(), expected):
                difference = f"the first numbers are {answer[:3].tolist()}, not {expected[:3].tolist()}"
                raise CheckFailed(f"rank {rank} of {ranks} does not have the sum: {difference}")
            fewest = 2 * (ranks - 1) * count // ranks
            if sum(sent_counts) > fewest:
                raise CheckFailed(
                    f"rank {rank} of {ranks} sends {sum(sent_counts)} elements for a tensor of {count}, the target is {fewest}"
                )
    return CheckPassed("the sum on all of 2, 3 and 4 ranks, with 2 (P-1)/P of the tensor sent")


def _run_all_reduce(answers: Any, count: int) -> Any:
    """Run the learner's all_reduce on this rank. Return its result and the elements of each swap."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    calls.clear()
    answer = answers.all_reduce(torch.arange(count, dtype=torch.float64) + 1000 * rank, rank, ranks)
    return answer, [elements for _, elements in calls]
