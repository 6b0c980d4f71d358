"""The house between mini.py and the engine: the same bits, messages counted, and what fails fails on all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prompt import torchrun
from reference import OneProcess, accumulate, assert_as_one_process, data, gradients, make, stepped
from slow_cases import slow_except

import penstock as ps
from penstock.learn import middle

MICROBATCHES, ROWS = 6, 13  # uneven pieces


def build_rank(layers, loss_fn, name, ranks, folder):
    ps.comms.init_distributed()
    table = ps.schedule.build(name, ranks=ranks, microbatches=MICROBATCHES)
    return middle.Rank(layers, loss_fn, table, dist.FileStore(str(Path(folder) / name), ranks))


def rank_bits(ranks, kind, names, folder):
    """Loss and gradients of schedules; two steps without an optimizer between."""
    results = {}
    for name in names:
        model, loss_fn = make(kind, depth=2 * ranks)
        rank = build_rank(list(model), loss_fn, name, ranks, folder)
        losses = [rank.step(*data(kind, ROWS, seed)) for seed in (3, 4)]
        own = {id(parameter) for parameter in rank.parameters()}
        results[name] = losses, gradients([(at, value) for at, value in model.named_parameters() if id(value) in own])
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("kind", slow_except(["mlp"], ["mlp", "gpt"]))
@pytest.mark.parametrize("ranks", slow_except([2], [1, 2, 3, 4]))
def test_it_has_the_bits_of_one_process(ranks, kind, tmp_path):
    names = ps.schedule.names() if ranks > 2 else ["1f1b", "zb-v"]
    batches = [data(kind, ROWS, seed) for seed in (3, 4)]
    expected = stepped(OneProcess(*make(kind, depth=2 * ranks), None, MICROBATCHES), batches)
    assert_as_one_process(ps.launch(rank_bits, ranks, ranks, kind, names, str(tmp_path)), dict.fromkeys(names, expected))


def rank_failures(folder):
    """What three steps raise on this rank, the loss of a fourth, and the calls of a fifth in their order."""
    model, loss_fn = make("mlp", depth=4)
    rank = build_rank(list(model), loss_fn, "1f1b", 2, folder)
    inputs, target = data("mlp", ROWS, 3)
    errors = []

    def step(*batch):
        try:
            return rank.step(*batch)
        except (middle.StepMismatchError, middle.StepFailedError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    def broken_loss(output, labels):
        raise ValueError("labels of a kind that nobody expected")

    step(inputs[: 13 - rank.rank], target[: 13 - rank.rank])
    rank.loss_fn = broken_loss
    step(inputs, target)
    rank.loss_fn = loss_fn
    if rank.rank == 0:
        hook = rank.stages[0].register_forward_hook(lambda *_: 1 / 0)
    step(inputs, target)
    if rank.rank == 0:
        hook.remove()
    loss = step(inputs, target)

    calls, isend, irecv = [], dist.isend, dist.irecv
    dist.isend = lambda *args, **options: calls.append("send") or isend(*args, **options)
    dist.irecv = lambda *args, **options: calls.append("receive") or irecv(*args, **options)
    step(inputs, target)
    return errors, loss, calls


@pytest.mark.ranks
def test_a_failure_is_the_same_on_all_ranks_the_next_step_works_and_receives_are_posted_ahead(tmp_path):
    (errors, loss, calls), (other_errors, other_loss, other_calls) = ps.launch(rank_failures, 2, str(tmp_path))
    assert errors == other_errors
    assert errors[0].startswith("StepMismatchError: their shapes (crc32): ")
    assert errors[1] == "StepFailedError: rank 1, 1F0: ValueError: labels of a kind that nobody expected"
    assert errors[2] == "StepFailedError: rank 0, 0F0: ZeroDivisionError: division by zero"
    model, loss_fn = make("mlp", depth=4)
    expected = accumulate(model, loss_fn, data("mlp", ROWS, 3), MICROBATCHES)
    assert torch.equal(loss, expected)
    assert torch.equal(other_loss, expected)
    for own in (calls, other_calls):
        assert own[: middle.RECEIVES_AHEAD] == ["receive"] * middle.RECEIVES_AHEAD
        assert sorted(own) == ["receive"] * MICROBATCHES + ["send"] * MICROBATCHES  # no message has its shape sent before it


def test_it_can_be_read_in_an_hour():
    assert len(Path(middle.__file__).read_text().splitlines()) <= 700


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_it_trains_under_torchrun():
    ended = torchrun(2, "-m", "penstock.learn.middle", "zb-h1", "6")
    lines = ended.stdout.splitlines()
    assert len(lines) == 10, ended.stderr
    assert all(line.endswith("the same bits: True") for line in lines)
