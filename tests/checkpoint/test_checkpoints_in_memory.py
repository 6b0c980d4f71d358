"""A folder in memory beside one on a disk: what a lost rank costs is at most a step, and nothing is left there."""

import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from slow_cases import slow_except
from test_saving import flip
from torch import nn
from waiting import wait_until

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import disk, tensor_files
from penstock.commands.train import memory_folder as train_memory
from penstock.commands.train.memory_folder import has_room, memory_of_agent, memory_of_launch
from penstock.comms.control_group import ControlGroup

SHARED = Path("/dev/shm")
STEPS = 8
SAVED = 2  # the only step that is on the disk

pytestmark = pytest.mark.skipif(not (SHARED.is_dir() and disk.is_in_memory(SHARED)), reason="Linux has a folder in memory")


@pytest.fixture
def memory():
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        yield Path(folder)


def training():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def step(pipe, optimizer, rate):
    generator = torch.Generator().manual_seed(pipe.step_count)
    pipe.step(torch.randn(4, 4, generator=generator), target=torch.randn(4, 2, generator=generator))
    optimizer.step()
    optimizer.zero_grad()
    rate.step()


# ---- ranks that die


def rank_trains(folder, memory, faults):
    """Train to the end; `faults`: attempt -> the rank that dies there, after which step, and where in it."""
    given = training()
    pipe, begin = given[0], 0
    rank = pipe.topology.rank
    if checkpoint.exists([memory, folder]):
        assert checkpoint.resume([memory, folder], *given) == {"after": pipe.step_count}
        begin = pipe.step_count
    if rank == 0:
        with (folder / "begun").open("a") as file:
            print(begin, file=file)
    victim, last, moment = faults.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (None, 0, ""))
    while pipe.step_count < STEPS:
        dies = rank == victim and pipe.step_count + 1 == last
        step(*given)
        if dies and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and moment == "within":  # its file is half written
            tensor_files._write_and_digest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(memory, *given, extra={"after": pipe.step_count}, keep=1)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if pipe.step_count == SAVED:
            checkpoint.save(folder, *given, extra={"after": SAVED})
    return pipe.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("least", slow_except([None], [None, 1]))
def test_whoever_dies_whenever_at_most_a_step_is_lost(tmp_path, memory, least):
    faults = {0: (1, 3, "before"), 1: (0, 5, "within"), 2: (0, 6, "after")}
    everyone = ps.launch(rank_trains, 3, tmp_path, memory, faults, restarts=3, least=least)
    assert (tmp_path / "begun").read_text().split() == ["0", "2", "4", "6"]
    assert len(everyone) == (least or 3)
    assert sorted(path.name for path in memory.iterdir()) == [".writer", f"step-{STEPS:08d}"]
    given = training()
    for _ in range(STEPS):
        step(*given)
    state = {name: value for part in everyone for name, value in part.items()}
    assert all(torch.equal(state[name], value) for name, value in given[0].state_dict().items())


# ---- the newest of several folders


def saved(folder, *steps):
    pipe = training()[0]
    for pipe.step_count in steps:
        checkpoint.save(folder, pipe, extra={"in": folder.name})


def resumed(*folders):
    pipe = training()[0]
    where = checkpoint.resume(list(folders), pipe)
    return pipe.step_count, where["in"]


def test_the_newest_of_several_folders_is_taken_and_of_the_same_step_the_first_folders(tmp_path, capsys):
    fast, slow, absent = tmp_path / "fast", tmp_path / "slow", tmp_path / "absent"
    assert not checkpoint.exists([fast, slow])
    saved(slow, 3)
    assert checkpoint.exists([fast, str(slow)])
    assert resumed(fast, slow) == (3, "slow")
    saved(fast, 2, 4)
    assert resumed(fast, absent, slow) == resumed(slow, fast) == (4, "fast")
    assert capsys.readouterr().err.splitlines()[-1] == f"penstock: the ranks go on from {fast}/step-00000004"
    saved(slow, 4)
    assert [resumed(fast, slow)[1], resumed(slow, fast)[1]] == ["fast", "slow"]
    saved(slow, 5)
    assert resumed(fast, slow) == (5, "slow")
    (file,) = (slow / "step-00000005").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-00000005 is passed over"):
        assert resumed(fast, slow) == (4, "fast")


