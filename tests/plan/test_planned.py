"""Layers measured, planned for, and run: with the bits of one process."""

import time
from dataclasses import replace

import pytest
import torch
from reference import accumulate, assert_same, data, gradients, make, merged
from torch import nn

import penstock as ps
from penstock.plan import Layer, measure, plan

ROWS = 8


class Asleep(nn.Module):
    """A product whose forward, backward and weight's gradient take 2, 4 and 6 ms more."""

    def __init__(self):
        super().__init__()
        self.product = nn.Linear(16, 16, bias=False)
        self.product.weight.register_hook(lambda gradient: time.sleep(0.006))

    def forward(self, hidden):
        time.sleep(0.002)
        hidden = self.product(hidden)
        hidden.register_hook(lambda gradient: time.sleep(0.004))
        return hidden


def test_what_layers_cost_is_measured():
    model = nn.Sequential(Asleep(), nn.ReLU(), Asleep())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure(model, (torch.randn(4, 16),), seconds=0)
    assert [sample.rows for sample in found.samples] == [1, 4]
    assert found.names == ["0", "1", "2"]
    last = found.at(4)[2]
    assert 0.002 <= last.forward < 0.004 <= last.backward_input < 0.006 <= last.backward_weight
    assert (last.activation, last.keep, last.parameters, last.output) == (256, 512, 1024, 256)  # keeps input and gradient for W
    assert found.at(4)[1].activation == 0  # what a ReLU keeps is what the next product keeps
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_counts_to_the_last_layer():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def loss_fn(output, target):
        time.sleep(0.005)
        return nn.functional.mse_loss(output, target)

    first, last = measure(model, (torch.randn(1, 16),), loss_fn=loss_fn, target=torch.randn(1, 16), seconds=0).at(1)
    assert first.forward < 0.005 <= last.forward


def rank_planned(found):
    model, loss_fn = make("gpt")
    inputs, target = data("gpt", ROWS)
    pipe = ps.Pipeline(model, loss_fn, plan=found)
    loss = pipe.step(inputs, target=target)
    return loss, gradients(pipe.named_parameters()), pipe.schedule == found.schedule, pipe.timeline().peak_memory


@pytest.mark.ranks
def test_a_planned_pipeline_has_the_bits_of_one_process():
    model, loss_fn = make("gpt")
    batch = data("gpt", ROWS)
    layers = measure(model, (batch[0][:2],), loss_fn=loss_fn, target=batch[1][:2], seconds=0)
    most = {"batch": ROWS, "microbatches": 4, "effort": "quick", "optimizer": 0}
    found = replace(plan(layers, 2, 1e9, **most, schedules=["zb-h1"])[0], recompute=("block", None))
    losses, parts, runs, peaks = zip(*ps.launch(rank_planned, 2, found), strict=True)
    assert torch.equal(losses[0], accumulate(model, loss_fn, batch, 4))
    assert_same(merged(parts), gradients(model.named_parameters()))
    assert all(runs)
    assert peaks[0][1] == pytest.approx(found.timeline.peak_memory[1], rel=0.1)  # planned without recomputation


def test_a_plan_beside_cuts_of_ones_own_is_refused():
    model, loss_fn = make("mlp")
    found = plan([Layer(name, 1, 1, 1) for name in dict(model.named_children())], 1, 1e9, batch=1, effort="quick")[0]
    with pytest.raises(ps.MismatchError, match="leave out cuts="):
        ps.Pipeline(model, loss_fn, plan=found, cuts=["1"])
    with pytest.raises(ps.MismatchError, match="not a str"):
        ps.Pipeline(model, loss_fn, plan="plan.json")
