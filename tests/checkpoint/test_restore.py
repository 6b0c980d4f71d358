"""Training that was stopped and resumed, with whatever cut, ranks and schedule, ends in the bits of one never stopped."""

import json
import os
import random
import re
import shutil
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from models import OPTIMIZERS, Oddities
from prompt import penstock
from reference import assert_same, data, make, merged
from runners import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.commands.cli import main
from penstock.commands.train.config import TrainConfig, saved_options
from penstock.commands.train.job import train_rank
from penstock.commands.train.setup import token_loss

pytestmark = pytest.mark.ranks

UNTIL = 6


def rank_train(folder, schedule, until, resumed=None, options=None):
    """Adam, a learning rate that changes, dropout, clipping; a checkpoint after every step, written beside the next one."""
    random.seed(7)
    np.random.seed(7)
    model, loss_fn = make("gpt", dropout=0.2, depth=5)
    pipe = ps.Pipeline(model, loss_fn, schedule, microbatches=4, **(options or {}))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=UNTIL)
    drawn = []
    if resumed:
        drawn = checkpoint.resume(resumed, pipe, optimizer, rate)["drawn"]
    saving = None
    for step in range(pipe.step_count, until):
        inputs, target = data("gpt", 8, seed=step)
        pipe.step(inputs, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        drawn.append((random.random(), torch.rand(1).item(), np.random.rand(), np.random.randn()))
        if folder:
            saving = checkpoint.save(folder, pipe, optimizer, rate, {"drawn": drawn}, keep=9, wait=False)
    if saving:
        saving.wait()
    return pipe.state_dict(), drawn


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """Four ranks, a checkpoint of every step, and what all of it came to."""
    folder = tmp_path_factory.mktemp("run")
    everyone = on_ranks(rank_train, 4, folder, "1f1b", UNTIL)
    return folder, merged([state for state, _ in everyone]), everyone[0][1]


@pytest.mark.parametrize(
    ("ranks", "schedule", "options"),
    [
        (2, "1f1b", {}),
        (1, "gpipe", {}),
        (2, "interleaved-1f1b", {"stages_per_rank": 2}),
        pytest.param(3, "gpipe", {}, marks=pytest.mark.slow),
        pytest.param(4, "zb-h1", {}, marks=pytest.mark.slow),
        pytest.param(4, "1f1b", {"cuts": ["block0", "block1", "head"]}, marks=pytest.mark.slow),
    ],
)
def test_stopped_anywhere_and_resumed_on_any_ranks_ends_in_the_same_bits(never_stopped, ranks, schedule, options):
    folder, expected, drawn = never_stopped
    stopped = folder / f"step-{random.randrange(1, UNTIL):08d}"
    everyone = on_ranks(rank_train, ranks, None, schedule, UNTIL, stopped, options)
    assert_same(merged([state for state, _ in everyone]), expected)
    assert everyone[0][1] == drawn, stopped  # Python's, numpy's and torch's own generators go on too


def test_a_run_that_was_stopped_twice_ends_in_the_same_bits_too(never_stopped, tmp_path):
    _, expected, drawn = never_stopped
    on_ranks(rank_train, 3, tmp_path, "zb-h2", 2)
    on_ranks(rank_train, 2, tmp_path, "1f1b", 5, tmp_path)
    state, again = on_ranks(rank_train, 1, tmp_path, "gpipe", UNTIL, tmp_path)[0]
    assert_same(state, expected)
    assert again == drawn


# ---- every optimizer


def rank_optimize(folder, resumed):
    states = {}
    for name, make_optimizer in OPTIMIZERS.items():
        torch.manual_seed(3)
        pipe = ps.Pipeline(nn.Sequential(Oddities(), Oddities(), nn.Flatten(), nn.Linear(64, 2)), nn.functional.mse_loss)
        decayed = [p for p in pipe.parameters() if p.dim() > 1]
        others = [p for p in pipe.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.1}]
        optimizer = make_optimizer(groups if name != "Adagrad" else groups[::-1])
        generator = torch.Generator().manual_seed(5)
        batches = [(torch.randn(8, 4, 4, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(4)]
        if resumed:
            assert checkpoint.resume(folder / name, pipe, optimizer) == {}
        for inputs, target in batches[pipe.step_count :]:
            pipe.step(inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.step_count == 2:
                checkpoint.save(folder / name, pipe, optimizer)
        layouts = [p.is_contiguous(memory_format=torch.channels_last) for p in decayed if p.dim() == 4]
        kept = [v for p in decayed if p.dim() == 4 for v in optimizer.state[p].values() if v is not None and v.shape == p.shape]
        assert all(layouts), name
        assert all(value.stride() == decayed[0].stride() for value in kept), name
        states[name] = {key: value for key, value in pipe.state_dict().items() if isinstance(value, torch.Tensor)}
    return states


@pytest.mark.slow
def test_any_optimizer_and_any_tensor_goes_on_with_its_bits(tmp_path):
    everyone = on_ranks(rank_optimize, 3, tmp_path, False)
    again = on_ranks(rank_optimize, 1, tmp_path, True)[0]
    for name in OPTIMIZERS:
        assert_same(again[name], merged([result[name] for result in everyone]))
    shutil.rmtree(tmp_path / "RAdam")
    with pytest.warns(UserWarning, match="_extra_state"):
        checkpoint.export_checkpoint(tmp_path / "Adam", tmp_path / "out.safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    assert {"0.count", "0.seen", "0.none", "0.narrow", "1.conv.weight"} <= exported.keys()


# ---- tied weights


def tied(tie=True):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17, bias=False))
    if tie:
        model[3].weight = model[0].weight
    return model


def rank_tied(folder, begin):
    pipe = ps.Pipeline(tied(), token_loss, microbatches=2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    if begin:
        checkpoint.resume(folder, pipe, optimizer)
    for step in range(begin, begin + 2):
        tokens, target = data("gpt", 4, seed=step)
        pipe.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, pipe, optimizer)
    checkpoint.export(pipe, folder / f"{begin}.safetensors")
    before = pipe.state_dict()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in pipe.named_parameters()}
    again = ps.Pipeline(tied(), token_loss, microbatches=2)
    checkpoint.import_weights(again, folder / f"{begin}.safetensors")
    assert_same(again.state_dict(), before)
    return {name: value.clone() for name, value in before.items()}, {name: value.clone() for name, value in moments.items()}


def test_a_tied_parameter_is_kept_once_and_every_owner_gets_it_back(tmp_path):
    before = on_ranks(rank_tied, 3, tmp_path, 0)
    newest = tmp_path / "step-00000002"
    content = json.loads((newest / "manifest.json").read_text())
    assert content["aliases"] == {"3.weight": "0.weight"}
    names = set(TensorFiles(newest).shapes)
    assert "model.0.weight" in names
    assert not {"model.3.weight", "optimizer.3.weight.exp_avg"} & names
    exported = load_file(tmp_path / "0.safetensors")
    assert_same(exported, merged([state for state, _ in before]))
    tied().load_state_dict(exported)
    checkpoint.export_checkpoint(newest, tmp_path / "offline.safetensors")
    assert_same(load_file(tmp_path / "offline.safetensors"), exported)

    for ranks in (1, 2):  # other owners
        pipe = ps.Pipeline(tied(), token_loss, microbatches=2) if ranks == 1 else None
        if pipe:
            checkpoint.resume(newest, pipe, optimizer := torch.optim.AdamW(pipe.parameters(), lr=0.1))
            assert_same(pipe.state_dict(), exported)
            moments = merged([moments for _, moments in before])
            assert_same({name: optimizer.state[p]["exp_avg"] for name, p in pipe.named_parameters()}, moments)
        else:
            folder = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
            after = merged([state for state, _ in on_ranks(rank_tied, ranks, folder, 2)])
            assert torch.equal(after["0.weight"], after["3.weight"])

    del exported["0.weight"]  # as other programs write it: under one name, whichever
    save_file(exported, tmp_path / "one.safetensors")
    checkpoint.import_weights(again := ps.Pipeline(tied(), token_loss), tmp_path / "one.safetensors")
    assert torch.equal(again.state_dict()["0.weight"], exported["3.weight"])
    with pytest.raises(ps.MismatchError, match=r"1 missing \(0\.weight\)"):
        checkpoint.import_weights(ps.Pipeline(tied(tie=False), token_loss), tmp_path / "one.safetensors")
    checkpoint.resume(newest, apart := ps.Pipeline(tied(tie=False), token_loss))
    assert torch.equal(apart.state_dict()["3.weight"], exported["3.weight"])


# ---- every learning-rate schedule


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 2, 4]),
        partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1)),
        partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, step_size_up=2),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
            milestones=[2],
        ),
    ],
)
def test_a_learning_rate_schedule_goes_on_where_it_was(tmp_path, scheduler):
    def made():
        pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        return pipe, optimizer, scheduler(optimizer)

    def rates(optimizer, rate, steps):
        for _ in range(steps):
            optimizer.step()
            rate.step(*[1.0] * isinstance(rate, torch.optim.lr_scheduler.ReduceLROnPlateau))
            yield rate.get_last_lr()

    pipe, optimizer, rate = made()
    list(rates(optimizer, rate, 3))
    checkpoint.save(tmp_path, pipe, optimizer, rate)
    pipe, again, rate_again = made()
    checkpoint.resume(tmp_path, pipe, again, rate_again)
    assert list(rates(again, rate_again, 4)) == list(rates(optimizer, rate, 4))


