"""Ranks started by `launch` have what the caller has at that moment, meet where only this machine comes, and end in words.

This file is the program of torchrun's ranks as well.
"""

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds it, but not this program

import pytest
import torch
from prompt import torchrun
from torch import nn

import penstock as ps
from penstock.comms import topology
from penstock.launcher import launch, rank_processes
from penstock.launcher.rank_main import LaunchSpec

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def every_rank_is_heard(monkeypatch):
    """However busy the machine is: the launcher waits for what all have to tell."""
    monkeypatch.setattr(rank_processes, "ERROR_REPORT_SECONDS", 1000.0)


def rank_surroundings():
    libc = [line.partition("=")[2] for line in os.popen("env") if line.startswith("PENSTOCK_TEST=")]
    return dict(os.environ), os.getcwd(), torch.get_num_threads(), "".join(libc).strip(), sys.path


@pytest.mark.ranks
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_get_the_callers_environment_and_directory_of_each_launch(start, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_sees_gpu", lambda: start == "spawn")
    number = 1 if start == "spawn" else 2
    monkeypatch.setenv("PENSTOCK_GONE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for _, _, threads, *_ in ps.launch(rank_surroundings, number):
        assert threads == 1
    monkeypatch.setenv("PENSTOCK_TEST", "set after the first launch")
    monkeypatch.delenv("PENSTOCK_GONE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for environment, folder, threads, libc, path in ps.launch(rank_surroundings, number):
        assert {name: value for name, value in environment.items() if name not in OURS} == dict(os.environ)
        assert folder == str(tmp_path)
        assert threads == 3
        assert libc == "set after the first launch"
        assert str(tmp_path / "modules") in path


def rank_leaves(when, folder):
    """Rank 1 leaves, the others go on; what they are told."""
    rank, x = int(os.environ["RANK"]), torch.ones(4, 4)
    leaves = rank == 1
    try:
        if leaves and when == "before it starts":
            return
        ps.comms.init_distributed()
        if when == "before a tensor":
            return None if leaves else ps.comms.recv_tensor((3,), 1)
        if leaves and when == "before a pipeline":
            return
        pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), nn.functional.mse_loss, "1f1b", 2)
        pipe.step(x, target=x)
        if leaves and when == "with an error":
            raise ValueError("its own\ntrouble")
        if not leaves:
            pipe.step(x, target=x)
    except ps.LostRankError as error:
        (Path(folder) / str(rank)).write_text(str(error))
        raise


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("when", "waited"),
    [
        ("before it starts", "waited for the other ranks to start"),
        ("before a pipeline", "waited to connect to the other ranks"),
        ("before a step", r"waited for rank 1 to begin step\(\), before [02]F0"),
        ("before a tensor", r"waited for a \(3,\) float32 tensor from rank 1"),
    ],
)
def test_whoever_waits_for_a_rank_that_has_finished_is_told_so(when, waited, tmp_path):
    words = f"rank [02] {waited}, but rank 1 has finished: every rank must make the same calls"
    with pytest.raises(ps.LostRankError, match=f"^{words}$") as raised:
        ps.launch(rank_leaves, 3, when, tmp_path)
    assert "gloo" not in str(raised.value.__cause__)
    output = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert output.keys() == {"0", "2"}
    assert all("rank 1 has finished" in line for line in output.values())


def start_method_of_children() -> str:
    return multiprocessing.get_start_method()


