"""Several machines: a torchrun agent on each, shared memory within, a network between; and the lines that the docs give.

This file is the program of the ranks as well: `test_several_machines.py numbers FOLDER`.
"""

import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds it, but not this program

import pytest
import torch
from hosts import TORCHRUN, hosts, run, torchrun, why_not
from reference import OneProcess, assert_as_one_process, data, gradients, stepped
from reference import make as make_model

import penstock as ps
from penstock.comms.backends import find_interface
from penstock.comms.rendezvous import agree_on_run_id
from penstock.comms.transport.shared_memory import SECRET, create_shared_memory, open_shared_memory
from penstock.schedule.table import dependencies

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "howto" / "several-machines.md"
SCHEDULES = ("1f1b", "zb-v", "interleaved-1f1b")
MICROBATCHES, ROWS, STEPS = 6, 12, 3

needs_hosts = pytest.mark.skipif("why_not() is not None", reason=why_not() or "")


# ---- what a rank runs


def rank_numbers(folder):
    """Train with every schedule and write down what came out, by what messages travelled, and how the clocks compare."""
    topology = ps.comms.init_distributed()
    results = {"host": socket.gethostname(), "runs": {}}
    for schedule in SCHEDULES if topology.world_size == 4 else SCHEDULES[:1]:
        pipe, losses = trained(schedule)
        timeline = pipe.timeline()
        lines = {peer: type(channel.transport).__name__ for peer, channel in pipe._engine.open_channels().outgoing.items()}
        one = {
            "losses": losses,
            "gradients": gradients(pipe.named_parameters()),
            "lines": lines,
            "skew": pipe._engine.clock_skew,
        }
        results["runs"][schedule] = one | {"timeline": timeline, "error": pipe.clock_error}
    torch.save(results, folder / f"rank-{topology.rank}.pt")


def trained(schedule):
    model, loss_fn = make_model("gpt", depth=8)
    pipe = ps.Pipeline(model, loss_fn, schedule, MICROBATCHES)
    return pipe, [pipe.step(inputs, target=target) for inputs, target in map(batch, range(STEPS))]


def batch(step):
    return data("gpt", ROWS, seed=step)


def rank_killed(folder):
    """Train as above; then the last rank kills itself, and the others write down what they are told."""
    rank_numbers(folder)
    topology = ps.comms.current_topology()
    pipe, _ = trained("1f1b")
    if topology.rank == topology.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pipe.step(*batch(0)[:1], target=batch(0)[1])
    except ps.PenstockError as error:
        results = {"kind": type(error).__name__, "text": str(error)}
        (folder / f"rank-{topology.rank}.json").write_text(json.dumps(results))
        raise


# ---- what is so


def check_numbers(folder, ranks, host_of):
    """What all ranks wrote: the numbers of one process, and the right way for every message."""
    everyone = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
    expected = stepped(OneProcess(*make_model("gpt", depth=8), None, MICROBATCHES), map(batch, range(STEPS)))
    for rank, result in enumerate(everyone):
        assert result["host"] == host_of(rank)
    for schedule in everyone[0]["runs"]:
        runs = [result["runs"][schedule] for result in everyone]
        assert_as_one_process([[value["losses"], value["gradients"]] for value in runs], expected)
        for rank, value in enumerate(runs):
            for peer, line in value["lines"].items():
                assert line == ("MemorySender" if host_of(peer) == host_of(rank) else "GroupSender"), (schedule, rank, peer)
    return everyone


def check_clocks(message):
    """The hosts' clocks are a thousand seconds apart, and no message arrives before it is sent."""
    for rank, value in enumerate(message):
        for one in value["runs"].values():
            assert one["skew"].offset == pytest.approx(-1000 * int(value["host"][-1]), abs=max(0.1, one["skew"].error)), rank
    for schedule, one in message[0]["runs"].items():
        at = {event.action: event for event in one["timeline"].events}
        for event in at.values():
            for options in dependencies(event.action, 4 if schedule == "1f1b" else 8):
                for needed in [at[action] for action in options if action in at and at[action].rank != event.rank]:
                    assert needed.end <= event.start + 2 * one["error"], schedule


def lines_of_docs(word):
    """The torchrun lines of the section of the docs whose heading has `word`, without the program."""
    section = next(part for part in DOCS.read_text().split("\n## ") if word in part.splitlines()[0])
    return [
        line.removesuffix(" train.py").split()[1:] for line in re.findall(r"^torchrun .* train\.py$", section, re.MULTILINE)
    ]


