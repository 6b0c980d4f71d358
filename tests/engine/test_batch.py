"""What a step is given, and what it tells besides the loss: the same rows on all ranks, accumulation, losses, outputs."""

import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from error_text import NO_ERROR, error_text, outcome
from models import has_auxiliary_loss, toy
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, data, gradients, make, merged
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock.guards.equal_values import MAX_HASHED_VALUES, _sample_bytes, hash_batch
from penstock.mesh.sampler import ReplicaSampler

ROWS, M = 9, 4


# -- the same rows -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_of_values_depends_on_them_and_on_no_layout():
    tokens = torch.arange(32 * 1025).view(32, 1025)
    assert hash_batch(tokens[:, 1:]) == hash_batch(tokens[:, 1:].clone()) == hash_batch({"labels": tokens[:, 1:]})
    others = [tokens, tokens + 1, tokens.flip(0), tokens[:9], tokens.float(), (tokens, tokens)]
    assert len({hash_batch(result) for result in others}) == len(others)
    odd = [
        torch.ones(()),
        torch.ones(3, 0),
        torch.ones(2) > 0,
        torch.ones(2, dtype=torch.complex64),
        torch.tensor(float("nan")),
    ]
    assert all(hash_batch(case) == hash_batch(case.clone()) > 0 for case in odd)


def test_one_value_of_a_small_tensor_is_enough():
    labels = nn.functional.one_hot(torch.arange(64) * 15, 1000).float()
    others = [labels.roll(1, 0), labels.clone()]
    others[1][-1] = others[1][0]
    assert len({hash_batch(target) for target in (labels, *others)}) == 3


def test_few_values_of_a_large_tensor_are_looked_at_and_none_where_that_would_wait():
    for shape in ((1_000_000,), (33, 1025), (32, 3, 64, 64), (5, 2, 2, 2, 2, 2, 2, 2, 2)):
        assert len(_sample_bytes(torch.zeros(shape, dtype=torch.uint8))) <= MAX_HASHED_VALUES
    assert hash_batch(None) == hash_batch([3, "x"]) == 0
    assert hash_batch(torch.ones(3, device="meta")) == hash_batch([torch.ones(3), torch.eye(3).to_sparse()]) == 0


def other_target(rank, batch):
    """Loaders of different seeds, with targets of different rows."""
    return data("mlp", ROWS, seed=rank)


def only_what_is_read(rank, batch):
    return (batch[0], None) if rank == 0 else (None, batch[1])


def other_crop(rank, batch):
    """The same rows, whose inputs each rank has made noisy by itself."""
    return batch[0] + rank, batch[1]


def other_inputs(rank, batch):
    """Rank 0 is given no target, and the last rank the inputs of other rows."""
    return (batch[0], None) if rank == 0 else (batch[0] + 1, batch[1])


def middle(rank, batch):
    """A rank that reads nothing is given something else."""
    return other_target(rank, batch) if rank == 1 else batch


GIVEN = {other_target: "target", only_what_is_read: None, other_crop: None, other_inputs: "inputs", middle: None}


def changed_batches(rank, batch):
    """What a step says whose inputs differ on the ranks: since a layer has changed them in place, or since the user has."""
    inputs, target, results = batch[0].clone(), None if rank == 0 else batch[1], {}
    for name, layer in (("a layer", toy(lambda self, hidden: hidden.mul_(0.5))), ("the user", nn.Identity())):
        model, loss_fn = make("mlp")
        pipe = ps.Pipeline(nn.Sequential(layer, *model), loss_fn, "1f1b", M)
        pipe.step(inputs, target=target)
        if name == "the user" and rank == 0:
            inputs.add_(1)
        results[name] = error_text(partial(pipe.step, inputs, target=target))
        inputs = batch[0].clone()
    return results


