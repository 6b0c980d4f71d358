"""GPipe's loop, on any number of ranks.

Cut the batch into microbatches and let them follow each other: every rank runs all its forwards, then all its backwards, in
the same order. While rank 1 works on microbatch 0, rank 0 works on microbatch 1.

Write `step(rank, ranks, microbatches, stage, inputs, target, loss_fn)`. Split both with `tensor_split(microbatches)`:
pieces may differ by a row, and each weighs as many rows as it has. What goes in and out of a stage has the shape of its
piece. Return the loss of the whole batch on the last rank.

Target: loss and all gradients have the bits of one process that runs the same microbatches.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.judge import Passed, yours
from penstock.learn.puzzles.p05_naive import beside_one_process
from penstock.learn.puzzles.tools import receive, send


@yours
def step(rank: int, ranks: int, microbatches: int, stage: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Forward and backward of one batch."""
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
    "Keep for every microbatch what went into the stage and what came out, until its backward.",
    "A microbatch's share of the loss is its rows over the batch's. Scale once, where the backward begins: "
    "loss.backward(share).",
    "Run the backwards in the order of the microbatches: sums of floating-point numbers depend on their order.",
)
EXPLANATION = """The gradient of the batch is the sum of its microbatches' gradients, weighed by their rows, and autograd
adds them up in .grad. The same additions in the same order make the same bits. All M microbatches are in flight after the
forwards: that is what 1F1B changes (puzzle 9)."""


def check(answers: Any) -> Passed:
    """On 2 and 3 ranks, with pieces that differ."""
    beside_one_process(answers, 2, 4, "")
    return beside_one_process(answers, 3, 4, "on 2 and 3 ranks loss and gradients have the bits of one process")
