"""1F1B's loop, with sends that do not wait.

In 1F1B two neighbours send to each other at the same moment: an output goes down while a gradient comes up. If each waits
for its send, neither comes to its receive. So sends must not wait; but who forgets the handle of a send that is under way,
or changes its tensor, may lose the message.

Write `step(..)` as in puzzle 6, with the order of 1F1B: rank r runs min(P-1-r, M) forwards ahead, then a forward (if one is
left) and a backward in turn. `start_send(tensor, to)` returns a handle at once; `handle.wait()` waits. Give all handles
time until the end of the step.

Target: the bits of one process, on 2 and 4 ranks; and never more than P-r microbatches kept on rank r.
"""

import os
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.judge import Missed, Passed, on_ranks, yours
from penstock.learn.puzzles.p05_naive import beside_one_process, problem
from penstock.learn.puzzles.tools import receive, start_send


@yours
def step(rank: int, ranks: int, microbatches: int, stage: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Forward and backward of one batch."""
    pieces, targets = inputs.tensor_split(microbatches), target.tensor_split(microbatches)
    shares = [len(piece) / len(inputs) for piece in pieces]
    activations, handles, total = deque[tuple[Tensor, Tensor]](), [], torch.zeros(())

    def forward(m: int) -> Tensor:
        """Run a microbatch on this rank and send its output on; return its share of the loss on the last rank, else 0."""
        value = pieces[m] if rank == 0 else receive(pieces[m].shape, source=rank - 1).requires_grad_()
        output = stage(value)
        if rank < ranks - 1:
            handles.append((message := output.detach(), start_send(message, to=rank + 1)))
        else:
            output = loss_fn(output, targets[m])
        activations.append((value, output))
        return output.detach() * shares[m] if rank == ranks - 1 else torch.zeros(())

    ahead = min(ranks - 1 - rank, microbatches)
    for m in range(ahead):
        total = total + forward(m)
    for m in range(microbatches):
        if ahead + m < microbatches:
            total = total + forward(ahead + m)
        value, output = activations.popleft()
        gradient = receive(output.shape, source=rank + 1) if rank < ranks - 1 else torch.full_like(output, shares[m])
        output.backward(gradient)
        if rank > 0:
            handles.append((value.grad, start_send(value.grad, to=rank - 1)))
        del value, output  # and with them what the layers have kept
    for _, handle in handles:
        handle.wait()
    return total


HINTS = (
    "The backward of microbatch m takes what the oldest forward has kept: a queue.",
    "Keep (tensor, handle) of every send in a list, and wait for all at the end.",
    "Let go of what a microbatch has kept as soon as its backward is done: that is all the memory 1F1B saves.",
)
EXPLANATION = """A send that does not wait overlaps with the next action, and no two neighbours stop each other. Penstock
posts receives ahead too, so that a large message travels while the receiver computes. The order of messages on a line is
the order of the sender's table: that both agree on it is what `verify` proves."""


def check(answers: Any) -> Passed:
    """The bits, and how much is kept."""
    beside_one_process(answers, 2, 4, "")
    result = beside_one_process(
        answers, 4, 6, "on 2 and 4 ranks the bits of one process, and no more than P-r microbatches kept"
    )
    for rank, num_kept in enumerate(on_ranks(_kept, 4, answers)):
        if num_kept > 4 - rank:
            raise Missed(f"rank {rank} of 4 keeps {num_kept} microbatches at once, 1F1B keeps {4 - rank}")
    return result


class _Held(torch.autograd.Function):
    """Counts the microbatches whose history is kept."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alive: list[int]) -> Tensor:
        """The same numbers."""
        alive[0] += 1
        alive[1] = max(alive)
        ctx.token = token = _Token()
        weakref.finalize(token, _let_go, alive)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        return gradient, None


class _Token:
    """Lives as long as the history that it is in."""


def _let_go(alive: list[int]) -> None:
    alive[0] -= 1


class _Watched(torch.nn.Module):
    """A stage that counts, now and at most, how many of its forwards are kept."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage, self.alive = stage, [0, 0]

    def forward(self, value: Tensor) -> Tensor:
        """What the stage makes."""
        return _Held.apply(self.stage(value), self.alive)


def _kept(answers: Any) -> int:
    """The most microbatches of which this rank keeps something at once."""
    rank = int(os.environ["RANK"])
    parts, inputs, target, loss_fn = problem(4)
    watched = _Watched(parts[rank])
    answers.step(rank, 4, 8, watched, inputs, target, loss_fn)
    return watched.alive[1]