def rank_data():
    """Everything about the batch that takes three ranks, in one go."""
    rank, batch = ps.comms.init_distributed().rank, data("mlp", ROWS)
    results = {}
    for given in GIVEN:
        pipe = ps.Pipeline(*make("mlp"), "1f1b", M)
        inputs, target = given(rank, batch)
        results[given.__name__] = outcome(partial(pipe.step, inputs, target=target), ps.MismatchError)
        pipe.step(batch[0], target=batch[1])  # the next step works
    step = partial(pipe.step, batch[0], target=batch[1])
    results["scale"] = error_text(partial(step, scale=1 / (rank + 1)))
    results["nan"] = error_text(partial(step, scale=float("nan") if rank == 1 else 1.0))
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        results["autocast"] = error_text(step)
    results["changed"] = changed_batches(rank, batch)
    return results, accumulated(ps.Pipeline), rank_is_told(batch, rank)


def accumulated(pipeline):
    """The losses of k steps scaled by 1/k, and the gradients, by schedule and k."""
    found = {}
    for schedule, k in product(("1f1b", "zb-h1"), (2, 3)):
        pipe, losses = pipeline(*make("mlp"), schedule, M), []
        for inputs, target in (data("mlp", ROWS, seed) for seed in range(k)):
            losses.append(pipe.step(inputs, target=target, scale=1 / k))
        found[schedule, k] = losses, gradients(pipe.named_parameters())
    return found


def rank_is_told(batch, rank):
    inputs, target = batch
    pipe = ps.Pipeline(*make("mlp"), "interleaved-1f1b", M)
    losses = ["what it held"] if rank else None  # rank 0 wants none
    loss, outputs = pipe.step(inputs, target=target, losses=losses, return_outputs=True)
    plain, few = pipe.step(inputs, target=target), []
    pipe.step(inputs[:2], target=target[:2], losses=few)
    return loss, losses, outputs, plain, few, pipe.last_rank == rank


@pytest.fixture(scope="module")
def everyone():
    return on_ranks(rank_data, 3)


@pytest.mark.ranks
def test_inputs_of_some_rows_with_the_target_of_others_are_refused_by_name(everyone):
    for result, *_ in everyone:
        for given, what in GIVEN.items():
            words = f"rank 2's batch is another than rank 0's: they were given different values as {what}. "
            assert result[given.__name__].startswith(words if what else NO_ERROR), given.__doc__


@pytest.mark.ranks
def test_a_layer_that_changes_the_batch_in_place_is_named_as_the_cause_where_the_same_tensors_come_again(everyone):
    for result, *_ in everyone:
        start = "rank 2's batch is another than rank 0's: "
        cause = "on rank 0 the inputs are the tensors of its last step, whose values have changed since. If a layer"
        assert result["changed"]["a layer"].startswith(start + cause)
        assert result["changed"]["the user"].startswith(f"{start}they were given different values as inputs. ")


@pytest.mark.ranks
def test_ranks_that_scale_gradients_differently_are_told_so(everyone):
    for result, *_ in everyone:
        assert result["scale"] == "the ranks do not scale their gradients alike: rank 0 has scale=1.0, rank 1 has scale=0.5"
        assert "step() cannot scale gradients by nan" in result["nan"]


@pytest.mark.ranks
def test_ranks_that_are_not_all_in_the_same_autocast_are_told_so(everyone):
    for result, *_ in everyone:
        assert result["autocast"] == (
            "the ranks are not all in the same torch.autocast: rank 0 has autocast of bfloat16, rank 1 has no autocast"
        )


@pytest.mark.ranks
def test_k_calls_with_scale_1_over_k_have_the_gradients_of_accumulation_in_one_process(everyone):
    assert_as_one_process([result for _, result, _ in everyone], accumulated(OneProcess))


@pytest.mark.ranks
def test_with_one_microbatch_scale_is_what_multiplying_the_loss_is():
    pipe, (inputs, target) = ps.Pipeline(*make("mlp"), "gpipe", 1), data("mlp", ROWS)
    whole, loss_fn = make("mlp")
    for _ in range(3):
        pipe.step(inputs, target=target, scale=1 / 3)
        (loss_fn(whole(inputs), target) * (1 / 3)).backward()
    assert_same(gradients(pipe.named_parameters()), gradients(whole.named_parameters()))


