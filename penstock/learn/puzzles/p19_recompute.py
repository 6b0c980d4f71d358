"""Recompute instead of storing.

A stage of many layers stores the activations that the layers need for their backward. Instead it can store only its input, and
run its forward again when the backward comes: a third more compute, for a fraction of the memory.

Write `forward(stage, x)`: return (output, kept), the output without autograd history and what the backward needs. Write
`backward(stage, kept, dy)`: return dx, and leave the parameters' gradients in .grad. Dropout must drop the same elements
again: store the state of the random generator (`torch.get_rng_state`, `torch.set_rng_state`).

Target: output and gradients have the bits of a stage that stores everything. `kept` has the input and the generator's state,
and no more. Afterwards the generator continues as if nothing had run twice.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, check_equal, require_answer, solution


@solution
def forward(stage: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return the output, and what the backward needs."""
    kept = x, torch.get_rng_state()
    with torch.no_grad():
        return stage(x), kept


@solution
def backward(stage: Any, kept: Any, dy: Tensor) -> Tensor:
    """Return the gradient of the input."""
    x, state = kept
    current_state = torch.get_rng_state()
    torch.set_rng_state(state)
    leaf = x.detach().requires_grad_()
    stage(leaf).backward(dy)
    torch.set_rng_state(current_state)
    return leaf.grad


HINTS = (
    "Under no_grad() the forward stores nothing. In the backward run the stage again, with autograd, and call .backward(dy).",
    "Restore the generator's state before the second forward. After the backward set it back to what it was.",
)
EXPLANATION = """This is activation checkpointing: `Pipeline(.., recompute="stage")` keeps a stage's input, `"block"` the
input of every layer. What it saves depends on the schedule: in 1F1B the first rank holds P microbatches and saves most, the
last holds one."""


def check(answers: Any) -> CheckPassed:
    """Compare with a stage that stores its activations. Raises CheckFailed."""
    torch.manual_seed(8)
    stage = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    x, dy = torch.randn(2, 7, 6).unbind()
    state = torch.get_rng_state()
    leaf = x.clone().requires_grad_()
    output = stage(leaf)
    output.backward(dy)
    random_state, parameter_gradients = torch.get_rng_state(), [parameter.grad for parameter in stage.parameters()]
    stage.zero_grad()
    torch.set_rng_state(state)
    answer, kept = require_answer(answers.forward(stage, x), "forward()")
    if answer.requires_grad:
        raise CheckFailed("forward keeps the autograd history of its output, and with it all activations of the layers")
    tensors = [value for value in (kept if isinstance(kept, tuple | list) else [kept]) if isinstance(value, Tensor)]
    num_elements = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    if num_elements > x.numel():
        raise CheckFailed(f"forward keeps {num_elements} elements, the input has {x.numel()}")
    torch.randn(3)  # other microbatches draw random numbers meanwhile
    state_before_backward = torch.get_rng_state()
    dx = require_answer(answers.backward(stage, kept, dy), "backward()")
    check_equal("the output", answer, output.detach())
    for name, gradient, uncut_gradient in zip(
        ["dx", *dict(stage.named_parameters())],
        [dx, *[p.grad for p in stage.parameters()]],
        [leaf.grad, *parameter_gradients],
        strict=True,
    ):
        assert uncut_gradient is not None
        check_equal(name, gradient, uncut_gradient)
    if not torch.equal(torch.get_rng_state(), state_before_backward):
        raise CheckFailed("the backward changes the generator's state: the next random numbers differ")
    torch.set_rng_state(random_state)
    return CheckPassed("the bits of a stage that stores everything, and only the input is kept")
