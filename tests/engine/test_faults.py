"""Every fault ends on every rank, in one clear line, and leaves nothing running.

No rank waits for a timeout, which is ten minutes here and would be told in other words.
"""

import errno
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from error_text import outcome
from reference import OneProcess, assert_as_one_process, data, stepped
from runners import cases_on_ranks, end_shared_ranks, on_ranks
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock.comms import process_groups
from penstock.comms.transport import memory_transport
from penstock.launcher import rank_processes
from penstock.stage.stage import Stage

pytestmark = pytest.mark.ranks

RANKS = 4


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    end_shared_ranks()
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def every_rank_is_heard(monkeypatch):
    """However busy the machine is: the launcher waits for what all have to tell."""
    monkeypatch.setattr(rank_processes, "ERROR_REPORT_SECONDS", 1000.0)


class FaultyLayer(nn.Module):
    """Passes its input on, until it is told to fail."""

    fault = None  # what the next forward or backward does

    def forward(self, hidden):
        if self.fault == "forward":
            raise ValueError("boom in the\nforward")
        if self.fault == "sys.exit":
            sys.exit(3)
        if self.fault == "nonfinite":
            raise ps.NonFiniteError("the layer's own")
        if self.fault == "foreign":
            raise Foreign("of a class that only this rank's program knows")
        if self.fault in ("killed", "stopped", "exit"):
            ps.comms.current_topology().context.heartbeat.monitor.beat_and_check_peers()
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "shape":
            return hidden[:, :5]
        if self.fault == "dtype":
            return hidden.double()
        return _Backward.apply(hidden, self) if self.fault == "backward" else hidden


class Foreign(ps.MismatchError):
    """An error of the family, but not of `errors.py`."""


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, faulty):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("boom in the backward")


def model():
    torch.manual_seed(3)
    layers = [
        nn.Linear(12, 12),
        FaultyLayer(),
        nn.Linear(12, 12),
        FaultyLayer(),
        nn.Linear(12, 12),
        FaultyLayer(),
        nn.Linear(12, 3),
    ]
    return nn.Sequential(*layers)


CUTS = ["2", "4", "6"]
FAULTY = {0: "1", 1: "3", 2: "5"}  # rank -> its layer that can fail


def build(loss_fn=nn.functional.cross_entropy, schedule="1f1b", microbatches=8, **options):
    pipe = ps.Pipeline(model(), loss_fn, schedule=schedule, microbatches=microbatches, cuts=CUTS, **options)
    faulty = [m for stage in pipe.stages.values() for m in stage if isinstance(m, FaultyLayer)]
    return pipe, faulty[0] if faulty else FaultyLayer()


class FaultyLoss:
    fault = None

    def __call__(self, output, target):
        if self.fault == "loss":
            raise KeyError("boom in the loss")
        return nn.functional.cross_entropy(output, target)


def rank_fails_and_goes_on(where, fault, is_first=False):
    """A good step, unless the first one is wrong, one with a fault on rank `where`, and a good one: error, loss, gradients."""
    loss_fn = FaultyLoss()
    pipe, faulty = build(loss_fn)
    inputs, target = data("mlp", 16)
    if not is_first:
        pipe.step(inputs, target=target)
    if pipe.topology.rank == where:
        faulty.fault = loss_fn.fault = fault
    error = None
    try:
        pipe.step(inputs, target=target)
    except (ps.PenstockError, SystemExit) as caught:
        error = caught
    faulty.fault = loss_fn.fault = None
    pipe.zero_grad()
    return type(error).__name__, str(error), stepped(pipe, [(inputs, target)])


@cache
def expected_numbers():
    return stepped(OneProcess(model(), nn.functional.cross_entropy, None, 8), [data("mlp", 16)])


