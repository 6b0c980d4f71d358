"""A folder has one writer, another is refused by name before it touches anything; a save's failure is told by the next step."""

import errno
import fcntl
import gc
import os
import re
import resource
import signal
from concurrent.futures import Future
from functools import partial

import pytest
import torch
import torch.distributed as dist
from error_text import error_text
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint import folder_lock
from penstock.checkpoint.saving import lock_run_folder
from penstock.comms.topology import Topology

pytestmark = pytest.mark.ranks


def alone(step=0):
    """A pipeline of this process only, whichever ranks there are."""
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, "gpipe", 2, topology=Topology())
    pipe.step_count = step
    return pipe


def refusal(folder, pipe, **options):
    return error_text(lambda: checkpoint.save(folder, pipe, **options), ps.PenstockError)


def contents(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


def everyone():
    dist.barrier()


def rank_is_a_run_of_its_own(folder):
    """Rank 0's run has the folder, rank 1's wants it."""
    folder_lock.ACQUIRE_TIMEOUT_SECONDS = 0.2
    rank, expected_message = ps.comms.init_distributed().rank, []
    pipe = alone(rank)
    if rank == 0:
        checkpoint.save(folder, pipe)
        (folder / ".step-00000007.part").mkdir()  # of a saving that goes on
    everyone()
    if rank == 1:
        before = contents(folder)
        expected_message = [refusal(folder, pipe), refusal(folder, pipe, wait=False)]
        with pytest.raises(ps.PenstockError, match="is written to by process"):
            lock_run_folder(folder, pipe)
        assert contents(folder) == before
        assert checkpoint.resume(folder, pipe) == {}  # to read needs no lock
        pipe.step_count = 1
    everyone()
    if rank == 0:
        child = os.fork()  # as a loader's worker is, which outlives the pipeline here
        if child == 0:
            signal.pause()
        del pipe
        gc.collect()
    everyone()
    if rank == 1:
        checkpoint.save(folder, pipe)  # nobody has it any more
    everyone()
    if rank == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return expected_message, os.getpid()


def test_a_second_writer_is_refused_by_name_before_it_writes_or_deletes_anything(tmp_path):
    (_, first), (result, _) = ps.launch(rank_is_a_run_of_its_own, 2, tmp_path / "run")
    for text in result:
        assert re.search(rf"run is written to by process {first} on \S+: two runs .*: end that one, or save elsewhere", text)
    assert not (tmp_path / "run" / ".step-00000007.part").exists()  # left by nobody, once the lock had ended


def rank_dies(folder):
    pipe = alone()
    checkpoint.save(folder, pipe)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_ends_with_its_process_and_a_run_that_goes_on_is_told_nothing(tmp_path, recwarn):
    with pytest.raises(ps.LostRankError):
        ps.launch(rank_dies, 1, tmp_path)
    pipe = alone()
    checkpoint.resume(tmp_path, pipe)
    pipe.step_count = 1
    checkpoint.save(tmp_path, pipe)
    again = alone(2)  # made anew after an error, say: the process is one run
    checkpoint.save(tmp_path, again)
    pipe.step_count = 3
    checkpoint.save(tmp_path, pipe)
    assert not recwarn.list
    assert (tmp_path / ".writer").read_text().startswith(f"process {os.getpid()} on ")


def test_a_run_whose_folder_has_been_taken_is_refused(tmp_path, monkeypatch):
    pipe = alone()
    checkpoint.save(tmp_path, pipe)
    (tmp_path / ".writer").unlink()
    checkpoint.save(tmp_path, pipe)  # nobody has taken it
    monkeypatch.setattr(folder_lock, "ACQUIRE_TIMEOUT_SECONDS", 0.1)
    (tmp_path / ".writer").unlink()
    with (tmp_path / ".writer").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("process 5 on elsewhere")
        other.flush()
        before = contents(tmp_path)
        assert "is written to by process 5 on elsewhere: two runs" in refusal(tmp_path, pipe)
        assert contents(tmp_path) == before


def test_a_file_system_without_locks_is_told_once(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    pipe = alone()
    with pytest.warns(UserWarning, match="a file system without locks: see that no other run saves there") as warned:
        checkpoint.save(tmp_path, pipe)
    checkpoint.save(tmp_path, pipe)
    assert len(warned) == 1
    assert checkpoint.resume(tmp_path, alone()) == {}


def train(pipe, batch):
    for _ in range(20_000):
        pipe.zero_grad()
        pipe.step(batch, target=torch.zeros(4, 2))


def rank_fails_beside(folder):
    torch.manual_seed(1)
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), nn.functional.mse_loss, microbatches=2)
    batch = torch.ones(4, 8)
    pipe.step(batch, target=torch.zeros(4, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if pipe.topology.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # its disk is full after 100 bytes
    saving = checkpoint.save(folder, pipe, wait=False)
    with pytest.raises(ps.PenstockError, match=r"rank 1 could not write the checkpoint .*File too large") as caught:
        train(pipe, batch)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    step_count = pipe.step_count
    assert all(parameter.grad is None for parameter in pipe.parameters())  # the step has not begun
    loss = pipe.step(batch, target=torch.zeros(4, 2))
    with pytest.raises(ps.PenstockError, match="File too large"):
        saving.wait()  # what is asked for is told again
    checkpoint.save(folder, pipe)
    return step_count, pipe.step_count, str(caught.value), loss.item()


class Writing(Future):
    """What goes on in a thread; somebody presses Ctrl-C while it is waited for."""

    def result(self, timeout=None):
        self.exception()
        return super().result(timeout)

    def exception(self, timeout=None):
        if not self.done():
            raise KeyboardInterrupt
        return super().exception(timeout)


def test_a_ctrl_c_while_a_save_is_waited_for_loses_neither_its_error_nor_the_next_waits(tmp_path):
    pipe = alone()
    pipe._engine.background_save = saving = checkpoint.SaveHandle(tmp_path, written := Writing())
    for wait in (saving.wait, partial(checkpoint.save, tmp_path, pipe)):
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert pipe._engine.background_save is saving  # no other save begins beside it
    written.set_exception(ps.PenstockError("the disk is full"))
    assert saving.has_unreported_error
    with pytest.raises(ps.PenstockError, match="the disk is full"):
        checkpoint.save(tmp_path, pipe)
    checkpoint.save(tmp_path, pipe)


def test_what_fails_beside_the_steps_is_told_by_the_next_one_on_every_rank_before_it_begins(tmp_path):
    one, other = ps.launch(rank_fails_beside, 2, tmp_path)
    assert one == other
    assert one[1] == one[0] + 1
