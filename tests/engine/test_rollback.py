"""A step that fails leaves the gradients as it found them: none where there were none, the sum so far where there was one."""

import pytest
import torch
from reference import data, gradients, same
from runners import on_ranks
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

DEPTH = 8  # layers: two for each stage of the deepest schedules on two ranks


class FailingBackward(nn.Module):
    """Passes its input on; the backward number `countdown` raises."""

    countdown = 0

    def forward(self, hidden):
        if hidden.requires_grad:
            hidden.register_hook(self.count)
        return hidden

    def count(self, gradient):
        self.countdown -= 1
        if self.countdown == 0:
            raise ValueError("boom")


def model():
    torch.manual_seed(3)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(12, 12), FailingBackward())]
    return nn.Sequential(nn.BatchNorm1d(12), *layers, nn.Linear(12, 3))


def gradients_around_a_failed_step(schedule):
    """Of a step whose fourth backward of one layer raises: those before and after, without and with sums begun before."""
    pipe = ps.Pipeline(model(), nn.functional.cross_entropy, schedule=schedule, microbatches=6)
    faulty = [module for stage in pipe.stages.values() for module in stage.modules() if isinstance(module, FailingBackward)]
    inputs, target = data("mlp", 12)
    results = []
    for accumulates in (False, True):
        pipe.zero_grad()
        if accumulates:
            pipe.step(inputs, target=target)
        before = gradients(pipe.named_parameters())
        faulty[0].countdown = 4 if pipe.topology.rank == 1 else 0
        with pytest.raises(ps.StageError, match="boom"):
            pipe.step(inputs, target=target)
        faulty[0].countdown = 0
        after = gradients(pipe.named_parameters())
        results.append([name for name in before if not same(before[name], after[name])])
    return results


def every_schedule():
    return {name: gradients_around_a_failed_step(name) for name in ps.schedule.names()}


def test_after_a_failed_step_gradients_are_as_before_it_in_every_schedule():
    for result in on_ranks(every_schedule, 2):
        assert result == {name: [[], []] for name in ps.schedule.names()}