NOT_COMPUTED = "rank 2, stage 2, action 2F0, microbatch 0: RuntimeError: "  # said by the stage that cannot take what comes
SHAPES = "mat1 and mat2 shapes cannot be multiplied (2x5 and 12x12); the output of 1F0 is a (2, 5) float32 tensor"
STEP_FAULTS = {  # rank, what it does, whether in the first step -> the error
    (0, "forward"): "StageError: rank 0, stage 0, action 0F0, microbatch 0: ValueError: boom in the forward",
    (2, "forward"): "StageError: rank 2, stage 2, action 2F0, microbatch 0: ValueError: boom in the forward",
    (0, "backward"): "StageError: rank 0, stage 0, action 0B0, microbatch 0: RuntimeError: boom in the backward",
    (2, "backward"): "StageError: rank 2, stage 2, action 2B0, microbatch 0: RuntimeError: boom in the backward",
    (3, "loss"): "StageError: rank 3, stage 3, action 3F0, microbatch 0: KeyError: 'boom in the loss'",
    (1, "shape"): f"StageError: {NOT_COMPUTED}{SHAPES}",
    (1, "dtype"): f"StageError: {NOT_COMPUTED}mat1 and mat2 must have the same dtype",
    (1, "shape", True): f"StageError: {NOT_COMPUTED}{SHAPES}",
    (1, "dtype", True): f"StageError: {NOT_COMPUTED}mat1 and mat2 must have the same dtype",
    (1, "nonfinite"): "StageError: rank 1, stage 1, action 1F0, microbatch 0: the layer's own",
}
ALL_FAULTS = (*STEP_FAULTS, (1, "foreign"), (2, "sys.exit"))


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_failing_step_ends_on_all_ranks_with_the_same_line_and_the_next_one_is_right(fault):
    everyone = cases_on_ranks(rank_fails_and_goes_on, RANKS, ALL_FAULTS)[fault]
    [text] = {f"{name}: {text}" for name, text, _ in everyone}
    assert text.replace("addmm: ", "").startswith(STEP_FAULTS[fault])  # some kernels say their name
    assert "\n" not in text
    assert_as_one_process([numbers for *_, numbers in everyone], expected_numbers())


def test_an_error_of_a_class_from_elsewhere_is_the_nearest_of_the_family_on_the_others():
    everyone = cases_on_ranks(rank_fails_and_goes_on, RANKS, ALL_FAULTS)[1, "foreign"]
    assert [name for name, *_ in everyone] == ["MismatchError", "Foreign", "MismatchError", "MismatchError"]
    assert {text for _, text, *_ in everyone} == {
        "rank 1, stage 1, action 1F0, microbatch 0: of a class that only this rank's program knows"
    }


def test_a_rank_that_exits_in_an_action_is_named_with_it_on_the_others():
    everyone = cases_on_ranks(rank_fails_and_goes_on, RANKS, ALL_FAULTS)[2, "sys.exit"]
    assert [(name, text) for name, text, *_ in everyone[:2]] == [
        ("PenstockError", "rank 2, in stage 2, action 2F0, microbatch 0: SystemExit: 3")
    ] * 2
    assert [(name, text) for name, text, *_ in everyone[2:]] == [("SystemExit", "3"), (everyone[0][0], everyone[0][1])]