def test_folders_that_cannot_be_searched_together_are_refused(tmp_path):
    saved(tmp_path / "run", 1)
    for folders, result in [
        ([], "there is no folder in an empty list: give one, or several"),
        ([tmp_path / "a", tmp_path / "b"], f"there is no checkpoint in {tmp_path}/a, {tmp_path}/b: give a folder"),
        (
            [tmp_path / "a", tmp_path / "run/step-00000001"],
            "step-00000001 is a checkpoint, not a folder of them: give it alone",
        ),
    ]:
        with pytest.raises(ps.PenstockError, match=result):
            checkpoint.resume(folders, training()[0])


# ---- what is cheaper in memory


@pytest.mark.parametrize("on", ["memory", "disk"])
def test_only_on_a_disk_it_is_synced_and_hashed_strongly_and_damage_is_found_on_both(memory, monkeypatch, on):
    if on == "disk":
        monkeypatch.setattr(disk, "MEMORY_FILE_SYSTEM_TYPES", ())
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    given = training()
    for _ in range(2):
        step(*given)
        checkpoint.save(memory, *given, extra={"after": given[0].step_count})
    assert bool(synced) == (on == "disk")
    newest = memory / "step-00000002"
    content = json.loads((newest / "manifest.json").read_text())
    ((name, entry),) = content["files"].items()
    assert set(entry) == {"bytes", "crc32" if on == "memory" else "sha256"}
    whole = (newest / name).read_bytes()
    for at in (0, -1, random.randrange(entry["bytes"])):
        flip(newest / name, at)
        with pytest.warns(UserWarning, match=f"is damaged: by their {'CRC-32' if on == 'memory' else 'SHA-256'} its"):
            assert checkpoint.resume(memory, *training()) == {"after": 1}
        (newest / name).write_bytes(whole)
    assert checkpoint.resume(memory, *training()) == {"after": 2}
    flip(newest / "manifest.json", random.randrange(1000))
    with pytest.warns(UserWarning, match=r"manifest\.json"):
        checkpoint.resume(memory, *training())


def rank_alone_sees_its_files(folder):
    """The save of two ranks of which rank 1 writes into a memory of its own."""
    pipe = training()[0]
    if pipe.topology.rank == 1:
        write = tensor_files.write_shards
        tensor_files.write_shards = lambda path, *rest: write(path.parent / "another machine's", *rest)
    with pytest.raises(ps.PenstockError) as error:
        checkpoint.save(folder, pipe)
    return str(error.value)


@pytest.mark.ranks
def test_a_folder_in_memory_that_not_all_ranks_see_is_refused_on_all(memory):
    first, second = ps.launch(rank_alone_sees_its_files, 2, memory)
    assert first == second
    assert first.endswith("but rank 0 does not see it: save where all ranks do; memory is its machine's alone")


def rank_counts_exchanges(folder, wait):
    """The exchanges of one save, after the first, which opens groups."""
    given, tell, count = training(), ControlGroup.begin_all_gather_row, []
    checkpoint.save(folder, *given)
    ControlGroup.begin_all_gather_row = lambda *words: count.append(words[-1]) or tell(*words)
    checkpoint.save(folder, *given, wait=wait).wait()
    return count


@pytest.mark.ranks
def test_a_save_takes_five_exchanges_and_one_more_where_a_thread_writes(memory):
    for wait in (True, False):
        assert [len(count) for count in ps.launch(rank_counts_exchanges, 2, memory, wait)] == [6 - wait] * 2


# ---- the folder of `penstock train`


def test_the_folder_of_a_launch_is_gone_after_it_and_after_a_kill(monkeypatch):
    with memory_of_launch(False) as folder:
        assert folder is None
    with memory_of_launch(True) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "step").mkdir()
    assert not folder.exists()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with memory_of_launch(True) as folder:
            (folder / "step").mkdir()
            os.write(writer, os.fsencode(folder))
            time.sleep(1000)
    folder = Path(os.fsdecode(os.read(reader, 1000)))
    assert (folder / "step").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: not folder.exists())
    monkeypatch.setattr(train_memory, "MEMORY", Path("/nowhere"))
    with memory_of_launch(True) as folder:
        assert folder is None


def test_ranks_on_several_machines_have_no_folder_in_memory_and_too_little_room_is_seen(memory, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert memory_of_agent() is None
    assert has_room(memory, 1000)
    assert not has_room(memory, 2**60)
    (memory / "step-00000001").mkdir()  # it was enough once
    assert has_room(memory, 2**60)
