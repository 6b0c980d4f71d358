"""Weights and buffers that a forward changes through `.data`: refused where a backward would see another value."""

import pytest
import torch
from reference import accumulate
from runners import cases_on_ranks
from torch import nn

import penstock as ps

X, Y = torch.randn(2, 8, 4, generator=torch.manual_seed(1))
WEIGHT = "a forward of stage 0 changes its weight 0.weight in place, through .data, while other microbatches need it: change it"


class Decays(nn.Linear):
    """Makes its weight smaller in each forward."""

    def forward(self, hidden):
        self.weight.data.mul_(0.9)
        return super().forward(hidden)


class DecaysBuffer(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden):
        self.scale.data.mul_(0.9)
        return super().forward(hidden) * self.scale.clone()


class Clamps(nn.Linear):
    """Changes its weight in the first forward, as one that is initialised by its first batch does."""

    def forward(self, hidden):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(hidden)


class FollowsByData(nn.Module):
    """A copy that is no longer trained follows the weight, as the key encoder of MoCo does."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.copied = nn.Linear(width, width), nn.Linear(width, width).requires_grad_(False)

    def forward(self, hidden):
        with torch.no_grad():
            self.copied.weight.data = self.copied.weight.data * 0.9 + self.linear.weight.data * 0.1
            target = self.copied(hidden)
        return self.linear(hidden) + target


def model_of(layer):
    torch.manual_seed(0)
    return nn.Sequential(
        layer(4, 4) if issubclass(layer, nn.Linear) and layer is not DecaysBuffer else layer(4), nn.Tanh(), nn.Linear(4, 4)
    )


def rank_result(layer, schedule, microbatches, recompute):
    pipe = ps.Pipeline(model_of(layer), nn.functional.mse_loss, schedule, microbatches, cuts=["2"], recompute=recompute)
    try:
        loss = pipe.step(X, target=Y)
    except ps.MismatchError as error:
        return str(error)
    return loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}


REFUSED = {
    (Decays, "1f1b", 4, None): WEIGHT,
    (Decays, "zb-h1", 4, None): WEIGHT,
    (Decays, "gpipe", 1, "block"): "0.weight in place, through .data, and recompute= runs it, and changes it, twice",
    (DecaysBuffer, "1f1b", 4, "block"): "its buffer 0.scale in place, through .data, where recompute= does not see it",
}
RIGHT = [
    (Decays, "gpipe", 1, None), (DecaysBuffer, "1f1b", 4, None), (Clamps, "1f1b", 4, "block"), (FollowsByData, "1f1b", 4, None),
]  # fmt: skip
CASES = (*REFUSED, *RIGHT)


@pytest.mark.ranks
def test_weights_that_forwards_change_while_backwards_need_them_are_refused_on_all_ranks():
    results = cases_on_ranks(rank_result, 2, CASES)
    for case, expected in REFUSED.items():
        first, second = results[case]
        assert first == second
        assert expected in first, case


@pytest.mark.ranks
def test_weights_that_a_forward_changes_once_or_does_not_train_have_the_numbers_of_one_process():
    results = cases_on_ranks(rank_result, 2, CASES)
    for case in RIGHT:
        layer, _, microbatches, _ = case
        model = model_of(layer)
        loss = accumulate(model, nn.functional.mse_loss, (X, Y), microbatches)
        gradients = {name: gradient for _, part in results[case] for name, gradient in part.items()}
        assert torch.equal(results[case][0][0], loss), case
        for name, parameter in model.named_parameters():
            same = parameter.grad is gradients[name] is None or torch.equal(parameter.grad, gradients[name])
            assert same, (case, name)
