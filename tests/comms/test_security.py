"""Who is not a rank gets in nowhere: nobody listens beyond this machine, and another user comes neither to store nor memory.

This file is the program of torchrun's ranks as well.
"""

import ctypes
import os
import socket
import sys
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds it, but not this program

import pytest
import torch
import torch.distributed as dist
from open_files import open_files
from prompt import torchrun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.comms.encoding import all_gather_values, encode
from penstock.comms.transport.shared_memory import create_shared_memory
from penstock.launcher.pipe_store import PipeStore, serve_store

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who listens")
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
NOBODY = 65534


def listening(process):
    """The addresses, in hexadecimal, at which a process listens to TCP, and the paths of its listening Unix sockets."""
    sockets = {file.removeprefix("socket:[").removesuffix("]") for file in open_files(process) if file.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    paths = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return (
        {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets},
        [row[7] if len(row) > 7 else "" for row in paths if row[3] == "00010000" and row[6] in sockets],
    )


def pipeline():
    pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), nn.functional.mse_loss, "1f1b", 2)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    dist.broadcast(torch.ones(2), 0)
    return pipe


PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls


def opened(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True


def fetched(process, number):
    """A descriptor of another process, as this one's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(PIDFD_GETFD, libc.syscall(PIDFD_OPEN, process, 0), number, 0) < 0:
        raise OSError(ctypes.get_errno())


def come_to(processes, paths):
    """How much this process can open of others': files, sockets and memory by their numbers, Unix sockets by their paths."""
    attempts = [lambda path=path: socket.socket(socket.AF_UNIX).connect(path) for path in paths]
    for process in processes:
        attempts.append(lambda process=process: os.open(f"/proc/{process}/mem", os.O_RDWR))
        for number in range(100):
            attempts.append(lambda process=process, number=number: os.open(f"/proc/{process}/fd/{number}", os.O_RDWR))
            attempts.append(lambda process=process, number=number: fetched(process, number))
    return sum(map(opened, attempts))


def as_somebody_else(function, *args):
    """The number that `function` gives where another user calls it, with nothing but his own rights."""
    reader, writer = os.pipe()
    if not os.fork():
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, str(function(*args)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        return int(file.read())


def rank_tried(launcher):
    """How much of ranks and launcher another user comes to, and this one; at which addresses they listen."""
    pipe, server, found = pipeline(), os.getppid(), []
    processes = [*all_gather_values(os.getpid(), torch.device("cpu")), launcher, server]
    if pipe.topology.rank == 0 and os.getuid() == 0:
        paths = [path for process in processes for path in listening(process)[1]]
        found = [as_somebody_else(come_to, processes, paths), come_to(processes[:2], [])]
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return found, set.union(*[listening(process)[0] for process in processes])


@linux
@pytest.mark.ranks
def test_launched_ranks_listen_on_the_loopback_only_and_another_user_comes_to_nothing_of_theirs():
    before = listening(os.getpid())[0]
    for found, addresses in ps.launch(rank_tried, 2, os.getpid()):
        assert addresses - before <= LOOPBACK
        if found:  # root can ask as somebody else
            other, own = found
            assert own > 10
            assert other == 0


@pytest.mark.slow
@linux
@pytest.mark.ranks
@pytest.mark.fresh
def test_ranks_of_torchrun_on_one_machine_listen_on_the_loopback_only():
    done = torchrun(2, __file__)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("listens on the loopback") == 2


@linux
def test_memory_is_its_owners_alone():
    memory, file = create_shared_memory(4096)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    memory.close()
    os.close(file)


# ---- the store


@pytest.fixture
def store():
    ours, theirs = Pipe()
    kept = dist.HashStore()
    serve_store(kept, ours)
    yield kept, PipeStore(theirs)
    theirs.close()


@pytest.mark.parametrize("prefix", [False, True])
def test_the_store_of_launch_is_one_of_torchs(store, prefix):
    kept, found = store
    found = dist.PrefixStore("p", found) if prefix else found
    found.set("text", "a")
    found.set("bytes", b"\x00\xff")
    assert (found.get("text"), found.get("bytes")) == (b"a", b"\x00\xff")
    assert (found.add("number", 3), found.add("number", -1)) == (3, 2)
    assert found.check(["text", "number"])
    assert not found.check(["text", "other"])
    assert found.compare_set("new", "", "1") == b"1"
    assert found.compare_set("new", "2", "3") == b"1"
    assert found.compare_set("new", "1", "3") == b"3"
    assert found.multi_get(["text", "new"]) == [b"a", b"3"]
    found.multi_set(["x", "y"], ["1", "2"])
    assert found.num_keys() == kept.num_keys() == 6
    assert found.delete_key("x")
    found.wait(["y"])
    assert kept.check(["p/y" if prefix else "y"])
    threading.Timer(0.05, kept.set, ["p/late" if prefix else "late", "z"]).start()
    assert found.get("late") == b"z"
    found.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match=r"timed out: nobody has set (p/)?never"):
        found.wait(["never"], timedelta(seconds=0.05))


def test_threads_of_a_rank_share_the_store(store):
    _, found = store
    threads = [threading.Thread(target=lambda: [found.add("n", 1) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.get("n") == b"400"


def test_a_store_whose_process_is_gone_is_told_as_lost():
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(dist.DistNetworkError, match="the store is gone, with the process that launched the ranks"):
        PipeStore(theirs).get("key")


@pytest.mark.parametrize("request_", [b"", b"x" * 100, encode(["__class__"]), encode(["get"])])
def test_a_request_that_no_rank_makes_ends_the_connection_and_nothing_else(request_):
    ours, theirs = Pipe()
    kept = dist.HashStore()
    serve_store(kept, ours)
    theirs.send_bytes(request_)
    with pytest.raises((EOFError, ConnectionError)):
        theirs.recv_bytes()
    assert kept.num_keys() == 0


def rank_of_plain_torch():
    """A program that knows torch and nothing of Penstock."""
    dist.init_process_group("gloo")
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    dist.barrier(dist.new_group([0, 1]))
    mesh = init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
    return tensor.item(), mesh.size()


@pytest.mark.ranks
def test_launched_programs_may_join_with_torchs_own_call():
    assert ps.launch(rank_of_plain_torch, 2) == [(3.0, 2)] * 2


if __name__ == "__main__":
    pipeline()
    print("listens on the loopback" if listening(os.getpid())[0] <= LOOPBACK else listening(os.getpid()))
