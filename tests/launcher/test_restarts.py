"""Ranks die, are stopped or raise: who it was is told exactly, and training goes on to the bit with those that are left."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fork_server import own_server
from prompt import python, torchrun
from safetensors.torch import load_file
from torch import nn
from waiting import wait_until

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.job import train_rank
from penstock.commands.train.memory_folder import memory_of_launch
from penstock.commands.train.restarts import resize_for_processes
from penstock.comms.process import SUSPENDED, read_process
from penstock.comms.status import RankStatus, error_of, status_of_error
from penstock.launcher import rank_processes
from penstock.launcher.attempt import count_same_failures, diagnose_attempt, exit_result
from penstock.launcher.rank_main import RankResult, _status_of_failure

STEPS = 12


def attempt_number():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank_trains(folder, faults):
    """Train, from the newest checkpoint; before a step `faults` of an attempt and a rank happen to it."""
    rank = ps.comms.init_distributed().rank
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]), nn.functional.mse_loss, "1f1b", 4)
    optimizer = torch.optim.Adam(pipe.parameters())
    if checkpoint.exists(folder):
        checkpoint.resume(folder, pipe, optimizer)
    while pipe.step_count < STEPS:
        fault = faults.get((attempt_number(), rank, pipe.step_count))
        if fault == "raise":
            raise ValueError("its own")
        if fault is not None:
            os.kill(os.getpid(), fault)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(pipe.step_count))
        pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.step_count % 3 == 0:
            checkpoint.save(folder, pipe, optimizer)
    return pipe.state_dict()


def whole(results):
    return {name: value for part in results for name, value in part.items()}


@pytest.mark.ranks
def test_ranks_go_on_without_those_that_failed_and_end_with_the_bits_of_an_undisturbed_run(tmp_path, capfd):
    undisturbed = whole(ps.launch(rank_trains, 2, tmp_path / "undisturbed", {}))
    capfd.readouterr()
    faults = {(0, 2, 5): signal.SIGKILL, (1, 0, 7): "raise", (2, 1, 10): signal.SIGSTOP}
    results = ps.launch(rank_trains, 4, tmp_path / "disturbed", faults, restarts=5, least=1)
    weights = whole(results)
    assert weights.keys() == undisturbed.keys()
    for name, value in weights.items():
        assert torch.equal(value, undisturbed[name]), name

    attempts = results.attempts
    assert [(attempt.ranks, attempt.failed_ranks, attempt.steps_done) for attempt in attempts] == [
        (4, (2,), 5), (3, (0,), 7), (2, (1,), 10), (1, (), STEPS),
    ]  # fmt: skip
    assert [type(attempt.error) for attempt in attempts] == [ps.LostRankError, ValueError, ps.LostRankError, type(None)]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("penstock: ")]
    assert len(lines) == 3
    killed = r"rank 2 was killed by SIGKILL \(out of memory\? see dmesg\)"
    assert re.fullmatch(f"penstock: attempt 1 of 6 has ended: {killed}.*; 3 ranks begin again", lines[0])
    assert lines[1] == "penstock: attempt 2 of 6 has ended: ValueError: its own; 2 ranks begin again"
    stopped = r"rank 1 was stopped by a signal for 3 s, and was ended \(to pause a job, stop all its processes\)"
    assert re.fullmatch(rf"penstock: attempt 3 of 6 has ended: {stopped}.*; 1 rank begins again", lines[2])


@pytest.mark.ranks
def test_an_error_that_comes_again_at_the_same_step_is_the_programs_own_and_not_tried_for_ever(tmp_path):
    faults = {(attempt, 1, 4): "raise" for attempt in range(9)}
    with pytest.raises(ValueError, match="its own") as raised:
        ps.launch(rank_trains, 2, tmp_path, faults, restarts=8)
    assert raised.value.__notes__ == ["the same error ended 2 attempts after 4 steps: not tried again"]
    assert [(attempt.ranks, attempt.failed_ranks, attempt.steps_done) for attempt in raised.value.attempts] == [
        (2, (1,), 4)
    ] * 2


def rank_begins(folder):
    (folder / f"{attempt_number()}-{os.environ['RANK']}").touch()
    if os.environ["RANK"] == "1":
        raise ps.MismatchError("no step was made")
    if os.environ["RANK"] == "2":
        sys.exit(3)
    ps.comms.init_distributed()


@pytest.mark.ranks
def test_before_the_first_step_too_and_a_program_that_exits_or_is_called_wrongly_is_not_started_again(tmp_path, capfd):
    with pytest.raises(ps.MismatchError, match="no step was made") as raised:
        ps.launch(rank_begins, 2, tmp_path, restarts=8)
    assert raised.value.__notes__ == ["the same error ended 2 attempts before the first step: not tried again"]
    with pytest.raises(SystemExit):
        ps.launch(rank_exits, 2, restarts=8)
    assert "penstock: several ranks called sys.exit(3) before the function was done" in capfd.readouterr().err
    with pytest.raises(ps.PenstockError, match=r"^cannot send rank_exits to other processes"):
        ps.launch(rank_exits, 2, threading.Lock(), restarts=8)
    for wrong, words in (
        ({"restarts": -1}, "cannot restart -1 times: use a whole number, 0 or more"),
        ({"restarts": 1, "least": 0}, "cannot restart with 0 ranks at least: use 1 to 2, or None for all of them"),
        ({"restarts": 1, "least": 3}, "cannot restart with 3 ranks at least: use 1 to 2"),
    ):
        with pytest.raises(ps.PenstockError, match=words):
            ps.launch(rank_begins, 2, tmp_path, **wrong)


def rank_exits():
    sys.exit(3)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class TwoArguments(Exception):
    def __init__(self, one, other):
        super().__init__(one)


def rank_fails(how):
    ps.comms.init_distributed()
    match how:
        case "unspeakable":
            raise Unspeakable
        case "no text":
            raise FileNotFoundError(2, "No such file", "\udcff")
        case "exits":
            sys.exit()
        case "raises two arguments":
            raise TwoArguments(1, 2)
        case "returns":
            return TwoArguments(1, 2)
        case "real-time":
            os.kill(os.getpid(), signal.SIGRTMIN + 1)
            time.sleep(60)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unspeakable", r"rank 0: Unspeakable: it cannot say what it is \(RuntimeError\)"),
        ("no text", "No such file"),
        ("exits", r"rank 0 called sys.exit\(\) before its function was done"),
        ("raises two arguments", "rank 0: TwoArguments: 1"),
        ("returns", r"what rank 0 returned does not unpickle \(TypeError: .*other.*\): return values that do"),
        ("real-time", f"rank 0 was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_odd_ends_are_told_in_a_sentence_too(how, words, capfd):
    with pytest.raises((ps.PenstockError, FileNotFoundError), match=words) as raised:
        ps.launch(rank_fails, 1, how, restarts=1)
    assert len(raised.value.attempts) == (1 if how == "exits" else 2)
    assert "Traceback" not in capfd.readouterr().err


def rank_is_stopped_while_it_answers():
    whole = Connection._send_bytes

    def half(connection, data):
        if len(data) < 2**16:
            return whole(connection, data)
        connection._send(struct.pack("!i", len(data)) + data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)

    Connection._send_bytes = half
    return bytes(2**17) if os.environ["RANK"] == "1" else 0


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how another process is")
def test_a_rank_that_is_stopped_amid_its_answer_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(rank_processes, "KILL_SUSPENDED_AFTER_CHECKS", 2)
    with pytest.raises(ps.LostRankError, match="rank 1 was stopped by a signal for 1 s, and was ended"):
        ps.launch(rank_is_stopped_while_it_answers, 2)


class SleepingProcess(NamedTuple):
    pid: int


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how another process is")
def test_looks_in_a_row_and_not_the_clock_tell_that_a_rank_was_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        stops = rank_processes._SuspendedRankKiller([SleepingProcess(process.pid)])
        for number, looks in (
            (signal.SIGSTOP, rank_processes.KILL_SUSPENDED_AFTER_CHECKS - 1),
            (signal.SIGCONT, 1),
            (signal.SIGSTOP, rank_processes.KILL_SUSPENDED_AFTER_CHECKS),
        ):
            assert not stops.statuses
            process.send_signal(number)
            while (read_process(process.pid).state() == SUSPENDED) != (number == signal.SIGSTOP):
                time.sleep(0.01)
            for _ in range(looks):
                stops.check()
        assert "rank 0 was stopped" in stops.statuses[0].sentence()
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.costly
def test_a_server_that_is_exiting_already_when_its_program_is_gone_says_nothing():
    script = """
