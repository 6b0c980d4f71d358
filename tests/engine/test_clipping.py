"""Gradients clipped by the norm of the whole model, with the line that every script has."""

import itertools
import re
import warnings
from functools import partial

import pytest
import torch
from error_text import NO_ERROR, outcome
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, data, gradients, make, merged, stepped
from runners import cases_on_ranks, on_ranks
from slow_cases import slow_except
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import penstock as ps

pytestmark = pytest.mark.ranks

clip, total_norm = nn.utils.clip_grad_norm_, nn.utils.get_total_norm
M, MOST = 3, 0.05


LIBRARY = """
def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
    return clip(list(parameters), max_norm, norm_type)
"""


def in_library(name):
    """A function around torch's, which makes a list before it calls that."""
    names = {"__name__": name, "clip": clip}
    exec(LIBRARY, names)
    return lambda parameters: names["clip_grad_norm_"](None, parameters, MOST)


def trained_only(parameters):
    for parameter in parameters:
        if parameter.requires_grad:
            yield parameter


FORMS = {
    "pipe": lambda of: of.clip_grad_norm_(MOST) if isinstance(of, ps.Pipeline) else clip(of.parameters(), MOST),
    "parameters": lambda of: clip(of.parameters(), MOST),
    "keywords": lambda of: clip(parameters=of.parameters(), max_norm=MOST, error_if_nonfinite=True, foreach=False),
    "one": lambda of: clip(of.parameters(), MOST, norm_type=1),
    "three": lambda of: clip(of.parameters(), MOST, 3.0),
    "inf": lambda of: clip(of.parameters(), MOST, "inf"),
    "expression": lambda of: clip((parameter for parameter in of.parameters() if parameter.grad is not None), MOST),
    "filter": lambda of: clip(filter(lambda value: value.requires_grad, of.parameters()), MOST),
    "generator": lambda of: clip(trained_only(of.parameters()), MOST),
    "accelerate": lambda of: in_library("accelerate.accelerator")(of.parameters()),
    "norm": lambda of: total_norm(parameter.grad for parameter in of.parameters() if parameter.grad is not None),
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


@pytest.mark.parametrize(("schedule", "ranks"), slow_except([("zb-v", 2)], [("1f1b", 2), ("zb-v", 2), ("gpipe", 3)]))
def test_torchs_own_clipping_of_a_pipelines_parameters_has_the_bits_of_one_process(schedule, ranks):
    everyone = on_ranks(rank_clips, ranks, schedule)
    for name, model in MODELS.items():
        whole = model()
        for form, work in FORMS.items():
            accumulate(whole, loss_fn, batch(name), M)
            norm = work(whole)
            assert all(torch.equal(result[name, form][0], norm) for result in everyone), (name, form)
            found = merged([result[name, form][1] for result in everyone])
            assert found.keys() >= dict(whole.named_parameters()).keys()
            assert_same(found, {key: whole.get_parameter(key).grad for key in found})
            whole.zero_grad()


def clips_with_another_model(pipeline):
    pipe, other = pipeline(*make("mlp"), "1f1b", M), nn.Linear(3, 3)
    other.weight.grad, other.bias.grad = torch.ones(3, 3), torch.ones(3)
    stepped(pipe, [data("mlp", 7)])
    norm = clip(itertools.chain(pipe.parameters(), other.parameters()), MOST)
    return norm, gradients(pipe.named_parameters()), other.weight.grad


def test_parameters_that_are_not_the_pipelines_may_come_after_its_own():
    assert_as_one_process(on_ranks(clips_with_another_model, 2, ps.Pipeline), clips_with_another_model(OneProcess))


def rank_gives_the_same_parameters():
    pipe = ps.Pipeline(*make("mlp"), "1f1b", M)
    own = [parameter for stage in pipe.stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.Adam(pipe.parameters())
    taken = (
        list(pipe.parameters()),
        [parameter for parameter in pipe.parameters() if parameter.requires_grad],
        optimizer.param_groups[0]["params"],
    )
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    norm = total_norm([result.grad for result in own])
    assert torch.equal(in_library("torchtitan.distributed.utils")(pipe.parameters()), norm)  # it asks the ranks itself
    taken += list(pipe.parameters()), [parameter for (parameter,) in zip(pipe.parameters(), strict=True)]
    nn.utils.clip_grad_value_(pipe.parameters(), 1e-3)
    assert max(parameter.grad.abs().max() for parameter in own) <= 1e-3
    return [len(result) == len(own) and all(a is b for a, b in zip(result, own, strict=True)) for result in taken]


def test_whoever_does_not_ask_for_a_norm_gets_the_ranks_own_parameters():
    assert on_ranks(rank_gives_the_same_parameters, 2) == [[True] * 5] * 2


def rank_infinite():
    pipe = ps.Pipeline(*make("mlp"), "1f1b", M)
    pipe.step(data("mlp", 7)[0], target=data("mlp", 7)[1])
    if pipe.topology.rank == 1:
        next(pipe.parameters()).grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(pipe.parameters(), MOST, error_if_nonfinite=True)
    return all(parameter.grad.isfinite().all() for parameter in pipe.parameters())


def test_a_norm_that_is_not_finite_is_raised_on_all_ranks():
    assert on_ranks(rank_infinite, 2) == [True, False]


# ---- a list of parameters, of which nothing can be known


def halve(pipe, _):
    for parameter in pipe.parameters():
        parameter.grad.mul_(0.5)


def add_noise(pipe, _):
    for parameter in pipe.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad))


