"""Rows that stay together: a microbatch has whole pairs, and the bits of one process that cuts between pairs."""

import warnings
from typing import Any

import pytest
import torch
from error_text import error_text
from reference import OneProcess, assert_as_one_process, gradients
from runners import on_ranks_once
from torch import Tensor, nn

import penstock as ps

pytestmark = pytest.mark.ranks

M, PAIRS = 4, 10


def pair_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over pairs, of neighbouring rows; `target` has the sign of each."""
    chosen, rejected = (output * target).sum(1).unflatten(0, (-1, 2)).unbind(1)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def rows(pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * pairs, 4), torch.randn(2 * pairs, 4)


def rank_pairs() -> dict[str, Any]:
    inputs, target = rows()
    pipe = ps.Pipeline(model(), pair_loss, "1f1b", M, rows_per_sample=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, outputs = pipe.step(inputs, target=target, return_outputs=True)
        few = [pipe.step(inputs[:count], target=target[:count], scale=0.0) for count in (8, 2)]  # M pairs, and one
    found = {"loss": loss, "outputs": outputs, "gradients": gradients(pipe.named_parameters()), "few": few}
    found["told of half a pair"] = error_text(lambda: pipe.step(inputs[:7], target=target[:7]))
    found["told of half a pair in a list"] = error_text(lambda: pipe.step_microbatches([inputs[:3]], [target[:3]]))
    found["told of no number"] = error_text(lambda: ps.Pipeline(model(), pair_loss, rows_per_sample=0))
    text = ps.Pipeline(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), rows_per_sample=2)
    found["generated"] = text.generate(torch.zeros(3, 1, dtype=torch.int64), max_new_tokens=1).shape
    return found


def everyone() -> list[dict[str, Any]]:
    return on_ranks_once(rank_pairs, 2)


def test_pairs_are_cut_between_them_and_weigh_alike():
    pipe, (inputs, target) = OneProcess(model(), pair_loss, None, [6, 6, 4, 4]), rows()
    loss, outputs = pipe.step(inputs, target=target, return_outputs=True)
    numbers = [[result["loss"], result["gradients"]] for result in everyone()]
    assert_as_one_process(numbers, [loss, gradients(pipe.named_parameters())])
    assert torch.equal(everyone()[1]["outputs"], outputs)


def test_a_batch_of_few_pairs_is_split_into_its_pairs():
    inputs, target = rows()
    expected = [pair_loss(model()(inputs[:count]), target[:count]).item() for count in (8, 2)]
    for result in everyone():
        assert [loss.item() for loss in result["few"]] == pytest.approx(expected)


WHOLE = "rows, which are no whole samples of 2 rows (rows_per_sample=2): give a multiple of 2, the rows of a sample one after"
TOLD = {
    "half a pair": f" has 7 {WHOLE} the other",  # the batch or the target, which each rank reads
    "half a pair in a list": f" 0 has 3 {WHOLE} the other",
    "no number": "rows_per_sample is how many rows stay together, 1 or more, not 0",
}


@pytest.mark.parametrize("what", TOLD)
def test_samples_that_are_not_whole_are_told_on_all_ranks(what):
    for result in everyone():
        assert TOLD[what] in result[f"told of {what}"]


def test_text_is_generated_for_any_number_of_rows():
    assert all(result["generated"] == (3, 2) for result in everyone())
