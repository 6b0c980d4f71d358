"""A rank that computes wrongly is found by another that computes the same, and named; one that does not is left alone."""

import pytest
import torch
from reference import data
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks


class Flips(nn.Module):
    """Passes its input on; on `rank` with one bit of it, or of its gradient, flipped, `times` times."""

    def __init__(self):
        super().__init__()
        self.rank, self.way, self.times = -1, "", 0

    def forward(self, hidden):
        if self.strikes("forward"):
            return flipped(hidden)
        if hidden.requires_grad:
            return Back.apply(hidden, self)
        return hidden

    def strikes(self, way):
        strikes = self.way == way and self.rank == torch.distributed.get_rank() and self.times > 0
        self.times -= strikes
        return strikes


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, module):
        ctx.module = module
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return flipped(gradient) if ctx.module.strikes("backward") else gradient, None


def flipped(tensor):
    wrong = tensor.detach().clone()
    wrong.view(torch.int32)[0, 0] ^= 1
    return tensor + (wrong - tensor).detach()


def model():
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), Flips(), nn.Dropout(0.2), nn.GELU()) for _ in range(9)]
    return nn.Sequential(*blocks, nn.Linear(12, 3))


def honest(schedule):
    """Steps that are all audited, so that every stage and microbatch has its turn: nothing is found, and bits are the same."""
    pipes = [ps.Pipeline(model(), nn.functional.cross_entropy, schedule, 4, audit_every=every) for every in (1, None)]
    for number in range(pipes[0].schedule.stages * 4):
        inputs, target = data("mlp", 8, seed=number)
        losses = [pipe.step(inputs, target=target) for pipe in pipes]
        assert torch.equal(*losses)
    for (name, one), (_, other) in zip(pipes[0].named_parameters(), pipes[1].named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    return True


def every_schedule():
    return [honest(name) for name in ps.schedule.names()]


def test_an_audit_finds_nothing_where_all_ranks_compute_alike():
    assert all(map(all, ps.launch(every_schedule, 2)))