import atexit, os, time
program, os.getppid = os.getppid, lambda: -1  # as while the program was there
from penstock.launcher import forkserver_child
os.getppid = program
atexit.register(time.sleep, 3 * forkserver_child.FORKSERVER_CHECK_SECONDS)  # as torch's, which come first
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def rank_forks_server_dies():
    ps.comms.init_distributed()
    if attempt_number() == 0 and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    if attempt_number() == 0:
        time.sleep(250)
    return os.getppid()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_where_the_server_of_the_ranks_is_killed_nobody_is_blamed_and_all_begin_again():
    with own_server():
        results = ps.launch(rank_forks_server_dies, 3, restarts=1, least=1)
    first, second = results.attempts
    assert (first.failed_ranks, str(first.error)) == ((), "the server process that the ranks were forked from was killed")
    assert (second.ranks, second.error) == (3, None)


def outcomes(*failures):
    """rank -> result, of pairs (rank, its error or exit code)."""
    return {rank: exit_result(rank, end) if isinstance(end, int) else raised(rank, end) for rank, end in failures}


def raised(rank, error):
    return RankResult(error, _status_of_failure(error, rank))


OWN, OWN_OF_1 = ValueError("own"), ps.PenstockError("own", [1])  # what rank 1 raises, and what it may be raised as on others
LOST, LOST_2 = ps.LostRankError("rank 1 is gone", [1]), ps.LostRankError("rank 2 is gone", [2])
GONE, WAIT = RankStatus(1, "gone", "is gone", activity="in 1F0 of step 2"), RankStatus(0, "waited", "for 1F0 from rank 1")
LOST_IN_WAIT = error_of([GONE], WAIT)
TOLD = error_of([status_of_error(1, OWN, timedelta(0), None)], None)  # of that, on another rank