@pytest.mark.slow
@needs_hosts
def test_the_documented_lines_train_on_two_machines_with_the_numbers_of_one_process(tmp_path):
    lines = lines_of_docs("The first machine is known")
    assert len(lines) == 2
    with hosts(2, "100mbit") as on:
        before = [host.sent() for host in on]
        ended = run(on, [[*TORCHRUN, *line, __file__, "numbers", str(tmp_path)] for line in lines])
        crossed = [host.sent() - count for host, count in zip(on, before, strict=True)]
    assert [process.code for process in ended] == [0, 0], "\n".join(process.output for process in ended)
    result = check_numbers(tmp_path, 4, lambda rank: f"host-{rank // 2}")
    check_clocks(result)
    activation = 4 * ROWS * 6 * 8  # bytes: (rows, time, width) floats
    assert min(crossed) > activation * STEPS * (1 + 2 + 3)  # borders of the three schedules that lie between the hosts


@pytest.mark.slow
@needs_hosts
def test_a_rank_killed_on_one_of_three_machines_is_named_on_the_others(tmp_path):
    with hosts(3) as on:
        commands = torchrun(on, 1, __file__, "killed", str(tmp_path))
        ended = run(on, commands, env={"OMP_NUM_THREADS": "1"})  # torchrun sets it only for several ranks
    assert all(process.code for process in ended)
    check_numbers(tmp_path, 3, lambda rank: f"host-{rank}")
    for rank in range(2):
        output = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert output["kind"] == "LostRankError"
        assert output["text"].startswith("rank 2 is gone (its output and its exit code may say why): rank ")
        assert f"LostRankError: {output['text']}" in ended[rank].output


@pytest.mark.slow
@needs_hosts
def test_penstock_train_runs_by_the_documented_line_that_is_the_same_on_every_machine(tmp_path):
    (line,) = lines_of_docs("The same line on every machine")
    small = ["--steps", "3", "--layers", "4", "--width", "16", "--batch", "8", "--microbatches", "4", "--context", "8"]
    program = ["-m", "penstock", "train", "--data", __file__, "--out", str(tmp_path), *small]
    with hosts(2) as on:
        ended = run(on, [[*TORCHRUN, *line, *program]] * 2)
    assert [process.code for process in ended] == [0, 0], "\n".join(process.output for process in ended)
    output = "".join(process.output for process in ended)
    assert len(re.findall(r"^loss [\d.]+ -> [\d.]+, on the held-out part", output, re.MULTILINE)) == 1
    assert re.search(r"^clocks of different machines: compared, to \d+ us$", output, re.MULTILINE)
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 1


def test_every_start_of_the_ranks_has_a_name_of_its_own_whoever_comes_first():
    """With several machines torchrun's own count will not do: one agent may count a restart that another has not."""
    store, timeout = torch.distributed.HashStore(), timedelta(seconds=1000)

    def started(order):
        with ThreadPoolExecutor(len(order)) as ranks:
            coming = []
            for rank in order:
                coming.append(ranks.submit(agree_on_run_id, store, rank, len(order), timeout))
                time.sleep(0.02)
            return {message.result() for message in coming}

    names = [started(order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
    with pytest.raises(ps.LostRankError, match=r"rank 1 waited 0.1 s for the other ranks to start"):
        agree_on_run_id(store, 1, 2, timedelta(seconds=0.1))


def test_a_process_of_another_machine_with_the_same_number_is_not_taken_for_the_sender():
    """As ranks in containers often have: it may even have such a file, with a message for somebody else."""
    memory, file = create_shared_memory(4096)
    memory[SECRET.size] = 7
    assert open_shared_memory(os.getpid(), file, bytes(SECRET.size)) is None
    assert open_shared_memory(os.getpid(), file + 1000, memory[: SECRET.size]) is None
    seen = open_shared_memory(os.getpid(), file, memory[: SECRET.size])
    assert seen is not None
    assert seen[SECRET.size] == 7  # what was sent is still there
    os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which interface has an address")
def test_the_interface_that_leads_to_the_other_ranks_is_never_a_loopback_where_they_are_elsewhere():
    assert find_interface("localhost", several_machines=False) == "lo"
    assert find_interface("localhost", several_machines=True) != "lo"


def test_the_manifest_and_the_batch_script_are_whole():
    yaml = pytest.importorskip("yaml")
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm.sh")], check=True)
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    command = container["command"][-1]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert f"--nnodes {job['spec']['completions']}" in " ".join(command.split())
    assert f"--master-addr {job['metadata']['name']}-0.{service['metadata']['name']}" in " ".join(command.split())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs says where
    {"numbers": rank_numbers, "killed": rank_killed}[sys.argv[1]](Path(sys.argv[2]))
    ps.comms.shutdown()
    os._exit(0)  # an interpreter that has loaded torch takes a second of its core to end, on each rank