# ---- the command


SMALL = ["--batch", "8", "--width", "16", "--context", "16", "--layers", "3", "--microbatches", "4", "--dropout", "0.1"]


@pytest.fixture
def here(monkeypatch, capsys):
    """The same in this process, for what starts no ranks: all that it told."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "1000")
        try:
            main()
            ended = ""
        except SystemExit as error:
            ended = str(error)
        return ended + "".join(capsys.readouterr())

    return run


@pytest.mark.slow
def test_penstock_train_goes_on_with_a_run_and_export_writes_its_weights(tmp_path, here):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    done = penstock(
        "train", "--ranks", 2, "--steps", 6, "--checkpoint-every", 2, "--data", text, "--out", tmp_path / "runs", *SMALL
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    expected = load_file(run / "model.safetensors")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [path.name for path in sorted(run.glob("step-*"))] == ["step-00000002", "step-00000004", "step-00000006"]

    os.remove(run / "model.safetensors")  # as if it had been killed in step 5, while it wrote a line
    shutil.rmtree(run / "step-00000006")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    again = penstock("train", "--resume", run, "--ranks", 3, "--schedule", "zb-h1", "--keep", 2)
    assert again.returncode == 0, again.stderr
    assert "3 ranks  step 6/6" in again.stdout
    assert_same(load_file(run / "model.safetensors"), expected)
    resumed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(result["step"], result["loss"]) for result in resumed] == [(record["step"], record["loss"]) for record in records]
    assert json.loads((run / "run.json").read_text())["losses"] == [record["loss"] for record in records]
    assert [path.name for path in sorted(run.glob("*step-*"))] == ["step-00000004", "step-00000006"]

    assert re.search(r"wrote .*out\.safetensors from .*step-00000006", here("export", run, tmp_path / "out.safetensors"))
    assert_same(load_file(tmp_path / "out.safetensors"), expected)

    with pytest.raises(ps.PenstockError, match="is at step 6: give --steps 6 or more, not 5"):
        ps.launch(train_rank, 1, TrainConfig(**{**saved_options(run), "data": text, "steps": 5, "resume": run}), run)
    wider = here("train", "--resume", run, "--width", 32)
    assert re.search("--width 32: the run in .* has 16, and a resumed run keeps it: leave out --width", wider)
    assert f"is no run, it has no run.json (did you mean {run}?)" in here("train", "--resume", str(run)[:-1])


def rank_train_in_float16(folder, until, resumed):
    """A scaler whose scale begins too high: it skips steps at first, and then grows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    scaler = ShardedGradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    pipe = ps.Pipeline(model, torch.nn.functional.mse_loss, microbatches=2, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    if resumed:
        checkpoint.resume(folder, pipe, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(pipe.step_count, until):
            optimizer.zero_grad()
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.float16):
                pipe.step(rows, target=rows[:, :4])
            scaler.step(optimizer)
            scaler.update()
            checkpoint.save(folder, pipe, optimizer)
    return pipe.state_dict(), scaler.state_dict()


def test_the_scaler_of_a_pipeline_goes_on_with_its_scale(tmp_path):
    for folder, runs in (("whole", [12]), ("stopped", [3, 7, 12])):
        for number, until in enumerate(runs):
            everyone = on_ranks(rank_train_in_float16, 2, tmp_path / folder, until, number > 0)
        state, scale = merged([state for state, _ in everyone]), everyone[0][1]
        if folder == "whole":
            expected = state, scale
    assert scale == expected[1]
    assert scale["scale"] < 2.0**40
    assert_same(state, expected[0])


def warnings_of_resume(folder, *state, **options):
    model = torch.nn.Linear(4, 4)
    pipe = ps.Pipeline([model], torch.nn.functional.mse_loss, topology=ps.Topology(), **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    given = {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.resume(folder, pipe, *[given[name] for name in state])
    return [str(warning.message).removeprefix(f"{folder}/step-00000000 ") for warning in caught]


def test_a_training_that_resumes_without_a_part_of_its_state_is_told(tmp_path):
    scaler = torch.amp.GradScaler("cpu")
    pipe = ps.Pipeline([torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss, topology=ps.Topology(), scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    checkpoint.save(tmp_path, pipe, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert warnings_of_resume(tmp_path, "optimizer", "scheduler", scaler=scaler) == []
    assert warnings_of_resume(tmp_path, "optimizer", scaler=scaler) == [
        "holds the state of a learning-rate schedule, which is not restored: checkpoint.resume(.., pipe, optimizer, scheduler) "
        "restores it"
    ]
    assert warnings_of_resume(tmp_path) == [
        "holds the state of SGD, a learning-rate schedule, a GradScaler, which is not restored: checkpoint.resume(.., pipe, "
        "optimizer, scheduler) and Pipeline(.., scaler=scaler) restore it"
    ]


def test_weights_that_are_resumed_without_an_optimizer_are_not_told(tmp_path):
    pipe = ps.Pipeline([torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss, topology=ps.Topology())
    checkpoint.save(tmp_path, pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.resume(tmp_path, ps.Pipeline([torch.nn.Linear(4, 4)], topology=ps.Topology()))


class DataSGD(torch.optim.SGD):
    """Changes `.data`, of which autograd does not know."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, DataSGD])
def test_gradients_await_the_optimizer_until_its_step_however_it_changes_weights(optimizer_class):
    pipe = ps.Pipeline([torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss, microbatches=2, topology=ps.Topology())
    optimizer, awaited = optimizer_class(pipe.parameters(), lr=0.1), []
    for _ in range(4):
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        awaited.append(pipe._update_check.awaits_optimizer_step())
        optimizer.step()
        awaited.append(pipe._update_check.awaits_optimizer_step())
        optimizer.zero_grad()
    assert awaited == [True, False] * 4


def test_an_optimizer_that_changes_data_has_stepped_though_weights_were_clipped_in_the_step_before():
    pipe = ps.Pipeline([torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss, microbatches=2, topology=ps.Topology())
    optimizer, awaited = DataSGD(pipe.parameters(), lr=0.1), []
    for _ in range(3):
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        optimizer.step()
        awaited.append(pipe._update_check.awaits_optimizer_step())
        if len(awaited) == 1:
            with torch.no_grad():
                next(pipe.parameters()).clamp_(-0.5, 0.5)  # a new version, as loading weights makes
        optimizer.zero_grad()
    assert awaited == [False] * 3


def rank_saves_between(folder):
    """How often a save warned: in the middle of an accumulation, at its end, with gradients that have been used, in float16."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    pipe = ps.Pipeline(model, torch.nn.functional.mse_loss, microbatches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    counts = []

    def save(given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(folder, pipe, given)
        counts.append([str(warning.message) for warning in caught])

    save(optimizer)  # before the first step
    for _ in range(2):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4), scale=0.5)
        save(optimizer)
    save(None)
    for parameter in pipe.parameters():
        parameter.data -= 0.1 * parameter.grad
    save(optimizer)
    optimizer.zero_grad()
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    optimizer.step()
    save(optimizer)
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_in_the_middle_of_an_accumulation_is_a_warning(tmp_path, ranks):
    counts = on_ranks(rank_saves_between, ranks, tmp_path)
    assert [len(count) for count in counts[0]] == [0, 1, 1, 0, 0, 0]
    assert counts[0][1][0].startswith("checkpoint.save() comes between pipe.step() and optimizer.step()")
    assert not any(map(any, counts[1:]))
