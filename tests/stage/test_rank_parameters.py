"""A rank's parameters: the norm that gradients are clipped by."""

import math

import pytest
import torch
from torch import nn

from penstock import partition
from penstock.engine.model_partition import ModelPartition
from penstock.errors import MismatchError
from penstock.stage.rank_parameters import RankParameters

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def several_dtypes():
    return nn.Sequential(*[nn.Linear(3, 3, dtype=KINDS[number % len(KINDS)]) for number in range(12)])


class LastFirst(nn.Module):
    """Layers that run in another order than they stand in; two pairs of them share a weight."""

    def __init__(self):
        super().__init__()
        for number in reversed(range(12)):
            setattr(self, f"layer{number}", nn.Linear(3, 3))
        self.layer11.weight, self.layer5.weight = self.layer0.weight, self.layer1.weight

    def forward(self, hidden):
        for number in range(12):
            hidden = getattr(self, f"layer{number}")(hidden)
        return hidden


@pytest.mark.costly
@pytest.mark.parametrize(("make", "cut"), [(several_dtypes, "6"), (LastFirst, "layer6"), (LastFirst, "layer4")])
def test_gradients_have_the_norm_of_the_uncut_model_to_the_bit(make, cut):
    for seed in range(20):
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        stages = partition.split(model, 2, cuts=[cut])
        names = partition.model_names_of_stages(
            [partition.state_names_without_compile_prefix(stage) for stage in stages], is_cut=True
        )
        aliases, order = (
            ModelPartition({}, {}, dict(enumerate(stages)), uncut_model=model).first_name_by_alias(names),
            list(model.state_dict()),
        )
        ranks = [RankParameters({index: stage}, names, aliases, order) for index, stage in enumerate(stages)]
        parts = [rank.gradient_norms_by_name(2.0) for rank in ranks]
        expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(rank.clip_grads(parts, math.inf, 2.0), expected) for rank in ranks)


def test_a_parameter_that_came_after_the_pipeline_is_told_by_its_name():
    stage = nn.Linear(3, 3)
    parameters = RankParameters({1: stage}, [{}, {"weight": "head.weight", "bias": "head.bias"}])
    stage.scale = nn.Parameter(torch.ones(3))
    for use in (parameters.named_parameters, parameters.state_dict):
        with pytest.raises(MismatchError, match="stage 1 has a scale that was not there when the pipeline was built: add"):
            use()
