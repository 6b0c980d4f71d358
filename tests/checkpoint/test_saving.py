"""Checkpoints: whole or refused with the file named, never unpickled, none lost to a kill, a full disk or a later step."""

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import threading
import time
import warnings
from contextlib import suppress

import pytest
import torch
from error_text import error_text, outcome
from reference import assert_same
from runners import on_ranks
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import manifest, tensor_files

pytestmark = pytest.mark.ranks

STEPS = [1, 2, 3]


def pipeline(fill=0.0, width=8):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
    set_to(pipe, fill)
    return pipe


def set_to(pipe, value):
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(value)


def holds(pipe, value):
    return all(bool((parameter == value).all()) for parameter in pipe.parameters())


def rank_save(folder, steps=STEPS, keep=9):
    """Checkpoints whose weights are the number of the step, and Adam's state with them."""
    pipe = pipeline()
    optimizer = torch.optim.Adam(pipe.parameters())
    for step in steps:
        pipe.step(torch.randn(4, 8), target=torch.zeros(4, 2))
        optimizer.step()
        set_to(pipe, pipe.step_count)
        assert pipe.step_count == step
        checkpoint.save(folder, pipe, optimizer, extra={"position": step}, keep=keep)
    return pipe.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(rank_save, 2, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def resumed(folder, step, *message):
    """Resume in this process; it must come to `step`, having warned of each checkpoint in `told`."""
    pipe = pipeline()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = checkpoint.resume(folder, pipe)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(message), texts
    assert all(value in text for value, text in zip(message, texts, strict=True)), texts
    assert (pipe.step_count, extra) == (step, {"position": step})
    assert holds(pipe, step)
    return pipe


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << random.randrange(8)
    path.write_bytes(data)


# ---- what is in a folder


def test_a_folder_holds_safetensors_and_json_under_the_uncut_names(saved):
    assert sorted(path.name for path in saved.iterdir()) == [".writer", "step-00000001", "step-00000002", "step-00000003"]
    newest = saved / "step-00000003"
    content = json.loads((newest / "manifest.json").read_text())
    assert sorted(path.name for path in newest.iterdir()) == sorted([*content["files"], "manifest.json"])
    names = set(tensor_files.TensorFiles(newest).shapes)
    assert {"model.0.weight", "model.1.running_mean", "model.4.bias", "optimizer.4.bias.exp_avg", "random.1.torch"} <= names
    assert content["optimizers"][0]["groups"][0]["names"][0] == "0.weight"


def test_the_newest_comes_first_and_a_folder_of_one_checkpoint_is_taken_too(saved):
    resumed(saved, 3)
    resumed(saved / "step-00000002", 2)


def test_the_last_k_whole_ones_are_kept_and_what_broken_saves_left_is_deleted(tmp_path):
    (tmp_path / ".step-00000007.part").mkdir()
    rank_save(tmp_path, range(1, 5), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "step-00000003", "step-00000004"]


def test_a_damaged_one_does_not_count_among_those_kept(copy):
    flip(copy / "step-00000002" / "shard-00001-model-00001-of-00001.safetensors", -1)
    flip(copy / "step-00000003" / "shard-00001-model-00001-of-00001.safetensors", -1)
    pipe = resumed(copy, 1, "step-00000003", "step-00000002")
    pipe.step_count = 4
    checkpoint.save(copy, pipe, keep=2)
    assert {"step-00000001", "step-00000004"} <= {path.name for path in copy.iterdir()}


def test_going_back_and_saving_again_replaces_the_step_and_deletes_nothing_newer(copy):
    pipe = resumed(copy / "step-00000001", 1)
    pipe.step_count = 2
    set_to(pipe, 22)
    checkpoint.save(copy, pipe, keep=1)
    assert sorted(path.name for path in copy.iterdir()) == [".writer", "step-00000002", "step-00000003"]
    checkpoint.resume(copy / "step-00000002", again := pipeline())
    assert holds(again, 22)


def test_one_that_was_set_aside_when_a_kill_came_is_still_there(copy):
    (copy / "step-00000003").rename(copy / ".step-00000003.old")
    pipe = resumed(copy, 3)
    checkpoint.save(copy, pipe, extra={"position": 3})
    assert sorted(path.name for path in copy.iterdir()) == [".writer", "step-00000001", "step-00000002", "step-00000003"]
    shutil.copytree(copy / "step-00000002", copy / ".step-00000002.old")
    pipe.step_count = 4
    checkpoint.save(copy, pipe)
    assert not (copy / ".step-00000002.old").exists()


# ---- damage


@pytest.mark.parametrize("file", ["manifest.json", "shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001"])
@pytest.mark.parametrize("damage", ["a byte", "the first byte", "the last byte", "cut", "emptied", "missing", "longer"])
def test_a_damaged_file_is_named_and_the_newest_whole_checkpoint_taken(copy, file, damage):
    path = next((copy / "step-00000003").glob(f"{file}*"))
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    elif damage in ("cut", "emptied", "longer"):
        data = path.read_bytes()
        path.write_bytes(data + b"\n" if damage == "longer" else data[: random.randrange(1, size) if damage == "cut" else 0])
    else:
        flip(path, {"a byte": random.randrange(size), "the first byte": 0, "the last byte": -1}[damage])
    resumed(copy, 2, str(path))
    with pytest.raises(ps.MismatchError, match=re.escape(str(path))):
        checkpoint.resume(copy / "step-00000003", pipeline())


def test_every_byte_of_a_manifest_counts(copy):
    path = copy / "step-00000003" / "manifest.json"
    whole = path.read_bytes()
    for at in random.sample(range(len(whole)), 100):
        flip(path, at)
        with pytest.raises(manifest.DamagedFileError, match="manifest"):
            manifest.read(path.parent)
        path.write_bytes(whole)
    assert manifest.read(path.parent)["step"] == 3


def test_without_a_whole_checkpoint_every_damage_is_told_and_nothing_is_loaded(copy):
    for step in STEPS:
        (copy / f"step-0000000{step}" / "manifest.json").unlink()
    pipe = pipeline(0.5)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(ps.MismatchError) as caught:
        checkpoint.resume(copy, pipe)
    assert all(f"step-0000000{step}" in str(caught.value) for step in STEPS)
    assert holds(pipe, 0.5)
    (copy / "empty").mkdir()
    assert checkpoint.exists(copy)
    assert not checkpoint.exists(copy / "empty")
    assert not checkpoint.exists(copy / "nowhere")
    for folder in (copy / "empty", copy / "nowhere"):
        with pytest.raises(ps.PenstockError, match=re.escape(str(folder))):
            checkpoint.resume(folder, pipe)


def test_a_file_slipped_in_is_refused(copy):
    newest = copy / "step-00000003"
    shutil.copy(next(newest.glob("shard-00001*")), newest / "aaa.safetensors")
    resumed(copy, 2, str(newest / "aaa.safetensors"))


def rank_resume(folder):
    pipe = pipeline()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.resume(folder, pipe, torch.optim.Adam(pipe.parameters()))
        texts = [str(warning.message) for warning in caught]
    text = error_text(lambda: checkpoint.resume(folder / "step-00000003", pipe))
    return pipe.step_count, holds(pipe, pipe.step_count), texts, text


def test_all_ranks_agree_whichever_of_them_looked_at_the_damaged_file(copy):
    path = next((copy / "step-00000003").glob("shard-00002*"))
    flip(path, 1000)
    everyone = on_ranks(rank_resume, 3, copy)
    assert [result[:2] for result in everyone] == [(2, True)] * 3
    assert [len(result[2]) for result in everyone] == [1, 0, 0]
    assert str(path) in everyone[0][2][0]
    assert len({result[3] for result in everyone}) == 1
    assert str(path) in everyone[0][3]


# ---- pickles


class Evil:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


def test_a_pickle_in_a_checkpoint_never_runs(copy, tmp_path):
    flag = tmp_path / "it ran"
    torch.save(Evil(flag), tmp_path / "evil.safetensors")
    with pytest.raises(ps.MismatchError, match=r"evil\.safetensors"):
        checkpoint.import_weights(pipeline(), tmp_path / "evil.safetensors")
    newest = copy / "step-00000003"
    for name in (".metadata", "__0_0.distcp", "model.pt", "manifest.pkl"):
        (newest / name).write_bytes(pickle.dumps(Evil(flag)))
    resumed(copy, 3)
    (newest / "manifest.json").write_bytes(pickle.dumps(Evil(flag)))
    resumed(copy, 2, "manifest.json")
    other = copy / "step-00000009"
    other.mkdir()
    (other / ".metadata").write_bytes(pickle.dumps(Evil(flag)))
    with pytest.raises(ps.MismatchError, match=r"manifest\.json cannot be read"):
        checkpoint.resume(other, pipeline())
    assert not flag.exists()
    pickle.loads((newest / ".metadata").read_bytes())
    assert flag.exists()  # it would have


# ---- kills


def rank_saves_until_killed(folder, victim, delay, wait):
    pipe = pipeline()
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.step(torch.randn(4, 8), target=torch.zeros(4, 2))
    optimizer.step()
    rank = pipe.topology.rank
    before = None
    for step in range(1, 1000):
        set_to(pipe, step)
        pipe.step_count = step
        saving = checkpoint.save(folder, pipe, optimizer, extra={"position": step}, keep=2, wait=wait)
        done = step if wait else before and before[1]  # the save before has ended when another begins
        if rank == 0 and done:
            with (folder / "done").open("a") as file:
                file.write(f"{done}\n")
        before = saving, step
        if step == 2 and rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize("moment", slow_except(range(0, 12, 3), range(12)))
def test_a_kill_in_the_middle_of_a_save_costs_nothing_that_was_whole(tmp_path, moment):
    ranks, wait = 1 + moment // 6, moment % 2 == 0
    with suppress(ps.LostRankError):
        on_ranks(rank_saves_until_killed, ranks, tmp_path, moment // 2 % ranks, random.uniform(0, 0.06), wait)
    done = int((tmp_path / "done").read_text().splitlines()[-1])
    pipe = pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that has a checkpoint's name is broken
        step = checkpoint.resume(tmp_path, pipe)["position"]
    assert done <= step <= done + 2
    assert step == pipe.step_count
    assert holds(pipe, step)


# ---- beside the training


@pytest.fixture
def go_on(monkeypatch):
    """What files wait for before they are written."""
    write, event = tensor_files.write_shards, threading.Event()
    monkeypatch.setattr(tensor_files, "write_shards", lambda *args: [event.wait(), write(*args)][1])
    yield event
    event.set()


def test_a_save_beside_the_training_does_not_see_what_changes_later(tmp_path, go_on):
    pipe = pipeline(1)
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.step_count = 1
    saving = checkpoint.save(tmp_path, pipe, optimizer, extra={"position": 1}, wait=False)
    set_to(pipe, 7)
    assert not saving.path.exists()
    go_on.set()
    assert saving.wait() == tmp_path / "step-00000001"
    resumed(tmp_path, 1)


def test_the_next_save_waits_for_the_one_before_and_tells_its_error_once(tmp_path, go_on):
    pipe = pipeline()
    saving = checkpoint.save(tmp_path, pipe, wait=False)
    while not (tmp_path / ".step-00000000.part").exists():
        time.sleep(0.01)
    shutil.rmtree(tmp_path / ".step-00000000.part")
    (tmp_path / ".step-00000000.part").write_text("in the way")
    go_on.set()
    with pytest.raises(ps.PenstockError, match=r"rank 0 could not write the checkpoint .*step-00000000: File exists"):
        checkpoint.save(tmp_path, pipe)
    with pytest.raises(ps.PenstockError, match="could not write"):
        saving.wait()
    (tmp_path / ".step-00000000.part").unlink()
    assert checkpoint.save(tmp_path, pipe).wait().exists()


# ---- what cannot be written


def rank_cannot_write(folder):
    pipe = pipeline(1)
    rank = pipe.topology.rank
    optimizer = torch.optim.Adam(pipe.parameters())
    checkpoint.save(folder, pipe, optimizer)
    pipe.step_count = 1
    errors = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # its disk is full after 100 bytes
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, optimizer)))
    errors.append(outcome(checkpoint.save(folder, pipe, optimizer, wait=False).wait))
    errors.append(outcome(lambda: checkpoint.export(pipe, folder / "out.safetensors")))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files = sorted(path.name for path in folder.iterdir())
    errors.append(outcome(lambda: checkpoint.save(folder.parent / "file", pipe)))
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, extra={"what": object()})))
    pipe.step_count += rank
    errors.append(outcome(lambda: checkpoint.save(folder, pipe)))
    pipe.step_count = 1
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, optimizer if rank else None)))
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, optimizer, keep=1 + rank)))
    errors.append(outcome(lambda: checkpoint.save(folder.parent / f"per{rank}", pipe)))
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, torch.optim.Adam(pipe.parameters(), lr=1e-3 * (rank + 1)))))
    errors.append(outcome(lambda: checkpoint.save(folder, pipe, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))))
    checkpoint.save(folder, pipe, optimizer)
    checkpoint.resume(folder, pipe, optimizer)
    return errors, files, pipe.step_count