def each_by_itself(pipe, _):
    for parameter in pipe.parameters():
        clip(parameter, MOST)


BY_LIST = {
    "list": lambda pipe, _: clip(list(pipe.parameters()), MOST),
    "groups": lambda pipe, optimizer: clip(optimizer.param_groups[0]["params"], MOST),
    "trained": lambda pipe, _: clip([parameter for parameter in pipe.parameters() if parameter.requires_grad], MOST),
    "stages": lambda pipe, _: clip([parameter for stage in pipe.stages.values() for parameter in stage.parameters()], MOST),
    "norm of a list": lambda pipe, _: nn.utils.clip_grads_with_norm_(
        pipe.parameters(), MOST, total_norm([parameter.grad for parameter in pipe.parameters()])
    ),
}
BY_ALL = {
    "pipe": lambda pipe, _: pipe.clip_grad_norm_(MOST),
    "parameters": lambda pipe, _: clip(pipe.parameters(), MOST),
    "nothing": lambda pipe, _: None,
    "halved": halve,
    "noise": add_noise,
    "each by itself": each_by_itself,
    "above all": lambda pipe, _: clip(list(pipe.parameters()), 1e9),
}


def rank_clips_a_list(dtype):
    said = {}
    for name, work in (BY_LIST | BY_ALL).items():
        pipe = ps.Pipeline(make("mlp")[0].to(dtype), nn.functional.cross_entropy, "1f1b", M)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(6):
                inputs, target = data("mlp", 7, step)
                pipe.step(inputs.to(dtype), target=target)
                work(pipe, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        said[name] = [(warning.filename, str(warning.message)) for warning in caught]
    return said


@pytest.mark.parametrize("dtype", slow_except([torch.float32], [torch.float32, torch.bfloat16]))
def test_ranks_that_multiply_their_gradients_by_numbers_of_their_own_are_a_warning_in_the_next_step(dtype):
    first, second = on_ranks(rank_clips_a_list, 2, dtype)
    for name in BY_LIST:
        ((where, result),) = first[name]
        assert where == __file__
        assert re.match(
            r"since the last step gradients were multiplied by [\d.]+ on rank 0, by [\d.]+ on rank 1, as clip", result
        )
        assert "clip with pipe.clip_grad_norm_(max_norm)" in result
    assert [first[name] for name in BY_ALL] == [[]] * len(BY_ALL)
    assert not any(second.values())


def rank_accumulates():
    """Two steps for one of the optimizer's, a scaler, a failed step: nothing of it multiplies."""
    model, loss_fn = make("mlp")
    scaler = ShardedGradScaler("cpu", init_scale=2.0**7)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            inputs, target = data("mlp", 7, step)
            pipe.step(inputs, target=target, scale=0.5)
            pipe.step(inputs, target=target, scale=0.5)
            with pytest.raises(ps.PenstockError):
                pipe.step(inputs, target=target[:3])
            scaler.unscale_(optimizer)
            if step % 2:
                pipe.clip_grad_norm_(MOST)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step < 3)


def test_sums_over_steps_a_scaler_and_a_step_that_failed_are_no_warning():
    on_ranks(rank_accumulates, 2)


def rank_steps(how):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
    rank = pipe.topology.rank
    optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.1)
    if how == "the last stage has no optimizer" and rank:
        del optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
            is_called = {
                "on all": step != 1,
                "on rank 0": rank == 0,
                "the last stage has no optimizer": rank == 0,
                "in turns": rank == step % 2,  # as two optimizers, of the weights of one rank each
                "a turn of six": (rank == 1) == (step % 6 == 5),
            }[how]
            if is_called:
                optimizer.step()
            pipe.zero_grad()
    return [(str(warning.message), warning.filename) for warning in caught]


def test_an_optimizer_that_steps_on_one_rank_alone_is_a_warning():
    cases = "on all", "on rank 0", "the last stage has no optimizer", "in turns", "a turn of six"
    results = cases_on_ranks(rank_steps, 2, tuple((case,) for case in cases))
    ((result, file),), none = results.pop(("on rank 0",))
    assert result.startswith("weights have changed on rank 0, but none of an optimizer on rank 1, in 8 steps or more: call")
    assert file == __file__
    assert none == []
    assert all(result == [[], []] for result in results.values()), results


def rank_shares(cuts):
    torch.manual_seed(0)
    judge = [nn.Linear(4, 4) for _ in range(2)]
    models = nn.Sequential(*judge), nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)], *judge)
    one, other = (ps.Pipeline(models[n], nn.functional.mse_loss, microbatches=2, cuts=cuts[n]) for n in (0, 1))
    results = []
    for pipe in (one, one, other, one):
        text = outcome(partial(pipe.step, torch.ones(4, 4), target=torch.zeros(4, 4)), ps.MismatchError)
        results.append(text.split(" on another rank, and has trained")[0])
    return results


def test_two_pipelines_that_train_the_same_layer_on_different_ranks_are_told():
    assert on_ranks(rank_shares, 2, (["1"], ["3"])) == [[NO_ERROR] * 4] * 2
    message = "another pipeline has 2.weight"
    assert on_ranks(rank_shares, 2, (["1"], ["2"])) == [[NO_ERROR, NO_ERROR, message, NO_ERROR]] * 2
