"""Gradients clipped by the norm of the whole model, with the line that every script has."""

import itertools
import re

import pytest
import torch
from reference import accumulate, assert_same, data, gradients, make, merged
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

clip, total_norm = nn.utils.clip_grad_norm_, nn.utils.get_total_norm
M, MOST = 3, 0.05


class Wrapper:
    """A library around torch's function, which makes a list before it calls that."""

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        return clip(list(parameters), max_norm, norm_type)


def trained_only(parameters):
    for each in parameters:
        if each.requires_grad:
            yield each


FORMS = {
    "pipe": lambda of: of.clip_grad_norm_(MOST) if isinstance(of, ps.Pipeline) else clip(of.parameters(), MOST),
    "parameters": lambda of: clip(of.parameters(), MOST),
    "keywords": lambda of: clip(parameters=of.parameters(), max_norm=MOST, error_if_nonfinite=True, foreach=False),
    "one": lambda of: clip(of.parameters(), MOST, norm_type=1),
    "three": lambda of: clip(of.parameters(), MOST, 3.0),
    "inf": lambda of: clip(of.parameters(), MOST, "inf"),
    "expression": lambda of: clip((each for each in of.parameters() if each.grad is not None), MOST),
    "filter": lambda of: clip(filter(lambda each: each.requires_grad, of.parameters()), MOST),
    "generator": lambda of: clip(trained_only(of.parameters()), MOST),
    "wrapper": lambda of: Wrapper().clip_grad_norm_(of.parameters(), MOST),
    "norm": lambda of: total_norm(each.grad for each in of.parameters() if each.grad is not None),
    "not above": lambda of: clip(of.parameters(), 1e9),
}


def tied_model():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17, bias=False))
    model[3].weight = model[0].weight
    return model


def mixed_dtypes():
    model, _ = make("mlp")
    model[0].register_parameter("extra", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model[0].register_forward_hook(lambda layer, _, output: output * layer.extra.sum().float())
    return model


MODELS = {
    "mlp": lambda: make("mlp")[0],
    "partly frozen": lambda: make("mixed")[0],
    "tied": tied_model,
    "dtypes": mixed_dtypes,
}


def batch(name):
    return data("gpt", 7) if name == "tied" else data("mlp", 7)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def rank_clips(schedule):
    results = {}
    for name, model in MODELS.items():
        pipe = ps.Pipeline(model(), loss_fn, schedule, M)
        for form, work in FORMS.items():
            pipe.step(batch(name)[0], target=batch(name)[1])
            results[name, form] = work(pipe), gradients(pipe.named_parameters())
            pipe.zero_grad()
    return results


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zb-v", 2), ("gpipe", 3)])
def test_torchs_own_clipping_of_a_pipelines_parameters_has_the_bits_of_one_process(schedule, ranks):
    everyone = ps.launch(rank_clips, ranks, schedule)
    for name, model in MODELS.items():
        whole = model()
        for form, work in FORMS.items():
            accumulate(whole, loss_fn, batch(name), M)
            norm = work(whole)
            assert all(torch.equal(each[name, form][0], norm) for each in everyone), (name, form)
            found = merged([each[name, form][1] for each in everyone])
            assert found.keys() >= dict(whole.named_parameters()).keys()
            assert_same(found, {key: whole.get_parameter(key).grad for key in found})
            whole.zero_grad()


def rank_with_another_model():
    model, loss_fn = make("mlp")
    pipe, other = ps.Pipeline(model, loss_fn, "1f1b", M), nn.Linear(3, 3)
    other.weight.grad, other.bias.grad = torch.ones(3, 3), torch.ones(3)
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    norm = clip(itertools.chain(pipe.parameters(), other.parameters()), MOST)
    return norm, gradients(pipe.named_parameters()), other.weight.grad


def test_parameters_that_are_not_the_pipelines_may_come_after_its_own():
    model, loss_fn = make("mlp")
    accumulate(model, loss_fn, data("mlp", 7), M)
    other = nn.Linear(3, 3)
    other.weight.grad, other.bias.grad = torch.ones(3, 3), torch.ones(3)
    norm = clip(itertools.chain(model.parameters(), other.parameters()), MOST)
    everyone = ps.launch(rank_with_another_model, 2)
    assert_same(merged([found for _, found, _ in everyone]), gradients(model.named_parameters()))
    for ours, _, theirs in everyone:
        assert torch.equal(ours, norm)
        assert torch.equal(theirs, other.weight.grad)


def rank_gives_the_same_parameters():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    own = [parameter for stage in pipe.stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(pipe.parameters())
    taken = (
        list(pipe.parameters()),
        [each for each in pipe.parameters() if each.requires_grad],
        optimizer.param_groups[0]["params"],
    )
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    taken += list(pipe.parameters()), [each for (each,) in zip(pipe.parameters(), strict=True)]
    nn.utils.clip_grad_value_(pipe.parameters(), 1e-3)
    assert max(parameter.grad.abs().max() for parameter in own) <= 1e-3
    return [len(each) == len(own) and all(a is b for a, b in zip(each, own, strict=True)) for each in taken]


def test_whoever_does_not_ask_for_a_norm_gets_the_ranks_own_parameters():
    assert ps.launch(rank_gives_the_same_parameters, 2) == [[True] * 5] * 2


def rank_infinite():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    if pipe.topology.rank == 1:
        next(pipe.parameters()).grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(pipe.parameters(), MOST, error_if_nonfinite=True)
    return all(parameter.grad.isfinite().all() for parameter in pipe.parameters())


def test_a_norm_that_is_not_finite_is_raised_on_all_ranks():
    assert ps.launch(rank_infinite, 2) == [True, False]


def rank_alone():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    with pytest.raises(ps.PenstockError) as caught:
        clip(pipe.parameters(), MOST) if pipe.topology.rank == 0 else pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    return str(caught.value)


def test_clipping_on_one_rank_only_is_an_error_on_all():
    first, second = ps.launch(rank_alone, 2)
    assert first == second
    assert re.search(r"do different things|different", first), first