def test_what_a_rank_cannot_write_is_the_same_clear_error_on_all_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").touch()
    everyone = on_ranks(rank_cannot_write, 2, tmp_path / "run")
    assert everyone[0][0][:-1] == everyone[1][0][:-1]
    errors, files, step = everyone[0]
    expected = [
        r"rank 1 could not write the checkpoint .*step-00000001: .*File too large",
        r"rank 1 could not write the checkpoint .*step-00000001: .*File too large",
        r"rank 1 could not export to .*out\.safetensors: .*File too large",
        r"rank 0 could not write the checkpoint .*: (Not a directory|File exists) \(.*file",
        r"extra\.what is a builtins\.object, which a checkpoint cannot keep: give tensors, numbers",
        r"the ranks have done 1/2 steps: save after the same step on all of them",
        r"the ranks do not save alike, by optimizer: rank 0 gives none, rank 1 gives one; give all of them the same",
        r"the ranks do not save alike, by keep: rank 0 gives 1, rank 1 gives 2; give all of them the same",
        r"the ranks do not save alike, by folder: rank 0 gives .*per0, rank 1 gives .*per1; give all of them the same",
        r"group 0 has lr 0\.002 on rank 1, but 0\.001",
        r"rank \d: parameter 0 of the optimizer's group 0 is not one of the pipeline's: make the optimizer of pipe",
    ]
    for pattern, error in zip(expected, errors, strict=True):
        assert re.search(pattern, error), (pattern, error)
    assert files == [".writer", "step-00000000"]
    assert step == 1


