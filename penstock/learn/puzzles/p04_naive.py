"""The naive loop, on two ranks.

Rank 0 has the first half of a model, rank 1 the second half. Rank 0 computes, sends its output, and waits. Rank 1 computes
the loss, runs its backward, and sends back the gradient of its input. Then rank 0 runs its own backward.

Write `step(rank, half, inputs, target, loss_fn)`. Both ranks get the batch; `half` is the rank's half. Use
`send(tensor, to)` and `receive(shape, source)`, which wait. Inputs and outputs of `half` have the shape of `inputs`.
Return the loss on rank 1 and anything on rank 0. Leave the gradients in the parameters' `.grad`.

Target: loss and all gradients have the bits of one process.
"""

from typing import Any

from torch import Tensor

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, check_equal, require_answer, run_on_ranks, solution
from penstock.learn.puzzles.tools import receive, send


@solution
def step(rank: int, half: Any, inputs: Tensor, target: Tensor, loss_fn: Any) -> Tensor:
    """Run forward and backward of one batch. Return the loss on rank 1."""
    if rank == 0:
        output = half(inputs)
        send(output, to=1)
        output.backward(receive(output.shape, source=1))
        return output
    hidden = receive(inputs.shape, source=0).requires_grad_()
    loss = loss_fn(half(hidden), target)
    loss.backward()
    send(hidden.grad, to=0)
    return loss


HINTS = (
    "A received tensor has no autograd history: it is a leaf. On rank 1 call requires_grad_() on it before using it.",
    "After loss.backward() on rank 1, the received tensor's .grad is the gradient to send. On rank 0, "
    "output.backward(gradient) continues with it.",
)
EXPLANATION = """`output.backward(gradient)` begins in the middle of the model, so the chain rule continues on another rank.
Only one rank works at a time, so P ranks are as slow as one, plus the messages: the bubble is (P-1)/P. Microbatches fix this
(puzzle 6)."""


def check(answers: Any) -> CheckPassed:
    """Compare the learner's step with one process. Raises CheckFailed."""
    return compare_with_one_process(answers, 2, 1, "loss and gradients have the bits of one process")


def compare_with_one_process(answers: Any, ranks: int, microbatches: int, passed_text: str) -> CheckPassed:
    """Run the learner's `step` on ranks and compare loss and gradients with one process. Raises CheckFailed."""
    import torch

    stages, inputs, target, loss_fn = model_and_batch(ranks)
    uncut = torch.nn.Sequential(*stages)
    total = torch.zeros(())
    for rows, labels in zip(inputs.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        loss, share = loss_fn(uncut(rows), labels), len(rows) / len(inputs)
        loss.backward(torch.full_like(loss, share))
        total = total + loss.detach() * share
    results = run_on_ranks(_run_step, ranks, answers, ranks, microbatches)
    check_equal("the loss", require_answer(results[-1][0], "step()"), total if microbatches > 1 else loss.detach())
    for rank, (_, gradients) in enumerate(results):
        for (name, parameter), gradient in zip(stages[rank].named_parameters(), gradients, strict=True):
            assert parameter.grad is not None
            if gradient is None:
                raise CheckFailed(f"rank {rank}: {name} has no gradient")
            check_equal(f"rank {rank}: the gradient of {name}", gradient, parameter.grad)
    return CheckPassed(passed_text)


def model_and_batch(ranks: int) -> Any:
    """Return a model as one stage for each rank, inputs, target (10 rows each), and the loss function."""
    import torch

    torch.manual_seed(5)
    stages = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(ranks)]
    inputs, target = torch.randn(2, 10, 8).unbind()
    return stages, inputs, target, torch.nn.functional.mse_loss


def _run_step(answers: Any, ranks: int, microbatches: int) -> Any:
    """Run the learner's step on this rank. Return the loss (None but on the last rank) and the gradients."""
    import os

    rank = int(os.environ["RANK"])
    stages, inputs, target, loss_fn = model_and_batch(ranks)
    sizes = () if microbatches == 1 else (ranks, microbatches)
    loss = answers.step(rank, *sizes, stages[rank], inputs, target, loss_fn)
    loss = loss.detach() if isinstance(loss, Tensor) and rank == ranks - 1 else None
    return loss, [parameter.grad for parameter in stages[rank].parameters()]