def no_descriptors(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def rank_is_refused_by_its_system(how):
    """A good step, one in which rank 1's system refuses it something, and a good one again."""
    pipe, _ = build()
    inputs, target = data("mlp", 16)
    if how != "to open channels":
        pipe.step(inputs, target=target)
    refused = pipe.topology.rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if how == "to send, in a thread":
            patch.setattr(memory_transport, "MIN_THREAD_BYTES", 0)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        if refused and how == "to open channels":
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
        elif refused:
            method = (
                (memory_transport.MemoryReceiver, "_take_message")
                if how == "to receive"
                else (memory_transport.BlockAllocator, "allocate")
            )
            patch.setattr(*method, no_descriptors)
        with pytest.raises(ps.ResourceError) as raised:
            pipe.step(inputs, target=target)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    pipe.zero_grad()
    return str(raised.value), stepped(pipe, [(inputs, target)])


SYSTEM_REFUSES = {
    "to open channels": "could not open the channel (0-1|1-0)",  # the first that finds no descriptor
    "to send": "could not send the output of 1F0",
    "to send, in a thread": "could not send the output of 1F0",
    "to receive": "could not receive the output of 0F0",
}


@pytest.mark.parametrize(("how", "words"), SYSTEM_REFUSES.items())
def test_what_a_ranks_own_system_refuses_is_told_there_and_on_all_ranks_at_once(how, words):
    if how == "to open channels":  # in new processes, which have no descriptor between others that is free
        everyone = ps.launch(rank_is_refused_by_its_system, RANKS, how)
    else:
        cases = tuple((case,) for case in SYSTEM_REFUSES if case != "to open channels")
        everyone = cases_on_ranks(rank_is_refused_by_its_system, RANKS, cases)[how,]
    (text,) = {text for text, _ in everyone}
    assert re.fullmatch(rf"rank 1 {words}: no file descriptor is free \(limit \d+\): raise `ulimit -n`", text)
    assert_as_one_process([numbers for _, numbers in everyone], expected_numbers())


def rank_exits_in_an_action(rank):
    pipe, faulty = build()
    if pipe.topology.rank == rank:
        faulty.fault = "sys.exit"
    inputs, target = data("mlp", 16)
    pipe.step(inputs, target=target)


@pytest.mark.parametrize("rank", [0, 1])  # the first forward of rank 0 runs before the ranks have agreed
def test_a_program_that_a_ranks_exit_ends_says_which_rank_and_in_which_action(capfd, rank):
    with pytest.raises(SystemExit, match="3"):
        ps.launch(rank_exits_in_an_action, RANKS, rank)
    exited = f"rank {rank} called sys.exit(3) before the function was done, in stage {rank}, action {rank}F0, microbatch 0"
    assert capfd.readouterr().err == f"penstock: {exited}\n"


def rank_disagrees(option, value):
    options = {"schedule": "1f1b", "microbatches": 8}
    if ps.comms.init_distributed().rank == 2:
        options[option] = value
    return outcome(lambda: build(**options), ps.MismatchError)


DISAGREEMENTS = {
    ("microbatches", 4): ("rank 0 has 1f1b with 8 microbatches and 4 stages, rank 2 has 1f1b with 4 microbatches and 4 stages"),
    ("schedule", "gpipe"): (
        "rank 0 has 1f1b with 8 microbatches and 4 stages, rank 2 has gpipe with 8 microbatches and 4 stages"
    ),
    ("on_nonfinite", "skip"): "rank 0 has on_nonfinite=None, rank 2 has on_nonfinite=skip",
    ("reduction", "sum"): "rank 0 has reduction=mean, rank 2 has reduction=sum",
    ("rows_dim", 1): "rank 0 has rows_dim=0, rank 2 has rows_dim=1",
    ("rows_per_sample", 2): "rank 0 has rows_per_sample=1, rank 2 has rows_per_sample=2",
}


@pytest.mark.parametrize(("option", "words"), DISAGREEMENTS.items())
def test_ranks_that_build_different_pipelines_are_told_so(option, words):
    everyone = cases_on_ranks(rank_disagrees, RANKS, tuple(DISAGREEMENTS))[option]
    assert everyone == [f"the ranks do not build the same pipeline: {words}"] * RANKS


def rank_with_stages_of_its_own_number(rank_with_two):
    schedule = "zb-v" if ps.comms.init_distributed().rank == rank_with_two else "1f1b"
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    return outcome(lambda: ps.Pipeline(model, nn.functional.mse_loss, schedule, 4), ps.MismatchError)


@pytest.mark.parametrize("rank_with_two", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_that_cut_a_model_into_different_numbers_of_stages_are_told_so(rank_with_two):
    names = [f"{name} with 4 microbatches and {count} stages" for name, count in (("1f1b", 2), ("zb-v", 4))]
    first, second = names if rank_with_two else reversed(names)
    sentence = f"the ranks do not build the same pipeline: rank 0 has {first}, rank 1 has {second}"
    assert ps.launch(rank_with_stages_of_its_own_number, 2, rank_with_two) == [sentence] * 2


def rank_has_another_target():
    pipe, _ = build()
    inputs, target = data("mlp", 16)
    text = outcome(lambda: pipe.step(inputs, target=target if pipe.topology.rank != 3 else target[:9]), ps.MismatchError)
    return text, pipe.eval(inputs) is None


def test_ranks_with_targets_of_other_rows_are_told_so_before_data_flows():
    words = (
        "the ranks were given different batches: the target has 16 rows on rank 0, 9 on rank 3. Give all of them the same "
        "(pipe.sampler(dataset), one seed for all loaders), or None where they are not read"
    )
    assert on_ranks(rank_has_another_target, RANKS) == [(words, rank < 3) for rank in range(RANKS)]


def rank_loses_one(where, fault, folder):
    pipe, faulty = build()
    inputs, target = data("mlp", 16)
    pipe.step(inputs, target=target)
    if pipe.topology.rank == where:
        faulty.fault = fault
    try:
        pipe.step(inputs, target=target)
    except ps.PenstockError as error:
        result = type(error).__name__, str(error)
        (Path(folder) / str(pipe.topology.rank)).write_text(json.dumps(result))
        raise


@pytest.mark.parametrize(
    ("where", "fault"),
    slow_except([(0, "killed"), (1, "stopped"), (2, "exit")], product([0, 1, 2], ["killed", "exit", "stopped"])),
)
def test_a_rank_that_dies_or_stops_is_named_by_all_others_with_the_action_waited_for(where, fault, tmp_path, request):
    stop = r"\(SIGSTOP; to pause a job, stop all its processes\)"
    verb = f"is stopped {stop}" if fault == "stopped" else r"is gone \(its output and its exit code may say why\)"
    last_seen = rf", last seen in {where}F\d of step 2"
    end = {
        "killed": r"was killed by SIGKILL \(out of memory\? see dmesg\)",
        "exit": r"ended with exit code 3 before it was done \(its output may say why; os\._exit\(\) prints nothing\)",
        "stopped": rf"({verb}|was stopped by a signal for 3 s, and was ended \(to pause a job, stop all its processes\))",
    }[fault]  # as the process that launched the ranks says it
    waited = r"the .* of \d[FB]\d from rank \d|rank \d to begin step\(\), before \d[FB]\d"  # of whoever noticed first
    if request.config.getoption("--over-nccl") == "ahead":
        waited += r"|rank \d to end the step, after \d[FB]\d"  # to which hosts run ahead
    with pytest.raises(ps.LostRankError, match=f"rank {where} {end}{last_seen}: rank . waited for ({waited})(: |;|$)"):
        ps.launch(rank_loses_one, RANKS, where, fault, str(tmp_path))
    output = {int(path.name): json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert output.keys() == set(range(RANKS)) - {where}
    for family, text in output.values():
        assert family == "LostRankError"
        assert re.match(f"rank {where} {verb}{last_seen}: ", text)


def ends(process):
    """What an interrupted command printed; none of its processes is left a moment later."""
    output, _ = process.communicate()
    while True:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return output
        time.sleep(0.05)


@contextmanager
def training(folder):
    """`penstock train`, started in a group of its own, which is killed at the end."""
    small = ["--batch", "8", "--width", "16", "--context", "16", "--layers", "3"]
    command = [sys.executable, "-m", "penstock", "train", "--ranks", "2", "--steps", "10000", *small, "--out", str(folder)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where these tests run in the background it is ignored
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which processes a process has started")
def test_ctrl_c_while_all_of_it_is_still_starting_is_one_line_too(tmp_path):
    with training(tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in children.read_text().split()):
            time.sleep(0.01)  # until the server that ranks are forked from imports torch
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate()[0] == "penstock: interrupted\n"
        assert process.returncode == 130


@pytest.mark.parametrize("whom", ["the terminal's whole group", pytest.param("the command alone", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_training_with_one_line_and_leaves_no_process(whom, tmp_path):
    with training(tmp_path) as process:
        assert process.stdout is not None
        assert any("step 1/10000" in line for line in process.stdout)
        send = os.killpg if whom.startswith("the terminal") else os.kill
        send(process.pid, signal.SIGINT)
        assert ends(process).strip().splitlines()[-1] == "penstock: interrupted"
        assert process.returncode == 130


def rank_fails_before_its_lines_are_open():
    """Rank 1 fails in the step after one that failed, before it does anything with the other ranks."""
    pipe, faulty = build()
    inputs, target = data("mlp", 16)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        for fails in (lambda: setattr(faulty, "fault", "forward"), lambda: patch.setattr(Stage, "begin_step", no_memory)):
            if pipe.topology.rank == 1:
                fails()
            with pytest.raises(ps.PenstockError) as raised:
                pipe.step(inputs, target=target)
            errors.append(str(raised.value))
            faulty.fault = None
    return errors, pipe.step(inputs, target=target)


def no_memory(stage):
    raise ps.ResourceError("rank 1 has no memory")


def test_a_rank_that_fails_first_thing_after_a_failed_step_is_heard_by_the_others():
    everyone = ps.launch(rank_fails_before_its_lines_are_open, RANKS)
    assert [second for (_, second), _ in everyone] == ["rank 1 has no memory"] * RANKS
    assert_as_one_process([[loss] for _, loss in everyone], expected_numbers()[0])


class Said(io.StringIO):
    """What is written, which the ranks that meet at `store` can wait for."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def write(self, text):
        self.store.set("said", text)
        return len(text)


def rank_is_at_other_work():
    """Rank 1 is, until rank 0 has said that it waits for it; then both go on."""
    pipe, _ = build()
    rank, store, (inputs, target) = pipe.topology.rank, pipe.topology.store, data("mlp", 16)
    pipe.step(inputs, target=target)
    if rank == 1:
        store.wait(["said"])
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Said(store)) if rank == 0 else nullcontext():
        if rank == 0:
            patch.setattr(process_groups, "LONG_WAIT_HEARTBEATS", 2)
        loss = pipe.step(inputs, target=target)
    return store.get("said").decode(), loss


def test_a_long_wait_for_a_rank_that_has_not_begun_a_call_is_said_and_goes_on():
    waited = "penstock: rank 0 has waited for 1 s for rank 1 to begin step(), before 0F0, and waits 600 s at most: "
    for said, loss in ps.launch(rank_is_at_other_work, RANKS):
        assert said.startswith(waited)
        assert_as_one_process([[loss]], expected_numbers()[0])
