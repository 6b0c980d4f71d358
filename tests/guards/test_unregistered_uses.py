"""A parameter that a stage uses from where it is not registered: told on every rank, where its gradient would be lost."""

import re

import pytest
import torch
from runners import on_ranks
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

X = torch.ones(4, 4)
mse = nn.functional.mse_loss


class LayerInList(nn.Module):
    """Uses the weight of a layer, which it has in a plain list."""

    def __init__(self, layer, registers=False):
        super().__init__()
        self.weights, self.own = [layer.weight], nn.Linear(4, 4)
        if registers:
            self.layer = layer

    def forward(self, hidden):
        return self.own(hidden) @ self.weights[0]


def model(registers=False, frozen=False):
    torch.manual_seed(0)
    first = nn.Linear(4, 4).requires_grad_(not frozen)
    return nn.Sequential(first, nn.Linear(4, 4), nn.Linear(4, 4), LayerInList(first, registers))


def trained_before():
    made = model()
    mse(made(X), X).backward()
    return made


def stages(made):
    return [nn.Sequential(made[0], made[1]), nn.Sequential(made[2], made[3])]


class WeightLoss:
    """Has a parameter of the first stage's."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, output, target):
        return mse(output @ self.weight, target)


def with_a_loss():
    whole = nn.Sequential(*model()[:3])
    return ps.Pipeline(whole, WeightLoss(whole[0].weight), "1f1b", 2)


REFUSED = {  # a name -> the pipeline, the parameter that is told
    "a model that is cut": (lambda: ps.Pipeline(model(), mse, "1f1b", 2), "0.weight"),
    "cuts": (lambda: ps.Pipeline(model(), mse, "gpipe", 2, cuts=["3"]), "0.weight"),
    "stages": (lambda: ps.Pipeline(stages(model()), mse, "1f1b", 2), "0.0.weight"),
    "a gradient before": (lambda: ps.Pipeline(trained_before(), mse, "1f1b", 2), "0.weight"),
    "a backward in two": (lambda: ps.Pipeline(model(), mse, "zb-h1", 2), "0.weight"),
    "recomputed": (lambda: ps.Pipeline(model(), mse, "1f1b", 2, recompute="block"), "0.weight"),
    "the loss": (with_a_loss, "0.weight"),
    "tied, and used from a list": (lambda: ps.Pipeline(model(registers=True), mse, "1f1b", 2), "0.weight"),
}


def rank_strays():
    results = {}
    for name, (make, _) in REFUSED.items():
        pipe = make()
        for _ in range(2):  # a step that was refused is refused again
            with pytest.raises(ps.MismatchError) as caught:
                pipe.step(X, target=X)
            results.setdefault(name, []).append(str(caught.value))
    return results


def test_a_parameter_of_another_stage_that_is_held_in_a_list_is_told_on_every_rank():
    first, second = on_ranks(rank_strays, 2)
    assert first == second
    for name, (_, parameter) in REFUSED.items():
        message = f"rank 1: stage 1 uses the parameter {parameter} from where it is not registered"
        assert [text.startswith(message) for text in first[name]] == [True, True], first[name]
        assert re.search(r"register it \(self\.layer = embedding\), or pass the tensor on", first[name][0])


def rank_trains(schedule, frozen):
    pipe = ps.Pipeline(model(frozen=frozen), mse, schedule, 1)
    pipe.step(X, target=X)
    pipe.eval(X, target=X)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize(("schedule", "frozen"), [("zb-v", False), ("1f1b", True)], ids=["the same rank's", "frozen"])
def test_a_parameter_of_another_stage_may_be_held_in_a_list_where_no_gradient_is_lost(schedule, frozen):
    parts = on_ranks(rank_trains, 2, schedule, frozen)
    whole = model(frozen=frozen)
    mse(whole(X), X).backward()
    found = {name: gradient for part in parts for name, gradient in part.items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is None if found[name] is None else torch.equal(found[name], parameter.grad), name


def rank_lets_go():
    made = model()
    made[3].weights = [torch.ones(4, 4)]
    pipe, first = ps.Pipeline(made, mse, "1f1b", 2), made[0].weight
    del made
    pipe.step(X, target=X)
    first.grad = torch.ones(4, 4) if pipe.topology.rank else first.grad  # between steps it is the user's
    pipe.step(X, target=X)
    pipe.step(X[:3], target=X[:3])
    return pipe.step_count


def test_other_stages_need_not_stay_and_their_gradients_may_change_between_steps():
    assert on_ranks(rank_lets_go, 2) == [3, 3]


def rank_wraps_tied():
    rank = ps.comms.init_distributed().rank
    alone = [torch.distributed.new_group([index]) for index in range(2)][rank]
    made = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    made[2].weight = made[0].weight
    parts = [nn.parallel.DistributedDataParallel(part, process_group=alone) for part in (made[0], made[1:])]
    pipe = ps.Pipeline(parts, mse, "1f1b", 2)
    pipe.step(X, target=X)
    return pipe.step_count


def test_zeros_that_data_parallelism_gives_a_tied_parameter_are_no_gradient_that_is_lost():
    assert on_ranks(rank_wraps_tied, 2) == [1, 1]