@pytest.mark.ranks
def test_a_list_gets_each_microbatchs_loss_on_every_rank_that_gives_one(everyone):
    (inputs, target), whole, expected, fewer = data("mlp", ROWS), OneProcess(*make("mlp"), None, M), [], []
    whole.step(inputs, target=target, losses=expected), whole.step(inputs[:2], target=target[:2], losses=fewer)
    for rank, (*_, (loss, losses, _, plain, few, _)) in enumerate(everyone):
        assert torch.equal(loss, plain)
        assert losses is None if rank == 0 else len(losses) == M and all(map(torch.equal, losses, expected))
        assert_as_one_process([few], fewer)


@pytest.mark.ranks
def test_the_outputs_of_a_training_step_are_on_the_last_stages_rank_detached(everyone):
    inputs, target = data("mlp", ROWS)
    _, expected = OneProcess(*make("mlp"), None, M).step(inputs, target=target, return_outputs=True)
    for *_, (_, _, outputs, _, _, last) in everyone:
        assert (outputs is not None) == last
        assert outputs is None or (torch.equal(outputs, expected) and not outputs.requires_grad)


def counted(target):
    return (target != -100).sum()


@pytest.mark.ranks
def test_a_microbatchs_loss_has_its_auxiliary_losses_and_is_nan_where_nothing_counts():
    layers = [nn.Sequential(has_auxiliary_loss(lambda x: x.square().mean()), toy(lambda self, x: x * 2)) for _ in range(2)]
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.cross_entropy, "gpipe", 3, counted)
    inputs, target, losses = torch.eye(3), torch.tensor([1, -100, 2]), []
    inputs[1] = torch.nan  # what counts nothing adds nothing
    loss = pipe.step(inputs, target=target, losses=losses)
    own = nn.functional.cross_entropy(inputs[:1] * 4, target[:1]) + 1 / 3 + 4 / 3
    assert [loss.isnan().item() for loss in losses] == [False, True, False]
    torch.testing.assert_close(losses[0], own)
    torch.testing.assert_close((losses[0] + losses[2]) / 2, loss)


