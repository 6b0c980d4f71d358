"""The numbers of one process: every comparison here is `torch.equal`."""

import gc
import re
import weakref

import pytest
import torch
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, data, gradients, make, stepped
from runners import on_ranks
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks


def trains(pipeline, kind, schedule, microbatches, dropout, steps):
    model, loss_fn = make(kind, dropout)
    pipe = pipeline(model, loss_fn, schedule=schedule, microbatches=microbatches, seed=5)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, target = data(kind, 9, seed=step)
        losses.append(pipe.step(inputs, target=target))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(pipe.state_dict())


@pytest.mark.slow
def test_after_fifty_clipped_optimizer_steps_the_weights_are_those_of_one_process():
    run = "mlp", "1f1b", 4, 0.0, 50
    assert_as_one_process(on_ranks(trains, 3, ps.Pipeline, *run), trains(OneProcess, *run))


def test_dropout_draws_the_same_for_every_schedule_cut_and_number_of_ranks():
    [(losses, state)] = on_ranks(trains, 1, ps.Pipeline, "gpt", "naive", 4, 0.2, 10)
    for ranks, schedule in ((2, "gpipe"), (4, "1f1b")):
        assert_as_one_process(on_ranks(trains, ranks, ps.Pipeline, "gpt", schedule, 4, 0.2, 10), (losses, state))
    without, _ = trains(OneProcess, "gpt", "naive", 4, 0.0, 1)
    assert not torch.equal(losses[0], without[0])


def rank_dropout_leaves_the_generator():
    model, loss_fn = make("gpt", 0.2)
    pipe = ps.Pipeline(model, loss_fn, microbatches=2)
    torch.manual_seed(11)
    inputs, target = data("gpt", 4)
    first = pipe.step(inputs, target=target)
    after = torch.rand(3)
    second = pipe.step(inputs, target=target)
    return first, second, after


def test_dropout_differs_between_steps_and_leaves_torchs_generator_alone():
    torch.manual_seed(11)
    undisturbed = torch.rand(3)
    for first, second, after in on_ranks(rank_dropout_leaves_the_generator, 2):
        assert not torch.equal(first, second)
        assert torch.equal(after, undisturbed)


# -- weights of microbatches ----------------------------------------------------------------------------------------


def masked(rows, counted):
    """Targets of which only `counted` of each row are not -100."""
    tokens, target = data("gpt", rows)
    keep = torch.arange(6)[None] < torch.tensor(counted)[:, None]
    return tokens, torch.where(keep, target, -100)


def counted_tokens(target):
    return (target != -100).sum()


MASKS = ([6, 1, 2, 0, 3], [0, 0, 4, 0, 5], [0, 0, 0, 0, 0])


def masked_steps(pipeline):
    results = []
    for counted in MASKS:
        pipe = pipeline(*make("gpt"), microbatches=3, loss_weight=counted_tokens)
        results.append(stepped(pipe, [masked(5, counted)]))
    return results


def test_a_token_mean_weighs_microbatches_by_counted_tokens_and_an_empty_one_adds_nothing():
    expected = masked_steps(OneProcess)
    assert_as_one_process(on_ranks(masked_steps, 2, ps.Pipeline), expected)
    for counted, ([loss], _) in zip(MASKS[:2], expected, strict=False):
        whole, loss_fn = make("gpt")
        tokens, target = masked(5, counted)
        torch.testing.assert_close(loss, loss_fn(whole(tokens), target).detach())
    [nothing], grads = expected[2]
    assert nothing == 0
    assert set(grads.values()) == {None}


# -- evaluation, other sizes ----------------------------------------------------------------------------------------


class StatisticsNorm(nn.BatchNorm1d):
    """A BatchNorm, whose running statistics an evaluation must not touch."""


def with_norm():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 6), StatisticsNorm(6), nn.ReLU(), nn.Linear(6, 6), StatisticsNorm(6), nn.Linear(6, 3))


def steps_around_an_evaluation(pipeline):
    pipe, (inputs, target) = pipeline(with_norm(), nn.functional.cross_entropy, microbatches=2), data("mlp", 8)
    pipe.step(inputs, target=target)
    before = gradients(pipe.named_parameters()), {name: value.clone() for name, value in pipe.state_dict().items()}
    outputs, loss = pipe.eval(inputs, target=target)
    evaluated = {"with a target": outputs, "without": pipe.eval(inputs)}
    assert_same(gradients(pipe.named_parameters()), before[0])
    assert_same(dict(pipe.state_dict()), before[1])
    pipe.step(inputs, target=target)
    on_last = {name: value for name, value in evaluated.items() if value is not None}
    return before, loss, on_last, gradients(pipe.named_parameters()), dict(pipe.state_dict())


def test_eval_touches_no_gradient_and_no_buffer_and_batchnorm_updates_once_for_each_microbatch():
    everyone, expected = on_ranks(steps_around_an_evaluation, 2, ps.Pipeline), steps_around_an_evaluation(OneProcess)
    assert_as_one_process(everyone, expected)
    assert expected[0][1]["1.num_batches_tracked"] == 2
    assert [len(evaluated) for _, _, evaluated, *_ in everyone] == [0, 2]


def steps_of_other_sizes(pipeline):
    pipe = pipeline(*make("mlp"), microbatches=4)
    return stepped(pipe, [data("mlp", rows, seed=rows) for rows in (8, 5, 8, 2, 1, 13)])