@pytest.mark.parametrize(
    ("came", "failed_ranks", "words"),
    [
        (
            outcomes((0, LOST), (1, -9)),
            (1,),
            r"rank 1 is gone; rank 1 was killed by SIGKILL \(out of memory\? see dmesg\)",
        ),
        (
            outcomes((0, LOST_IN_WAIT), (1, -9)),
            (1,),
            r"rank 1 was killed by SIGKILL \(out of memory\? see dmesg\), last seen in 1F0 of step 2: "
            "rank 0 waited for 1F0 from rank 1",
        ),
        (outcomes((0, LOST), (2, -9)), (2,), r"rank 2 was killed by SIGKILL \(out of memory\? see dmesg\)"),
        (outcomes((2, -11), (0, -6)), (2,), r"rank 2 was killed by SIGSEGV \(PYTHONFAULTHANDLER=1 prints where\)"),
        (
            outcomes((2, -9), (0, -9)),
            (2, 0),
            "rank 2 was .*; rank 0 was killed by .*",
        ),
        (
            outcomes((0, 3), (1, OWN)),
            (0,),
            r"rank 0 ended with exit code 3 before it was done \(its output may say why; os\._exit\(\) prints nothing\)",
        ),
        (outcomes((1, OWN), (0, -6)), (1,), "own"),
        (outcomes((0, OWN_OF_1), (1, OWN)), (1,), "own"),
        (outcomes((0, OWN), (1, OWN)), (), "own"),
        (outcomes((0, TOLD), (1, OWN)), (1,), "own"),
        (outcomes((0, TOLD), (1, -9)), (1,), "rank 1: ValueError: own"),
        (outcomes((0, TOLD), (1, ps.LostRankError("lost"))), (1,), "rank 1: ValueError: own"),
        (outcomes((0, LOST), (1, LOST)), (1,), "rank 1 is gone"),  # it says so of itself, as one that has lost its GPU
        (outcomes((0, LOST)), (1,), "rank 1 is gone"),
        (outcomes((0, LOST), (1, LOST_2)), (2,), "rank 2 is gone"),
        (outcomes((0, RuntimeError("gloo/transport"))), (), "rank 0 has lost the other ranks"),
    ],
)
def test_exit_codes_and_own_errors_decide_who_it_was_over_what_others_guess(came, failed_ranks, words):
    attempt = diagnose_attempt(4, came)
    assert attempt.failed_ranks == failed_ranks
    assert re.fullmatch(words, str(attempt.error))


