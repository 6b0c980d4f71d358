"""GPipe's loop, on any number of ranks.

Cut the batch into microbatches and send them through the ranks one after the other. Every rank runs all its forwards, then
all its backwards in the same order. While rank 1 works on microbatch 0, rank 0 works on microbatch 1.

Write `step(rank, ranks, microbatches, stage, inputs, target, loss_fn)`. Split inputs and target with
`tensor_split(microbatches)`: microbatches may differ by a row, and each is weighted by its rows. Inputs and outputs of a
stage have the shape of its microbatch. Return the loss of the whole batch on the last rank.

Target: loss and all gradients have the bits of one process that runs the same microbatches.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.check_helpers import CheckPassed, solution
from penstock.learn.puzzles.p04_naive import compare_with_one_process
from penstock.learn.puzzles.tools import receive, send


@solution
def step(rank: int, ranks: int, microbatches: int, stage: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Run forward and backward of one batch. Return its loss on the last rank."""
    pieces, targets = inputs.tensor_split(microbatches), target.tensor_split(microbatches)
    shares = [len(piece) / len(inputs) for piece in pieces]
    activations, total = [], torch.zeros(())
    for m, piece in enumerate(pieces):
        value = piece if rank == 0 else receive(piece.shape, source=rank - 1).requires_grad_()
        output = stage(value)
        if rank < ranks - 1:
            send(output, to=rank + 1)
        else:
            output = loss_fn(output, targets[m])
            total = total + output.detach() * shares[m]
        activations.append((value, output))
    for m, (value, output) in enumerate(activations):
        gradient = receive(output.shape, source=rank + 1) if rank < ranks - 1 else torch.full_like(output, shares[m])
        output.backward(gradient)
        if rank > 0:
            send(value.grad, to=rank - 1)
    return total


HINTS = (
    "Store each microbatch's stage input and output until its backward.",
    "A microbatch's weight in the loss is its share of the batch's rows. Scale once, where the backward begins: "
    "loss.backward(share).",
    "Run the backwards in the order of the microbatches: sums of floating-point numbers depend on their order.",
)
EXPLANATION = """The gradient of the batch is the sum of its microbatches' gradients, weighted by their rows. Autograd adds
them up in .grad, and the same additions in the same order give the same bits. After the forwards all M microbatches are in
flight: 1F1B changes that (puzzle 9)."""


def check(answers: Any) -> CheckPassed:
    """Compare with one process on 2 and 3 ranks, with microbatches of 2 and 3 rows. Raises CheckFailed."""
    compare_with_one_process(answers, 2, 4, "")
    return compare_with_one_process(answers, 3, 4, "on 2 and 3 ranks loss and gradients have the bits of one process")
