"""The numbers of one process: every comparison here is `torch.equal`."""

import gc
import re
import weakref
from functools import cache
from itertools import product

import pytest
import torch
from reference import accumulate, assert_same, data, gradients, make, merged
from runners import on_ranks
from slow_cases import slow_except
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

SCHEDULES = ("naive", "gpipe", "1f1b")
MICROBATCHES = (1, 2, 3, 5, 8)
UNEVEN = 5  # rows
GRID = [  # each schedule with each M; the models and splits take turns, so that each meets each M
    (schedule, microbatches, ("mlp", "gpt")[number % 2], ("even", "uneven")[number // 2 % 2])
    for number, (schedule, microbatches) in enumerate(product(SCHEDULES, MICROBATCHES))
]


def rows_of(split, microbatches):
    return 2 * microbatches if split == "even" else UNEVEN


def rank_grid():
    """Two steps of every combination, without an optimizer between."""
    results = {}
    for schedule, microbatches, kind, split in GRID:
        model, loss_fn = make(kind)
        pipe = ps.Pipeline(model, loss_fn, schedule=schedule, microbatches=microbatches)
        losses = []
        for seed in (3, 4):
            inputs, target = data(kind, rows_of(split, microbatches), seed)
            losses.append(pipe.step(inputs, target=target))
        results[schedule, microbatches, kind, split] = losses, gradients(pipe.named_parameters())
    return results


@cache
def alone(microbatches, kind, split):
    """The same of one process, which has no schedule."""
    model, loss_fn = make(kind)
    batches = [data(kind, rows_of(split, microbatches), seed) for seed in (3, 4)]
    return [accumulate(model, loss_fn, batch, microbatches) for batch in batches], gradients(model.named_parameters())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.kernels), *slow_except((), (3, 4))])
def test_loss_and_gradients_are_those_of_one_process(ranks):
    everyone = on_ranks(rank_grid, ranks)
    for schedule, microbatches, kind, split in GRID:
        expected, whole = alone(microbatches, kind, split)
        results = [result[schedule, microbatches, kind, split] for result in everyone]
        for losses, _ in results:
            assert all(map(torch.equal, losses, expected)), (schedule, microbatches, kind, split)
        assert_same(merged([grads for _, grads in results]), whole)


def rank_steps(kind, schedule, microbatches, dropout, steps):
    model, loss_fn = make(kind, dropout)
    pipe = ps.Pipeline(model, loss_fn, schedule=schedule, microbatches=microbatches, seed=5)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, target = data(kind, 9, seed=step)
        losses.append(pipe.step(inputs, target=target))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, pipe.state_dict()


@pytest.mark.slow
def test_after_fifty_clipped_optimizer_steps_the_weights_are_those_of_one_process():
    model, loss_fn = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(50):
        losses.append(accumulate(model, loss_fn, data("mlp", 9, seed=step), 4))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    everyone = on_ranks(rank_steps, 3, "mlp", "1f1b", 4, 0.0, 50)
    assert all(all(map(torch.equal, ours, losses)) for ours, _ in everyone)
    assert_same(merged([state for _, state in everyone]), model.state_dict())


def test_dropout_draws_the_same_for_every_schedule_cut_and_number_of_ranks():
    [(losses, state)] = on_ranks(rank_steps, 1, "gpt", "naive", 4, 0.2, 10)
    for ranks, schedule in ((2, "gpipe"), (4, "1f1b")):
        everyone = on_ranks(rank_steps, ranks, "gpt", schedule, 4, 0.2, 10)
        assert all(all(map(torch.equal, ours, losses)) for ours, _ in everyone)
        assert_same(merged([part for _, part in everyone]), state)
    [(without, _)] = on_ranks(rank_steps, 1, "gpt", "naive", 4, 0.0, 1)
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


def rank_masked():
    results = []
    for counted in MASKS:
        model, loss_fn = make("gpt")
        pipe = ps.Pipeline(model, loss_fn, microbatches=3, loss_weight=counted_tokens)
        tokens, target = masked(5, counted)
        results.append((pipe.step(tokens, target=target), gradients(pipe.named_parameters())))
    return results


def test_a_token_mean_weighs_microbatches_by_counted_tokens_and_an_empty_one_adds_nothing():
    everyone = on_ranks(rank_masked, 2)
    for number, counted in enumerate(MASKS[:2]):
        model, loss_fn = make("gpt")
        loss = accumulate(model, loss_fn, masked(5, counted), 3, weight=counted_tokens)
        assert all(torch.equal(result[number][0], loss) for result in everyone)
        assert_same(merged([result[number][1] for result in everyone]), gradients(model.named_parameters()))
        whole, _ = make("gpt")
        tokens, target = masked(5, counted)
        torch.testing.assert_close(loss, loss_fn(whole(tokens), target))
    assert all(result[2][0] == 0 and set(result[2][1].values()) == {None} for result in everyone)


# -- evaluation, other sizes ----------------------------------------------------------------------------------------


class StatisticsNorm(nn.BatchNorm1d):
    """A BatchNorm, whose running statistics an evaluation must not touch."""


def with_norm():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 6), StatisticsNorm(6), nn.ReLU(), nn.Linear(6, 6), StatisticsNorm(6), nn.Linear(6, 3))