@pytest.mark.parametrize(
    ("ends", "times"),
    [
        ([("raise", 4), ("raise", 4)], 2),
        ([("raise", None), ("raise", None)], 2),
        ([("raise", 4), ("raise", 5)], 0),
        ([("raise", 4)], 0),
        ([(-11, 4), (-11, 4)], 0),
        ([(-11, 4), (-11, 4), (-11, 4)], 3),
        ([(-11, None), (-11, None), (-11, None)], 0),  # while ranks start nothing says that it was the program
        ([(-9, 4), (-9, 4), (-9, 4), (-9, 4)], 0),  # somebody else's signal
        ([(3, 4), (3, 4), (3, 4)], 3),
    ],
)
def test_a_mistake_of_the_program_is_known_by_the_step_it_comes_at(ends, times):
    came = [OWN if how == "raise" else how for how, _ in ends]
    attempts = [diagnose_attempt(4, outcomes((number, end))) for number, end in enumerate(came)]
    assert (
        count_same_failures([attempt._replace(steps_done=step) for attempt, (_, step) in zip(attempts, ends, strict=True)])
        == times
    )


@pytest.mark.parametrize(
    ("dp", "tp", "processes", "mesh", "gone"),
    [
        (2, 1, 8, (4, 2, 1), ""),
        (2, 2, 4, (1, 2, 2), ""),
        (2, 1, 3, (3, 1, 1), "3 processes cannot have --dp 2: the pipeline takes them all"),
        (2, 2, 6, (3, 1, 2), "6 processes cannot have --dp 2: the pipeline takes them all"),
        (2, 2, 5, (5, 1, 1), "5 processes cannot have --dp 2 and --tp 2: the pipeline takes them all"),
    ],
)
def test_a_mesh_follows_the_processes_that_are_left(dp, tp, processes, mesh, gone):
    config, result = resize_for_processes(TrainConfig(ranks=4, dp=dp, tp=tp), processes)
    assert (config.ranks, config.dp, config.tp) == mesh
    assert result == gone


def test_a_table_that_was_made_for_other_ranks_makes_room_for_one_that_any_number_runs(tmp_path):
    table = str(tmp_path / "my.csv")
    ps.schedule.build("gpipe", ranks=4, microbatches=8).to_csv(table)
    assert resize_for_processes(TrainConfig(ranks=2, schedule=table), 4)[0].schedule == table
    config, result = resize_for_processes(TrainConfig(ranks=4, schedule=table), 3)
    assert (config.ranks, config.schedule) == (3, "1f1b")
    assert result == f"{table} is not for 3 ranks: 1f1b instead"


def rank_of_a_run(config, folder, memory):
    """A rank of `penstock train`; in the first attempt rank 1 is killed when there is a checkpoint."""
    if attempt_number() == 0 and os.environ["RANK"] == "1":
        threading.Thread(target=_kill_me_when, args=(lambda: checkpoint.exists(memory),), daemon=True).start()
    step = ps.Pipeline.step

    def counted(pipe, *args, **kwargs):
        loss = step(pipe, *args, **kwargs)
        with (folder / "steps").open("a") as steps:
            steps.write(f"{attempt_number()} {pipe.step_count}\n")
        return loss

    ps.Pipeline.step = counted
    return train_rank(config, folder, memory)


def _kill_me_when(true):
    wait_until(true)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.ranks
