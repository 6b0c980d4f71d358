"""What a step calls, beyond its stages and loss: counted, since times differ between machines."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps


class Multiplication(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        return hidden * self.weight


def make_step(microbatches, loss_fn=nn.functional.mse_loss, **options):
    """Return a pipeline of one trivial stage, and a function that runs a step of it."""
    torch.manual_seed(0)
    pipe = ps.Pipeline([Multiplication()], loss_fn, "1f1b", microbatches, topology=ps.Topology(), **options)
    inputs, target = torch.randn(2 * microbatches, 16), torch.randn(2 * microbatches, 16)
    return pipe, lambda **arguments: pipe.step(inputs, target=target, **arguments)


def count_python_calls(step) -> int:
    counter = Counter()
    sys.setprofile(lambda frame, event, argument: counter.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    return counter["call"]


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counter[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_a_kind_that_ran_before_makes_few_calls():
    calls = {}
    for microbatches in (1, 9):
        _, step = make_step(microbatches)
        for _ in range(3):
            step()
        calls[microbatches] = count_python_calls(step)
    each = (calls[9] - calls[1]) / 8
    assert each <= 55  # of a forward and a backward; 9 of them are torch's
    assert calls[1] - each <= 235


def test_a_step_of_a_kind_that_ran_before_fills_no_seed_and_one_loss():
    _, step = make_step(4)
    for _ in range(3):
        step()
    with Operations() as operations:
        step()
    assert operations.counter["aten.full_like.default"] == 0
    assert operations.counter["aten.full.default"] == 1  # the step's loss


def test_each_scale_has_its_seed():
    pipe, step = make_step(2)
    [weight] = pipe.parameters()
    gradients = []
    for scale in (1.0, 0.5, 1.0, 2.0):
        weight.grad = None
        step(scale=scale)
        gradients.append(weight.grad.clone())
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[0] / 2, gradients[1])
    assert torch.equal(gradients[0] * 2, gradients[3])


@pytest.mark.filterwarnings("ignore:loss_fn of")
def test_a_hook_that_changes_the_gradient_of_a_loss_in_place_changes_that_of_no_other():
    changes = []

    def loss_fn(output, target):
        loss = nn.functional.mse_loss(output, target)
        if changes and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient.mul_(changes.pop()))
        return loss

    pipe, step = make_step(1, loss_fn)
    [weight] = pipe.parameters()
    step()
    expected = weight.grad.clone()
    weight.grad = None
    changes.append(4.0)  # exact
    step()
    assert torch.equal(weight.grad, expected * 4)
    weight.grad = None
    step()
    assert torch.equal(weight.grad, expected)
