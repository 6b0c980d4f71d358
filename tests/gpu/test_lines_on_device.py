"""Messages through host memory between two processes on one GPU, and between two GPUs where there are."""

import os

import pytest
import torch

import penstock as ps
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.transport.channels import ReceiveChannel, SendChannel, open_receiver, open_sender
from penstock.comms.transport.group_transport import PendingSends
from penstock.comms.transport.send_thread import SendFailure
from penstock.comms.transport.spec_cache import MessageSpecCache
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind

SIZES = (1, 1000, 3_000_000, 1100, 30_000)  # elements: copied out of their block, lent, sent by a thread
DTYPES = (torch.float32, torch.bfloat16, torch.int16)
MESSAGES = {"cpu": 15, "cuda": 240}  # bfloat16 knows whole numbers up to 256
CYCLES = 1_000_000  # of the device, in which it is behind its host


def busy(device):
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)


def rank_messages(devices):
    """How many elements of the messages from rank 0 to rank 1 were wrong."""
    rank = int(os.environ["RANK"])
    topology = ps.comms.init_distributed("gloo", timeout=120, device=devices[rank])
    device, groups = topology.device, ProcessGroups(topology, "messages")
    failure, specs = SendFailure(groups), MessageSpecCache()
    specs.begin_step(["a signature"] * MESSAGES[device.type])
    if rank == 0:
        outgoing = SendChannel(open_sender(groups, "0-1", 1, PendingSends(failure)), failure, specs)
    else:
        incoming = ReceiveChannel(open_receiver(groups, "0-1", 0), 1, 0, specs)

    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(MESSAGES[device.type]):
        size, dtype = SIZES[number % len(SIZES)], DTYPES[number % len(DTYPES)]
        transfer = Transfer(Action(Kind.F, 0, number), 0, 1)
        if rank == 0:
            message = torch.empty(size, dtype=dtype, device=device)
            busy(device)
            outgoing.send(transfer, message.fill_(number))
            del message
            torch.empty(size, dtype=dtype, device=device).fill_(-1)  # in the memory that was let go
        else:
            incoming.post_receive(transfer)
            arrived = incoming.receive(transfer, device)
            busy(device)
            wrong += (arrived != number).sum()
            assert (arrived.device, arrived.dtype, arrived.numel()) == (device, dtype, size)

    groups.world_group.barrier().wait()
    groups.close(failed=False)
    return wrong.item()


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
def test_messages_arrive_while_the_devices_are_behind_their_hosts(devices):
    assert ps.launch(rank_messages, 2, devices) == [0, 0]
