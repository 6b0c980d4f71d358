"""Tables from a priority on real processes: the bits of one process, for more microbatches than the pipeline has as well."""

from typing import Any

import pytest
from example_rules import RULES
from reference import OneProcess, assert_as_one_process, data, gradients, make, stepped
from runners import on_ranks
from slow_cases import slow_except

import penstock as ps

pytestmark = pytest.mark.ranks


def steps_with_every_rule(pipeline: Any, ranks: int, microbatches: int) -> dict[str, Any]:
    """A step with each rule, and one over a list of two microbatches more, for which the rule makes a larger table."""
    model, loss_fn = make("mlp", depth=4 * ranks)
    results = {}
    for rule in RULES:
        pipe = pipeline(model, loss_fn, rule, microbatches, seed=None)
        step = stepped(pipe, [data("mlp", 2 * microbatches + 1)])
        model.zero_grad()
        inputs, targets = (list(tensor.split(1)) for tensor in data("mlp", microbatches + 2))
        results[rule.__name__] = step, pipe.step_microbatches(inputs, targets), gradients(pipe.named_parameters())
        model.zero_grad()
    return results


@pytest.mark.parametrize(("ranks", "microbatches"), slow_except([(2, 3)], [(2, 3), (3, 4), (4, 8)]))
def test_three_rules_have_the_loss_and_the_gradients_of_one_process(ranks: int, microbatches: int) -> None:
    everyone = on_ranks(steps_with_every_rule, ranks, ps.Pipeline, ranks, microbatches)
    assert_as_one_process(everyone, steps_with_every_rule(OneProcess, ranks, microbatches))
