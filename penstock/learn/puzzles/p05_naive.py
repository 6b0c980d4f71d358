"""The naive loop, on two ranks.

Rank 0 has the first half of a model, rank 1 the second. Rank 0 computes, hands its output over, and waits; rank 1 computes
the loss, runs its backward, and hands the gradient of what it was given back; rank 0 goes on with its own backward.

Write `step(rank, half, inputs, target, loss_fn)`. Both ranks are given the batch; `half` is the rank's own. Use
`send(tensor, to)` and `receive(shape, source)`, which wait. What goes in and out of `half` has the shape of `inputs`.
Return the loss on rank 1, anything on rank 0; gradients are left in the parameters.

Target: loss and all gradients have the bits of one process.
"""

from typing import Any

from torch import Tensor

from penstock.learn.puzzles.judge import Missed, Passed, equal, on_ranks, written, yours
from penstock.learn.puzzles.tools import receive, send


@yours
def step(rank: int, half: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Forward and backward of one batch."""
    if rank == 0:
        output = half(inputs)
        send(output, to=1)
        output.backward(receive(output.shape, source=1))
        return output
    handed = receive(inputs.shape, source=0).requires_grad_()
    loss = loss_fn(half(handed), target)
    loss.backward()
    send(handed.grad, to=0)
    return loss


HINTS = (
    "A message has no history: what rank 1 receives is a leaf. Have it ask for a gradient: requires_grad_().",
    "After loss.backward() on rank 1 the gradient is in the received tensor's .grad. On rank 0, "
    "output.backward(gradient) goes on with it.",
)
EXPLANATION = """The chain rule goes on where it stopped: `output.backward(gradient)` begins in the middle of the model.
Only one rank works at any time, so P ranks are as slow as one, and slower by the messages: the bubble is (P-1)/P.
Microbatches are the cure (puzzle 6)."""


def check(answers: Any) -> Passed:
    """Beside one process."""
    return beside_one_process(answers, 2, 1, "loss and gradients have the bits of one process")


def beside_one_process(answers: Any, ranks: int, microbatches: int, fact: str) -> Passed:
    """Run the learner's `step` on ranks with a part of the model each, and compare. Raises Missed."""
    import torch

    parts, inputs, target, loss_fn = problem(ranks)
    uncut = torch.nn.Sequential(*parts)
    total = torch.zeros(())
    for rows, labels in zip(inputs.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        loss, share = loss_fn(uncut(rows), labels), len(rows) / len(inputs)
        loss.backward(torch.full_like(loss, share))
        total = total + loss.detach() * share
    results = on_ranks(_on_rank, ranks, answers, ranks, microbatches)
    equal("the loss", written(results[-1][0], "step()"), total if microbatches > 1 else loss.detach())
    for rank, (_, gradients) in enumerate(results):
        for (name, parameter), gradient in zip(parts[rank].named_parameters(), gradients, strict=True):
            assert parameter.grad is not None
            if gradient is None:
                raise Missed(f"rank {rank}: {name} has no gradient")
            equal(f"rank {rank}: the gradient of {name}", gradient, parameter.grad)
    return Passed(fact)


def problem(ranks: int) -> Any:
    """A model in parts, a batch, and a loss."""
    import torch

    torch.manual_seed(5)
    parts = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(ranks)]
    inputs, target = torch.randn(2, 10, 8).unbind()
    return parts, inputs, target, torch.nn.functional.mse_loss


def _on_rank(answers: Any, ranks: int, microbatches: int) -> Any:
    import os

    rank = int(os.environ["RANK"])
    parts, inputs, target, loss_fn = problem(ranks)
    more = () if microbatches == 1 else (ranks, microbatches)
    loss = answers.step(rank, *more, parts[rank], inputs, target, loss_fn)
    loss = loss.detach() if isinstance(loss, Tensor) and rank == ranks - 1 else None
    return loss, [parameter.grad for parameter in parts[rank].parameters()]
