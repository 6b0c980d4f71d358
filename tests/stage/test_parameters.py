"""A rank's parameters: the norm that gradients are clipped by."""

import torch
from torch import nn

from penstock.stage.parameters import Parameters

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def test_gradients_of_several_dtypes_have_the_norm_of_the_uncut_model_to_the_bit():
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(*[nn.Linear(3, 3, dtype=KINDS[number % len(KINDS)]) for number in range(12)])
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        names = list(model.state_dict())
        ranks = [Parameters({0: part}, [dict(zip(part.state_dict(), own, strict=True))], order=names)
                 for part, own in ((model[:6], names[:12]), (model[6:], names[12:]))]  # fmt: skip
        parts = [each.gradient_norms(2.0) for each in reversed(ranks)]
        norms = [each.clip(parts, 0.5, 2.0) for each in ranks]
        clipped = [parameter.grad for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert all(torch.equal(norm, expected) for norm in norms)
        assert all(map(torch.equal, clipped, gradients))