def rank_norm_and_eval():
    pipe = ps.Pipeline(with_norm(), nn.functional.cross_entropy, microbatches=2)
    inputs, target = data("mlp", 8)
    pipe.step(inputs, target=target)
    before = gradients(pipe.named_parameters()), {k: v.clone() for k, v in pipe.state_dict().items()}
    outputs, loss = pipe.eval(inputs, target=target)
    alone = pipe.eval(inputs)
    after = gradients(pipe.named_parameters()), {k: v.clone() for k, v in pipe.state_dict().items()}
    pipe.step(inputs, target=target)
    return before, after, outputs, loss, alone, gradients(pipe.named_parameters()), pipe.state_dict()


def test_eval_touches_no_gradient_and_no_buffer_and_batchnorm_updates_once_for_each_microbatch():
    everyone = on_ranks(rank_norm_and_eval, 2)
    model, (inputs, target) = with_norm(), data("mlp", 8)
    accumulate(model, nn.functional.cross_entropy, (inputs, target), 2)
    for before, after, *_ in everyone:
        assert_same(after[0], before[0])
        assert_same(after[1], before[1])
    state = merged([result[0][1] for result in everyone])
    assert_same(state, model.state_dict())
    assert state["1.num_batches_tracked"] == 2
    model.eval()
    with torch.no_grad():
        halves = [model(half) for half in inputs.tensor_split(2)]
    assert everyone[0][2] is None
    assert everyone[0][4] is None
    assert torch.equal(everyone[1][2], torch.cat(halves))
    assert torch.equal(everyone[1][4], torch.cat(halves))
    expected = sum(nn.functional.cross_entropy(half, t) * 0.5 for half, t in zip(halves, target.tensor_split(2), strict=True))
    assert all(torch.equal(result[3], expected) for result in everyone)
    accumulate(model.train(), nn.functional.cross_entropy, (inputs, target), 2)
    assert_same(merged([result[5] for result in everyone]), gradients(model.named_parameters()))


SIZES = (8, 5, 8, 2, 1, 13)


def rank_sizes():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, microbatches=4)
    losses = []
    for rows in SIZES:
        inputs, target = data("mlp", rows, seed=rows)
        losses.append(pipe.step(inputs, target=target))
    return losses, gradients(pipe.named_parameters())


def test_a_batch_of_another_size_in_the_next_step_is_right_also_with_fewer_rows_than_microbatches():
    everyone = on_ranks(rank_sizes, 3)
    model, loss_fn = make("mlp")
    expected = [accumulate(model, loss_fn, data("mlp", rows, seed=rows), 4) for rows in SIZES]
    assert all(all(map(torch.equal, losses, expected)) for losses, _ in everyone)
    assert_same(merged([grads for _, grads in everyone]), gradients(model.named_parameters()))


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
    model, loss_fn = make("gpt", 0.1)
    pipe = ps.Pipeline(model, loss_fn, schedule=table)
    inputs, target = data("gpt", 7)
    losses = [pipe.step(inputs, target=target), pipe.step(inputs, target=target)]
    return losses, gradients(pipe.named_parameters()), pipe.eval(inputs)


def test_a_reversed_order_on_the_last_stage_keeps_the_outputs_in_the_order_of_the_rows():
    everyone = on_ranks(rank_table, 2, reversed_on_the_last())
    losses, grads, outputs = on_ranks(rank_table, 1, one_stage(range(4), reversed(range(4))))[0]
    assert all(all(map(torch.equal, result[0], losses)) for result in everyone)
    assert torch.equal(everyone[1][2], outputs)
    last_layers = {name: grads[name] for name in everyone[1][1]}
    assert_same(everyone[1][1], last_layers)  # the first stage's backwards come in another order, and so do its sums


def skipping():
    """Two stages on ranks 0 and 2; rank 1 has nothing to do."""
    rows = [["0F0", "0F1", "0B0", "0B1"], [], ["1F0", "1B0", "1F1", "1B1"]]
    return ps.schedule.from_rows("skipping", [map(ps.schedule.Action.parse, row) for row in rows], placement=(0, 2))


def rank_without_a_stage():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, schedule=skipping())
    inputs, target = data("mlp", 6)
    losses = [pipe.step(inputs, target=target), pipe.step(inputs, target=target)]
    return losses, gradients(pipe.named_parameters()), pipe.report.bubble


def test_a_rank_without_a_stage_takes_part():
    everyone = on_ranks(rank_without_a_stage, 3)
    model, loss_fn = make("mlp")
    expected = [accumulate(model, loss_fn, data("mlp", 6), 2) for _ in range(2)]
    assert all(all(map(torch.equal, losses, expected)) for losses, _, _ in everyone)
    assert_same(merged([grads for _, grads, _ in everyone]), gradients(model.named_parameters()))
    assert all(0 < bubble < 1 for _, _, bubble in everyone)


def rank_csv(path):
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, schedule=path)
    inputs, target = data("mlp", 8)
    return pipe.step(inputs, target=target), pipe.schedule.microbatches


@pytest.mark.smoke
def test_a_table_from_a_file_runs(tmp_path):
    path = str(tmp_path / "mine.csv")
    ps.schedule.build("1f1b", ranks=2, microbatches=3).to_csv(path)
    model, loss_fn = make("mlp")
    expected = accumulate(model, loss_fn, data("mlp", 8), 3)
    for loss, microbatches in on_ranks(rank_csv, 2, path):
        assert microbatches == 3
        assert torch.equal(loss, expected)


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
