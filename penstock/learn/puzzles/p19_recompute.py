"""Recompute instead of remember.

A stage of many layers keeps what each layer needs for its backward. It can keep its input alone, and compute the rest once
more when the backward comes: a third more work, for a fraction of the memory.

Write `forward(stage, x)`, which returns (output, kept): the output without history, and what the backward needs; and
`backward(stage, kept, dy)`, which returns dx and leaves the parameters' gradients in .grad. Dropout must drop the same
again: keep the generator's state (`torch.get_rng_state`, `torch.set_rng_state`).

Target: output and gradients have the bits of a stage that remembers; kept are the input and the generator's state, no more;
and the generator goes on afterwards as if nothing had been computed twice.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.learn.puzzles.judge import Missed, Passed, equal, written, yours


@yours
def forward(stage: Any, x: Tensor) -> tuple[Tensor, Any]:
    """The output, and what the backward needs."""
    kept = x, torch.get_rng_state()
    with torch.no_grad():
        return stage(x), kept


@yours
def backward(stage: Any, kept: Any, dy: Tensor) -> Tensor:
    """The gradient of the input."""
    x, state = kept
    current_state = torch.get_rng_state()
    torch.set_rng_state(state)
    leaf = x.detach().requires_grad_()
    stage(leaf).backward(dy)
    torch.set_rng_state(current_state)
    return leaf.grad


HINTS = (
    "no_grad() in the forward keeps nothing. In the backward run the stage again, with history, and call .backward(dy).",
    "Set the generator back before the second forward, and put it where it was after the backward.",
)
EXPLANATION = """This is activation checkpointing: `Pipeline(.., recompute="stage")` keeps a stage's input, `"block"` every
layer's. Whether it pays depends on the schedule: in 1F1B the first rank holds P microbatches and gains most, the last holds
one."""


def check(answers: Any) -> Passed:
    """Beside a stage that remembers."""
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
    answer, kept = written(answers.forward(stage, x), "forward()")
    if answer.requires_grad:
        raise Missed("forward keeps the history of its output, and with it all that the layers remember")
    tensors = [value for value in (kept if isinstance(kept, tuple | list) else [kept]) if isinstance(value, Tensor)]
    numbers = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    if numbers > x.numel():
        raise Missed(f"forward keeps {numbers} numbers, the input has {x.numel()}")
    torch.randn(3)  # others draw meanwhile
    state_before_backward = torch.get_rng_state()
    dx = written(answers.backward(stage, kept, dy), "backward()")
    equal("the output", answer, output.detach())
    for name, gradient, uncut_gradient in zip(
        ["dx", *dict(stage.named_parameters())],
        [dx, *[p.grad for p in stage.parameters()]],
        [leaf.grad, *parameter_gradients],
        strict=True,
    ):
        assert uncut_gradient is not None
        equal(name, gradient, uncut_gradient)
    if not torch.equal(torch.get_rng_state(), state_before_backward):
        raise Missed("the generator is not where it was before the backward: what is drawn next differs")
    torch.set_rng_state(random_state)
    return Passed("the bits of a stage that remembers, and only the input is kept")