# -- rows by replica ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "replicas"), [(12, 1), (12, 3), (11, 3), (5, 4), (4, 4), (7, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_row_is_lost_or_doubled_over_epochs_and_replicas_have_as_many(rows, replicas, shuffle):
    samplers = [ReplicaSampler(rows, replica, replicas, shuffle, seed=5) for replica in range(replicas)]
    taken, epochs = [], 2 * rows
    for _ in range(epochs):
        value = [list(sampler) for sampler in samplers]
        assert {len(numbers) for numbers in value} == {len(samplers[0])} == {rows // replicas}
        taken += [numbers[place] for place in range(rows // replicas) for numbers in value]
    shuffles = [taken[first : first + rows] for first in range(0, len(taken) - rows + 1, rows)]
    assert all(sorted(numbers) == list(range(rows)) for numbers in shuffles)
    assert (len({tuple(numbers) for numbers in shuffles}) > 1) == shuffle


def test_each_iteration_is_the_next_epoch_and_a_resumed_one_goes_on_where_it_was_told():
    sampler, again = ReplicaSampler(10, 1, 3), ReplicaSampler(10, 1, 3)
    epochs = [list(sampler) for _ in range(5)]
    assert epochs[0] != epochs[1]
    again.set_epoch(3)
    assert [list(again), list(again)] == epochs[3:]
    assert list(ReplicaSampler(10, 1, 3, seed=1)) != epochs[0]


def rank_samples():
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(make("mlp")[0], mesh=mesh, microbatches=2)
    return mesh.get_local_rank("dp"), list(pipe.sampler(range(10))), error_text(lambda: pipe.sampler(range(1)))


@pytest.mark.ranks
def test_the_ranks_of_a_pipeline_sample_the_same_rows_and_replicas_others():
    everyone = on_ranks(rank_samples, 4)
    by_replica = {replica: numbers for replica, numbers, _ in everyone}
    assert all(numbers == by_replica[replica] for replica, numbers, _ in everyone)
    assert sorted(by_replica[0] + by_replica[1]) == list(range(10))
    assert {text for *_, text in everyone} == {"1 rows cannot be shared out over 2 replicas (dp): each needs one"}


@pytest.mark.ranks
def test_a_dataset_without_a_length_is_refused_with_what_to_do():
    with pytest.raises(ps.MismatchError, match="no length to sample from: let it share its rows out itself"):
        ps.Pipeline(make("mlp")[0], microbatches=2).sampler(iter([1]))


# -- groups of like lengths --------------------------------------------------------------------------------------------


def rank_groups():
    pipe = ps.Pipeline(make("mlp")[0], microbatches=3)
    lengths = [1 + (7 * row) % 13 for row in range(23)]
    batches = pipe.batches(range(23), rows=10, length=lengths)
    epochs = [list(batches) for _ in range(3)]
    again = pipe.batches(range(23), rows=10, length=lambda row: 1 + (7 * row) % 13)
    again.set_step(4)
    return len(batches), epochs, [list(again), list(again)]


@pytest.mark.ranks
def test_groups_have_every_row_once_an_epoch_and_a_resumed_training_goes_on_in_the_same_ones():
    (steps, epochs, resumed), other = on_ranks(rank_groups, 2)
    assert (steps, epochs, resumed) == other == tuple(on_ranks(rank_groups, 1)[0])
    assert steps == 3
    assert all(sorted(row for groups in epoch for group in groups for row in group) == list(range(23)) for epoch in epochs)
    assert [len(groups) for groups in epochs[0]] == [3, 3, 3]
    assert [sum(map(len, groups)) for groups in epochs[0]] == [10, 10, 3]
    assert epochs[0] != epochs[1]
    assert resumed == [epochs[1][1:], epochs[2]]


@pytest.mark.ranks
def test_groups_that_cannot_be_are_refused():
    pipe = ps.Pipeline(make("mlp")[0], microbatches=2)
    with pytest.raises(ps.MismatchError, match="rows=0: give the number of rows of a step"):
        pipe.batches(range(5), rows=0, length=[1] * 5)
    with pytest.raises(ps.MismatchError, match="there are 4 lengths for 5 rows"):
        pipe.batches(range(5), rows=2, length=[1] * 4)


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "data.md").read_text(encoding="utf-8")


def rank_page(blocks):
    names = {"__name__": "a page"}
    for block in blocks:
        exec(compile(block, "data.md", "exec"), names)
    last = names["train"]()
    names["classify"](torch.randn(5, ROWS, 8), torch.arange(ROWS) % 3)
    pipe = ps.Pipeline(*make("mlp"), "1f1b", M)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    batches = [data("mlp", ROWS, seed) for seed in range(4)]
    names["accumulate"](pipe, optimizer, batches, k=2)
    loss, losses, _, report = names["results"](pipe, *batches[0])
    fields = {name: getattr(report, name) for name in re.findall(r"`(\w+)` \(", PAGE.partition("pipe.report` has")[2])}
    return last, pipe.state_dict(), len(losses), loss.item(), len(fields)


@pytest.mark.ranks
def test_the_pages_code_runs_and_accumulates_as_one_process():
    everyone = on_ranks(rank_page, 2, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    whole, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for pair in (range(2), range(2, 4)):
        for seed in pair:
            accumulate(whole, loss_fn, data("mlp", ROWS, seed), M)
        for parameter in whole.parameters():
            parameter.grad *= 0.5  # exact
        optimizer.step()
        optimizer.zero_grad()
    loss = accumulate(whole, loss_fn, data("mlp", ROWS, 0), M)
    assert_same(merged([state for _, state, *_ in everyone]), whole.state_dict())
    for last, _, count, result, fields in everyone:
        assert last == everyone[0][0]
        assert (count, result, fields) == (M, loss.item(), 5)  # makespan, busy, bubble, between, averaging