def test_what_does_not_fit_is_refused_before_anything_is_restored(saved):
    pipe = pipeline(0.5)
    adam = torch.optim.Adam(pipe.parameters())
    wider = pipeline(0.5, width=9)
    half = pipeline(0.5)
    half.stages[0].bfloat16()
    two = torch.optim.Adam([{"params": [p]} for p in list(pipe.parameters())[:2]])
    for work, result in [
        (lambda: checkpoint.resume(saved, wider), r"1 of another shape \(0\.weight\)"),
        (lambda: checkpoint.resume(saved, half), r"0\.weight is torch\.float32 in the checkpoint, but torch\.bfloat16"),
        (lambda: checkpoint.resume(saved, pipe, torch.optim.SGD(pipe.parameters())), "the state of Adam, not of SGD"),
        (lambda: checkpoint.resume(saved, pipe, two), "1 parameter groups, but this one has 2"),
        (
            lambda: checkpoint.resume(saved, pipe, adam, torch.optim.lr_scheduler.StepLR(adam, 2)),
            "holds no learning-rate schedule",
        ),
        (lambda: checkpoint.save(saved, pipe, keep=0), "keep=0 would keep no checkpoint"),
    ]:
        with pytest.raises(ps.PenstockError, match=result):
            work()
    assert holds(pipe, 0.5)
    assert holds(wider, 0.5)


# ---- without ranks


def test_a_checkpoint_becomes_one_file_without_ranks(copy, tmp_path):
    from safetensors.torch import load_file

    flip(next((copy / "step-00000003").glob("shard-00002*")), -1)
    with pytest.warns(UserWarning, match="shard-00002"):
        assert checkpoint.export_checkpoint(copy, tmp_path / "out.safetensors") == copy / "step-00000002"
    assert_same(load_file(tmp_path / "out.safetensors"), dict(resumed(copy / "step-00000002", 2).state_dict()))