@pytest.mark.ranks
def test_processes_that_a_rank_starts_begin_as_in_a_program_without_ranks(monkeypatch):
    assert ps.launch(start_method_of_children, 1) == [multiprocessing.get_all_start_methods()[0]]
    monkeypatch.setattr(launch.multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert ps.launch(start_method_of_children, 1) == ["spawn"]


@pytest.mark.ranks
def test_the_others_of_a_rank_that_ends_with_an_error_of_its_own_are_told_which(tmp_path):
    with pytest.raises(ValueError, match="its own\ntrouble"):
        ps.launch(rank_leaves, 3, "with an error", tmp_path)
    for rank in (0, 2):
        assert "but rank 1 ended with ValueError: its own trouble" in (tmp_path / str(rank)).read_text()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_under_torchrun_too_they_are_told_of_one_that_has_finished(tmp_path):
    ended = torchrun(2, __file__, tmp_path)
    assert ended.returncode
    assert "gloo" not in ended.stderr
    output = [path.read_text() for path in tmp_path.iterdir()]
    assert output
    for line in output:
        assert line.endswith("F0, but rank 1 has finished: every rank must make the same calls")
    assert "traceback : LostRankError: rank 0 waited for rank 1" in ended.stderr.partition("Root Cause")[2]


UNGUARDED = """
import penstock as ps
def work(): return 1
print("read", flush=True)
ps.launch(work, 2)
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_a_program_without_a_main_guard_is_told_to_have_one_and_nothing_else(tmp_path):
    (tmp_path / "program.py").write_text(UNGUARDED)
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.count("read") in (2, 3)  # here, and where a rank came to it
    words = "this program launches ranks wherever it is imported, and every rank imports it: put what launches under"
    assert ended.stderr.splitlines()[-1] == f'penstock.errors.PenstockError: {words} `if __name__ == "__main__":`'
    assert ended.stderr.count("Traceback (most") == 1


@pytest.mark.ranks
def test_what_ranks_cannot_import_is_told_to_be_put_into_a_file(monkeypatch):
    typed = types.ModuleType("typed")
    exec("def work(): return 1", typed.__dict__)
    monkeypatch.setitem(sys.modules, "typed", typed)
    with pytest.raises(ps.PenstockError, match=r"^ranks cannot read the function .*No module named 'typed'\): define it in a"):
        ps.launch(typed.work, 2)


def test_a_process_that_may_have_no_children_is_told_so(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "daemon", True)
    with pytest.raises(ps.PenstockError, match=r"^a daemonic process, as a Pool's worker is, may start no ranks"):
        ps.launch(rank_comes, 2)


def rank_comes():
    return ps.comms.init_distributed().rank


def rank_raises_something_odd():
    if ps.comms.init_distributed().rank == 1:
        raise Odd(1, 2)


class Odd(Exception):
    """Does not survive pickling."""

    def __init__(self, a, b):
        super().__init__("odd")


@pytest.mark.ranks
def test_launch_raises_the_ranks_own_error_with_its_traceback_as_the_cause():
    with pytest.raises(ps.PenstockError, match="rank 1: Odd: odd") as raised:
        ps.launch(rank_raises_something_odd, 2)
    assert "rank_raises_something_odd" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((rank_comes, 2, threading.Lock()), r"^cannot send rank_comes to other processes"),
        ((rank_comes, 0), "cannot launch 0 ranks"),
        ((3, 2), r"cannot launch 3: give a function, launch\(train, 2\)"),
    ],
    ids=["what does not pickle", "no ranks", "no function"],
)
def test_what_cannot_be_launched_is_told(arguments, message):
    with pytest.raises(ps.PenstockError, match=message):
        ps.launch(*arguments)


@pytest.mark.ranks
def test_a_result_that_does_not_pickle_is_told_with_its_rank():
    with pytest.raises(ps.PenstockError, match=r"rank \d cannot send home what its function returned .*: it must pickle"):
        ps.launch(threading.Lock, 1)


def test_a_ctrl_c_while_a_rank_starts_leaves_none_behind(monkeypatch):
    begun = []

    class StartedRank:
        """A process that is there when it has been started."""

        def __init__(self, **_):
            self.pid = None

        def start(self):
            self.pid, self.is_there = 0, True
            begun.append(self)

        def is_alive(self):
            return self.is_there

        def kill(self):
            self.is_there = False

        def join(self):
            assert not self.is_there

    @contextmanager
    def held():
        yield
        if any(process.is_there for process in begun):
            raise KeyboardInterrupt  # which has come meanwhile

    monkeypatch.setattr(rank_processes, "block_signals_in_children", held)
    context = types.SimpleNamespace(Pipe=multiprocessing.Pipe, Process=StartedRank)
    with (
        pytest.raises(KeyboardInterrupt),
        rank_processes.start_ranks(LaunchSpec(b"", 2, {}), context, torch.distributed.HashStore()),
    ):
        pass
    assert [process.is_there for process in begun] == [False]


def test_ctrl_c_is_told_in_words_and_without_what_the_launcher_waited_in(monkeypatch):
    def waits(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_run_attempt", waits)
    with pytest.raises(KeyboardInterrupt, match=r"^Ctrl-C has ended 4 ranks$") as raised:
        ps.launch(rank_comes, 4)
    assert [entry.name for entry in raised.traceback][1:] == ["launch"]
    assert raised.value.__suppress_context__


def test_where_no_file_descriptor_is_free_ranks_are_not_started_and_no_folder_is_blamed(monkeypatch):
    def refuses():
        raise OSError(errno.EMFILE, "Too many open files")

    words = r"^ranks cannot be started: no file descriptor is free \(limit \d+\): raise `ulimit -n`$"
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "ensure_running", refuses)
        with pytest.raises(ps.ResourceError, match=words):
            ps.launch(rank_comes, 2)
    monkeypatch.setattr(multiprocessing, "get_context", lambda way: types.SimpleNamespace(Pipe=lambda **_: refuses()))
    monkeypatch.setattr(launch, "_sees_gpu", lambda: True)
    with pytest.raises(ps.ResourceError, match=words):
        ps.launch(rank_comes, 2)


def test_a_gpu_that_is_not_there_and_a_number_of_torchruns_that_is_none_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ps.PenstockError, match="device 'cuda:2' was asked for, and torch finds cuda:0 to cuda:1 here"):
        topology._connect_to_ranks(None, None, "cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(
        ps.PenstockError,
        match="LOCAL_RANK is set here, but LOCAL_RANK is 'x': start the command with torchrun, or unset LOCAL_RANK",
    ):
        topology._connect_to_ranks(None, None, "cuda")


@pytest.mark.ranks
def test_a_network_that_is_not_there_is_told_by_name(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
    with pytest.raises(ps.PenstockError, match=r"^GLOO_SOCKET_IFNAME is lo,nope, and the networks of this machine are .*lo"):
        ps.launch(rank_comes, 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert ps.launch(rank_comes, 2) == [0, 1]


def rank_exits():
    if ps.comms.init_distributed().rank == 1:
        sys.exit()


@pytest.mark.ranks
def test_a_rank_that_calls_exit_does_not_end_the_program_as_if_all_were_well():
    with pytest.raises(ps.PenstockError, match=r"rank 1 called sys.exit\(\) before its function was done"):
        ps.launch(rank_exits, 2)


if __name__ == "__main__":
    rank_leaves("before a step", sys.argv[1])
