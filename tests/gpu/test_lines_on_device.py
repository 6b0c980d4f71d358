"""Messages between two processes on one GPU, and between two GPUs where there are: by CUDA IPC, and through host memory."""

import os

import pytest
import torch

import penstock as ps
from penstock import torch_private
from penstock.comms.groups import Groups
from penstock.comms.messages.group_line import Outbox
from penstock.comms.messages.lines import receiving_line, sending_line
from penstock.comms.messages.wire import describe_tensor
from penstock.comms.messages.worker import SendFailure

SIZES = (1, 1000, 3_000_000, 1100, 30_000)  # elements; the fourth fits a block that the second has had, but not its memory
DTYPES = (torch.float32, torch.bfloat16, torch.int16)
MESSAGES = {"cpu": 15, "cuda": 240}  # bfloat16 knows whole numbers up to 256
CYCLES = 1_000_000  # of the device, in which it is behind its host


def refused(*_):
    raise RuntimeError("refused by the test")


def busy(device):
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)


def rank_messages(devices, by_ipc):
    """What carried the messages from rank 0 to rank 1, and how many of their elements were wrong."""
    if not by_ipc:
        torch_private.exported = refused
    rank = int(os.environ["RANK"])
    topology = ps.comms.init_distributed("gloo", timeout=120, device=devices[rank])
    device, groups = topology.device, Groups(topology, "messages")
    outbox = Outbox(SendFailure(groups))
    line = receiving_line(groups, "0-1", 0) if rank else sending_line(groups, "0-1", 1, outbox)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(MESSAGES[device.type]):
        message = torch.empty(SIZES[number % len(SIZES)], dtype=DTYPES[number % len(DTYPES)], device=device)
        spec = describe_tensor(message)
        if rank == 0:
            busy(device)
            line.send(message.fill_(number), spec)
            del message
            torch.empty(spec.shape, dtype=spec.dtype, device=device).fill_(-1)  # in the memory that was let go
        else:
            arrived = line.wait(line.post(spec), spec)
            busy(device)
            wrong += (arrived != number).sum()
    if rank:
        line.settle()
    wrong = wrong.item()
    groups.everyone.barrier().wait()
    groups.close(failed=False)
    return line.way, wrong


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "devices",
    [
        ("cpu", "cpu"),
        pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu),
        pytest.param(("cuda:0", "cuda:1"), marks=[pytest.mark.gpu, TWO]),
    ],
    ids=["CPU", "one GPU", "two GPUs"],
)
@pytest.mark.parametrize("by_ipc", [True, False], ids=["IPC", "host memory"])
def test_messages_arrive_while_the_devices_are_behind_their_hosts(devices, by_ipc):
    if devices[0] == "cpu" and not by_ipc:
        pytest.skip("on the CPU there is one way only")
    (way, _), (_, wrong) = ps.launch(rank_messages, 2, devices, by_ipc)
    print(f"{' to '.join(devices)}: {way}")
    assert wrong == 0
    if devices[0] != "cpu" and by_ipc and not way.endswith("(CUDA IPC)"):
        pytest.skip(f"messages were right, but by {way}")
