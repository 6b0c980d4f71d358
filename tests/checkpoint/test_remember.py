"""Checkpoints in memory outlive the ranks: at most a step is lost, no disk is read, on as many ranks as are left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from open_files import open_files
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint import memory, parts, restore
from penstock.comms.starting import drawers

pytestmark = pytest.mark.ranks

STEPS = 8
SAVED = 2  # the only step that is on the disk


def attempt():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def training():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)


def step(pipe, optimizer, rate):
    inputs, target = batch(pipe.step_count)
    loss = pipe.step(inputs, target=target)
    optimizer.step()
    optimizer.zero_grad()
    rate.step()
    return loss


def rank_trains(folder, faults):
    """Train to the end; `faults`: attempt -> the rank that dies there, after which step, and where in it."""
    given = training()
    pipe, begin, extra = given[0], 0, {}
    rank = pipe.topology.rank
    if checkpoint.exists(folder):
        restore.newest_whole = None  # the disk is not to be read
        extra = checkpoint.resume(folder, *given)
        begin = pipe.step_count
        assert extra["after"] == begin
    if rank == 0:
        with (folder / "begun").open("a") as told:
            print(begin, file=told)
    victim, last, moment = faults.get(attempt(), (None, 0, ""))
    while pipe.step_count < STEPS:
        dies = rank == victim and pipe.step_count + 1 == last
        step(*given)
        if dies and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and moment == "within":  # its part is half written
            parts.write_bytes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        assert checkpoint.remember(folder, *given, extra={"after": pipe.step_count})
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if pipe.step_count == SAVED:
            checkpoint.save(folder, *given, extra={"after": SAVED})
    return pipe.state_dict()


@pytest.fixture(scope="module")
def undisturbed():
    given = training()
    for _ in range(STEPS):
        step(*given)
    return given[0].state_dict()


def check(everyone, undisturbed):
    state = {name: value for part in everyone for name, value in part.items()}
    assert all(torch.equal(state[name], value) for name, value in undisturbed.items())


@pytest.mark.parametrize("least", [None, 1])
def test_whoever_dies_whenever_at_most_a_step_is_lost_and_no_disk_is_read(tmp_path, undisturbed, least):
    faults = {0: (1, 3, "before"), 1: (0, 5, "within"), 2: (0, 6, "after")}
    everyone = ps.launch(rank_trains, 3, tmp_path, faults, restarts=3, least=least)
    assert (tmp_path / "begun").read_text().split() == ["0", "2", "4", "6"]
    assert len(everyone) == (least or 3)
    check(everyone, undisturbed)


def rank_is_behind_the_disk(folder):
    given = training()
    if attempt() == 0:
        step(*given)
        extra = {"what": object()} if given[0].topology.rank == 0 else None
        with pytest.raises(ps.MismatchError, match="cannot keep"):  # on all ranks at this call, so that the next one works
            checkpoint.remember(folder, *given, extra=extra)
        checkpoint.remember(folder, *given)
        step(*given)
        checkpoint.save(folder, *given)
        raise ValueError("again")
    assert not checkpoint.exists(folder / "another")
    checkpoint.resume(folder, *given)
    newest = given[0].step_count
    if given[0].topology.rank == 0:
        shutil.rmtree(folder / "step-00000002")
    checkpoint.save(folder / "other", *given)
    checkpoint.resume(folder, *given)
    found = private()
    checkpoint.remember(folder, *given)
    if given[0].topology.rank == 1:
        memory._memories.clear()  # as if this pipeline were gone here, and not yet elsewhere
    with pytest.raises(ps.MismatchError, match="memory keeps the checkpoints of one folder"):
        checkpoint.remember(folder / "another", *training())
    return newest, given[0].step_count, *found


def test_parts_of_different_steps_are_no_checkpoint():
    part, both = parts.Part(parts.Mark("a", "run", 3, 7, 0, 2), "", "", 0), parts.Mark("a", "run", 3, 7, 1, 2)
    assert parts.newest_of([part, part._replace(mark=both)], "a")
    assert parts.newest_of([part, part._replace(mark=both._replace(step=8))], "a") is None


def private():
    """The modes of the files that this machine's ranks share, and whether the program's command line tells of them."""
    there = drawers.find()
    return [oct(there.path(number).stat().st_mode) for number in range(len(there.files))], there.process


def held():
    """The memory of ours that this process has open."""
    return sorted(each for each in open_files() if each.startswith("/memfd:penstock-"))


def test_the_disk_is_taken_where_it_is_newer_and_memory_is_private_to_the_launch(tmp_path):
    before = held()
    newest, then, modes, owner = ps.launch(rank_is_behind_the_disk, 2, tmp_path, restarts=1)[0]
    assert (newest, then) == (2, 1)
    assert modes == ["0o100600"] * 4
    assert owner == os.getpid()
    assert not Counter(held()) - Counter(before)  # earlier ones may have gone meanwhile


def rank_has_no_memory(folder):
    return checkpoint.remember(folder, *training()), checkpoint.exists(folder)


def test_where_nobody_starts_ranks_again_nothing_is_kept(tmp_path):
    assert ps.launch(rank_has_no_memory, 2, tmp_path) == [(False, False)] * 2


# ---- several machines


def rank_is_a_machine(folder, keepers):
    """Ranks 0 and 1 are one machine each; in the second attempt rank 0 is a new one, whose memory is empty."""
    rank = int(os.environ["RANK"])
    os.environ |= {drawers.VARIABLE: keepers[2 if attempt() and rank == 0 else rank], "LOCAL_RANK": "0"}
    return rank_trains(folder, {0: (0, 5, "after")})


def test_a_machine_that_is_lost_has_its_copy_on_the_next_one(tmp_path, undisturbed):
    made = [drawers.make(4, 1) for _ in range(3)]
    everyone = ps.launch(rank_is_a_machine, 2, tmp_path, [each.told() for each in made], restarts=1)
    assert (tmp_path / "begun").read_text().split() == ["0", "5"]
    check(everyone, undisturbed)
    for each in made:
        each.close()


# ---- torchrun


AGENT = """
import os, subprocess, sys
from penstock.comms.starting import drawers
if len(sys.argv) == 1:
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for attempt in "01":
        subprocess.run([sys.executable, __file__, attempt], check=attempt == "1")
else:
    first = drawers.find()
    assert drawers.wanted() and (first is None) == (sys.argv[1] == "0")
    there = drawers.find(start=True)
    place = there.path(3)
    if first is None:
        place.write_text("kept")
        os.kill(os.getpid(), 9)
    print(there.process, len(there.files), oct(place.stat().st_mode), place.read_text(), flush=True)
"""


def test_under_an_agent_a_process_of_our_own_keeps_the_memory_and_ends_with_it(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    done = subprocess.run([sys.executable, tmp_path / "agent.py"], capture_output=True, text=True, check=True)
    process, *told = done.stdout.split()
    assert told == ["8", "0o100600", "kept"]
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()
