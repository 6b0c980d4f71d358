"""Tables from a priority on real processes: the bits of one process, for more microbatches than the pipeline has as well."""

import pytest
import torch
from example_rules import RULES
from reference import accumulate, assert_same, data, gradients, make, merged
from runners import on_ranks
from slow_cases import slow_except

import penstock as ps

pytestmark = pytest.mark.ranks


def rank_every_rule(ranks: int, microbatches: int):
    """A step with each rule, and one over a list of two microbatches more, for which the rule makes a larger table."""
    model, loss_fn = make("mlp", depth=4 * ranks)
    results = {}
    for rule in RULES:
        pipe = ps.Pipeline(model, loss_fn, rule, microbatches, seed=None)
        inputs, target = data("mlp", 2 * microbatches + 1)
        loss, stepped = pipe.step(inputs, target=target), gradients(pipe.named_parameters())
        model.zero_grad()
        pieces = [list(tensor.split(1)) for tensor in data("mlp", microbatches + 2)]
        listed = pipe.step_microbatches([(piece,) for piece in pieces[0]], targets=pieces[1])
        results[rule.__name__] = loss, stepped, listed, gradients(pipe.named_parameters())
        model.zero_grad()
    return results


@pytest.mark.parametrize(("ranks", "microbatches"), slow_except([(2, 3)], [(2, 3), (3, 4), (4, 8)]))
def test_three_rules_have_the_loss_and_the_gradients_of_one_process(ranks: int, microbatches: int) -> None:
    everyone = on_ranks(rank_every_rule, ranks, ranks, microbatches)
    model, loss_fn = make("mlp", depth=4 * ranks)
    expected = []
    for rows, count in ((2 * microbatches + 1, microbatches), (microbatches + 2, microbatches + 2)):
        expected += [accumulate(model, loss_fn, data("mlp", rows), count), gradients(model.named_parameters())]
        model.zero_grad()
    for rule in RULES:
        results = [result[rule.__name__] for result in everyone]
        for loss, _, listed, _ in results:
            assert torch.equal(loss, expected[0])
            assert torch.equal(listed, expected[2])
        assert_same(merged([result[1] for result in results]), expected[1])
        assert_same(merged([result[3] for result in results]), expected[3])