def test_a_batch_of_another_size_in_the_next_step_is_right_also_with_fewer_rows_than_microbatches():
    assert_as_one_process(on_ranks(steps_of_other_sizes, 3, ps.Pipeline), steps_of_other_sizes(OneProcess))


# -- tables ---------------------------------------------------------------------------------------------------------


def reversed_on_the_last():
    """GPipe whose last rank takes the microbatches from the end."""
    table = ps.schedule.build("gpipe", ranks=2, microbatches=4)
    turned = [action._replace(microbatch=3 - action.microbatch) for action in table.actions[-1]]
    return ps.schedule.from_rows("reversed", [*table.actions[:-1], turned], "loop")


def one_stage(forwards, backwards):
    rows = [ps.schedule.Action.parse(f"0{kind}{m}") for kind, order in (("F", forwards), ("B", backwards)) for m in order]
    return ps.schedule.from_rows("one", [rows], "loop")


def rank_table(table):
    pipe, batch = ps.Pipeline(*make("gpt", 0.1), schedule=table), data("gpt", 7)
    return *stepped(pipe, [batch, batch]), pipe.eval(batch[0])


def test_a_reversed_order_on_the_last_stage_keeps_the_outputs_in_the_order_of_the_rows():
    everyone = on_ranks(rank_table, 2, reversed_on_the_last())
    losses, grads, outputs = on_ranks(rank_table, 1, one_stage(range(4), reversed(range(4))))[0]
    assert all(all(map(torch.equal, result[0], losses)) for result in everyone)
    assert torch.equal(everyone[1][2], outputs)
    last_layers = {name: grads[name] for name in everyone[1][1]}
    assert_same(everyone[1][1], last_layers)  # the first stage's backwards come in another order, and so do its sums


def steps_without_a_stage(pipeline):
    """Two stages on ranks 0 and 2; rank 1 has nothing to do."""
    rows = [["0F0", "0F1", "0B0", "0B1"], [], ["1F0", "1B0", "1F1", "1B1"]]
    table = ps.schedule.from_rows("skipping", [map(ps.schedule.Action.parse, row) for row in rows], placement=(0, 2))
    pipe = pipeline(*make("mlp"), table, 2)
    numbers = stepped(pipe, [data("mlp", 6)] * 2)
    assert pipeline is OneProcess or 0 < pipe.report.bubble < 1
    return numbers


def test_a_rank_without_a_stage_takes_part():
    assert_as_one_process(on_ranks(steps_without_a_stage, 3, ps.Pipeline), steps_without_a_stage(OneProcess))


def rank_with_a_default_device(folder):
    """A step, saved, resumed and exported, generated text; model and batch are on the CPU."""
    model, loss_fn = make("gpt")
    tokens, target = data("gpt", 4)
    torch.set_default_device("meta")
    try:
        pipe = ps.Pipeline(model, loss_fn, "zb-h1", 2, loss_weight=len)
        optimizer = torch.optim.Adam(pipe.parameters())
        losses = []
        loss = pipe.step(tokens, target=target, losses=losses)
        pipe.clip_grad_norm_(1.0)
        with torch.device("cpu"):  # where torch 2.11's Adam is to begin its counts
            optimizer.step()
        ps.checkpoint.save(folder, pipe, optimizer)
        ps.checkpoint.resume(folder, pipe, optimizer)
        ps.checkpoint.DigestLog(folder, pipe, optimizer, every=1).record_step()
        ps.checkpoint.export(pipe, folder / "model.safetensors")
        ps.checkpoint.import_weights(pipe, folder / "model.safetensors")
        return loss, pipe.generate(tokens[:, :2], max_new_tokens=2, temperature=1.0)
    finally:
        torch.set_default_device(None)


def test_torchs_default_device_is_the_models_alone(tmp_path):
    model, loss_fn = make("gpt")
    for loss, text in on_ranks(rank_with_a_default_device, 2, tmp_path):
        assert torch.equal(loss, accumulate(model, loss_fn, data("gpt", 4), 2))
        assert text.shape == (4, 4)


def test_the_last_step_is_read_after_it_and_keeps_no_pipeline_alive():
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, microbatches=2)
    assert pipe.report is None
    with pytest.raises(ps.PenstockError, match="there is no timeline yet: run a step first"):
        pipe.timeline()
    pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    assert pipe.report.makespan == pipe.metrics()["makespan_seconds"] > 0
    assert len(pipe.timeline().rows[0]) == 2 * 2
    assert (pipe.lines(), pipe.clock_error) == ({}, 0.0)
    gc.disable()  # a folder's lock, for one, is free again when its pipeline is let go of
    try:
        alive = weakref.ref(pipe)
        del pipe
        assert alive() is None
    finally:
        gc.enable()


def test_a_table_has_its_own_number_of_microbatches_and_another_is_refused():
    table, model = ps.schedule.build("gpipe", 1, 3), nn.Sequential(nn.Linear(2, 2))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, table)
    assert (
        pipe.schedule.microbatches
        == ps.Pipeline(model, nn.functional.mse_loss, table, microbatches=3).schedule.microbatches
        == 3
    )
    message = "microbatches=8, but the table gpipe has 3: leave out microbatches=, or give a table that has as many"
    with pytest.raises(ps.MismatchError, match=re.escape(message)):
        ps.Pipeline(model, nn.functional.mse_loss, table, microbatches=8)
    assert ps.Pipeline(model, nn.functional.mse_loss).rebuild(table).schedule.microbatches == 3