def test_penstock_train_loses_a_step_at_most_and_goes_on_in_the_same_folder_with_the_metrics_of_every_step(tmp_path):
    small = {"layers": 2, "width": 8, "batch": 4, "microbatches": 2, "context": 8, "steps": 60, "timeline": False}
    config = TrainConfig(ranks=3, data=Path(__file__), restarts=1, least=1, checkpoint_every=0, **small)
    with memory_of_launch(True) as memory:
        results = ps.launch(rank_of_a_run, 3, config, tmp_path, memory, restarts=1, least=1)
    assert not memory.exists()
    assert [(attempt.ranks, attempt.failed_ranks) for attempt in results.attempts] == [(3, (1,)), (2, ())]
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    last, first = max(step for attempt, step in steps if attempt == 0), min(step for attempt, step in steps if attempt == 1)
    assert last + 1 - first in (0, 1)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 61))
    assert results[0].losses == [record["loss"] for record in records]
    assert (tmp_path / "model.safetensors").exists()


LAUNCHES = """
import os, sys, time
import penstock as ps
def work(folder):
    ps.comms.init_distributed()
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(100)
if __name__ == "__main__":
    ps.launch(work, 3, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parents")
def test_a_launcher_that_is_killed_leaves_no_process_and_no_file(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "program.py").write_text(LAUNCHES)
    shared, temporary = set(os.listdir("/dev/shm")), Path(tempfile.mkdtemp())  # whose path is short enough for a socket
    program = subprocess.Popen(
        [sys.executable, "program.py", "ranks"], cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)}
    )
    ranks = wait_until(
        lambda: len(os.listdir(tmp_path / "ranks")) == 3 and [int(name) for name in os.listdir(tmp_path / "ranks")]
    )
    os.kill(ranks[0], signal.SIGSTOP)
    program.kill()
    program.wait()
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    left = set(os.listdir("/dev/shm")) - shared  # some of it is others', for a while
    wait_until(lambda: not [name for name in os.listdir(temporary) if not name.startswith("torchinductor")])  # a cache
    shutil.rmtree(temporary)
    wait_until(lambda: not left & set(os.listdir("/dev/shm")))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_a_temporary_folder_whose_path_is_too_long_is_told(tmp_path):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    (tmp_path / "program.py").write_text(LAUNCHES)
    command = [sys.executable, "program.py", "ranks"]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(long)}, capture_output=True, text=True)
    assert "PenstockError: ranks cannot be started: AF_UNIX path too long; set TMPDIR to a folder" in ended.stderr


# Where Python starts, in each rank: in the first attempt rank 1 kills itself when there is one of the FOLDERS, a checkpoint.
FAULT = """
import glob, os, signal, threading, time
def kill():
    while not glob.glob(FOLDERS):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux has a folder in memory")
def test_under_torchrun_penstock_train_goes_on_from_memory_and_leaves_nothing_there(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("FOLDERS", 'f"/dev/shm/penstock-*-{os.getppid()}-*/step-*"'))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = ["--max-restarts", 1, "-m", "penstock", "train", "--out", tmp_path / "runs", "--steps", 30, "--layers", 2]
    words += ["--width", 8, "--batch", 4, "--microbatches", 2, "--context", 8, "--checkpoint-every", 0, "--data", __file__]
    ended = torchrun(2, *words, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    assert "exitcode: -9" in ended.stderr
    (folder,) = re.findall(r"penstock: the ranks go on from (/dev/shm/\S+)/step-\d+", ended.stderr)
    assert not Path(folder).exists()
    ((run,),) = [list((tmp_path / "runs").iterdir())]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 30


def documented_script():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "recovery.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "__main__" in block)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.fresh
def test_the_documented_script_goes_on_under_torchrun_with_the_bits_of_one_that_was_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(documented_script())
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("FOLDERS", 'os.environ["WATCHED"] + "/step-00000020"'))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = "--max-restarts", 1, tmp_path / "train.py", tmp_path / "run"
    ended = torchrun(2, *words, PYTHONPATH=path, WATCHED=str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert "exitcode: -9" in ended.stderr
    alone = python(tmp_path / "train.py", tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    run, other = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    assert run.keys() == other.keys()
    for name, value in run.items():
        assert torch.equal(value, other[name]), name
