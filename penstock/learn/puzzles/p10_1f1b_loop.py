"""1F1B's loop, with sends that do not wait.

In 1F1B two neighbours send to each other at the same time: an output goes down while a gradient comes up. If both wait for
their sends, neither gets to its receive. So sends must not wait. But a message may be lost if you drop the handle of a send
before it has finished, or change its tensor.

Write `step(..)` as in puzzle 6, in the order of 1F1B: rank r runs min(P-1-r, M) forwards ahead, then alternates a forward (if
one is left) and a backward. `start_send(tensor, to)` returns a handle at once; `handle.wait()` waits for the send. Wait for
all handles at the end of the step.

Target: the bits of one process, on 2 and 4 ranks, and never more than P-r microbatches held on rank r.
"""

import os
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, run_on_ranks, solution
from penstock.learn.puzzles.p04_naive import compare_with_one_process, model_and_batch
from penstock.learn.puzzles.tools import receive, start_send


@solution
def step(rank: int, ranks: int, microbatches: int, stage: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Run forward and backward of one batch. Return its loss on the last rank."""
    pieces, targets = inputs.tensor_split(microbatches), target.tensor_split(microbatches)
    shares = [len(piece) / len(inputs) for piece in pieces]
    activations, handles, total = deque[tuple[Tensor, Tensor]](), [], torch.zeros(())

    def forward(m: int) -> Tensor:
        """Run and send the forward of microbatch `m`. Return its share of the loss on the last rank, else 0."""
        value = pieces[m] if rank == 0 else receive(pieces[m].shape, source=rank - 1).requires_grad_()
        output = stage(value)
        if rank < ranks - 1:
            handles.append((message := output.detach(), start_send(message, to=rank + 1)))
        else:
            output = loss_fn(output, targets[m])
        activations.append((value, output))
        return output.detach() * shares[m] if rank == ranks - 1 else torch.zeros(())

    warmup = min(ranks - 1 - rank, microbatches)
    for m in range(warmup):
        total = total + forward(m)
    for m in range(microbatches):
        if warmup + m < microbatches:
            total = total + forward(warmup + m)
        value, output = activations.popleft()
        gradient = receive(output.shape, source=rank + 1) if rank < ranks - 1 else torch.full_like(output, shares[m])
        output.backward(gradient)
        if rank > 0:
            handles.append((value.grad, start_send(value.grad, to=rank - 1)))
        del value, output  # frees the activations of the layers too
    for _, handle in handles:
        handle.wait()
    return total


HINTS = (
    "The backward of microbatch m needs the activations of the oldest forward: use a queue.",
    "Store (tensor, handle) of every send in a list, and wait for all at the end.",
    "Drop all references to a microbatch's activations once its backward is done: that is all the memory that 1F1B saves.",
)
EXPLANATION = """A send that does not wait overlaps with the next action, and two neighbours cannot block each other.
Penstock also posts receives ahead, so that a large message travels while the receiver computes. Messages on a channel arrive
in the order of the sender's table; `verify` proves that the receiver's table has the same order."""


def check(answers: Any) -> CheckPassed:
    """Compare with one process, and count the microbatches held. Raises CheckFailed."""
    compare_with_one_process(answers, 2, 4, "")
    result = compare_with_one_process(
        answers, 4, 6, "on 2 and 4 ranks the bits of one process, and at most P-r microbatches held"
    )
    for rank, num_held in enumerate(run_on_ranks(_max_held, 4, answers)):
        if num_held > 4 - rank:
            raise CheckFailed(f"rank {rank} of 4 holds {num_held} microbatches at once, 1F1B holds {4 - rank}")
    return result


class _CountGraphs(torch.autograd.Function):
    """Returns `value`, and counts in [now, at most] how many autograd graphs with this node are alive."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alive: list[int]) -> Tensor:
        """Count this graph until it is freed."""
        alive[0] += 1
        alive[1] = max(alive)
        ctx.token = token = _Token()
        weakref.finalize(token, _count_freed, alive)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None


class _Token:
    """Lives as long as the autograd graph whose node holds it."""


def _count_freed(alive: list[int]) -> None:
    alive[0] -= 1


class _CountingStage(torch.nn.Module):
    """A stage that counts, now and at most, how many of its forwards' graphs are alive."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage, self.alive = stage, [0, 0]

    def forward(self, value: Tensor) -> Tensor:
        """Return the stage's output."""
        return _CountGraphs.apply(self.stage(value), self.alive)


def _max_held(answers: Any) -> int:
    """Return the most microbatches that this rank holds at once in a step of 8."""
    rank = int(os.environ["RANK"])
    stages, inputs, target, loss_fn = model_and_batch(4)
    stage = _CountingStage(stages[rank])
    answers.step(rank, 4, 8, stage, inputs, target, loss_fn)
    return stage.alive[1]
