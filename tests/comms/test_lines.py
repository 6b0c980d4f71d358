"""What messages travel over: shared memory on one machine, else a process group; the numbers are the same."""

import os

import pytest
import torch
from reference import accumulate, assert_same, gradients, merged
from torch import nn

import penstock as ps
from penstock.comms.messages.lines import GroupReceiver, GroupSender, MemoryReceiver, MemorySender
from penstock.comms.messages.shared import SharedReceiver, SharedSender
from penstock.comms.messages.wire import describe_tensor

pytestmark = pytest.mark.timed

WIDTHS = (8, 40_000)  # a small message, and one that is lent


def make(width):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width))


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def loss_fn(output, target):
    return (output.mean(1, keepdim=True) - target).square().mean()


def rank_lines(shared):
    if not shared:
        del os.memfd_create
    results, kinds = {}, set()
    for width in WIDTHS:
        pipe = ps.Pipeline(make(width), loss_fn, microbatches=4, cuts=["1", "4"])
        losses = []
        for rows in (8, 8, 6):
            batch, target = data(rows)
            losses.append(pipe.step(batch, target=target))
        results[width] = losses, gradients(pipe.named_parameters())
        channels = pipe._engine.channels
        kinds |= {type(channel.line) for channel in (*channels.outgoing.values(), *channels.incoming.values())}
    return results, kinds


@pytest.mark.ranks
@pytest.mark.parametrize("shared", [True, False])
def test_numbers_do_not_depend_on_what_messages_travel_over(shared):
    everyone = ps.launch(rank_lines, 3, shared)
    over = {MemorySender, MemoryReceiver} if shared else {GroupSender, GroupReceiver}
    assert set.union(*(kinds for _, kinds in everyone)) == over
    for width in WIDTHS:
        model = make(width)
        expected = [accumulate(model, loss_fn, data(rows), 4) for rows in (8, 8, 6)]
        for results, _ in everyone:
            assert all(map(torch.equal, results[width][0], expected))
        assert_same(merged([results[width][1] for results, _ in everyone]), gradients(model.named_parameters()))


@pytest.fixture
def ends():
    from datetime import timedelta

    sender = SharedSender()
    receiver = SharedReceiver(os.getpid(), sender.file, sender.reader, timedelta(seconds=0.2))
    yield sender, receiver
    sender.close()
    receiver.close()


def blocks(sender):
    return sum(map(len, sender._blocks.values()))


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).t(), torch.ones(300, 300), torch.ones(1).expand(200_000)])
def test_a_message_arrives_in_its_layout_and_is_the_receivers_own(ends, tensor):
    sender, receiver = ends
    spec = describe_tensor(tensor)
    sender.send(tensor, spec)
    arrived = receiver.receive(spec)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == spec.stride
    arrived.add_(1)
    sender.send(tensor, spec)
    assert torch.equal(receiver.receive(spec), tensor)
    assert torch.equal(arrived, tensor + 1)


@pytest.mark.parametrize(("size", "held"), [(100, 1), (100_000, 3)])
def test_a_block_is_used_again_once_its_message_is_let_go(ends, size, held):
    sender, receiver = ends
    message = torch.arange(float(size))
    spec = describe_tensor(message)
    kept = []
    for _ in range(3):
        sender.send(message, spec)
        kept.append(receiver.receive(spec))
    assert blocks(sender) == held
    kept.clear()
    for _ in range(5):
        sender.send(message, spec)
        assert torch.equal(receiver.receive(spec), message)
    assert blocks(sender) == held


def test_a_silent_sender_and_a_closed_one_end_the_wait(ends):
    sender, receiver = ends
    spec = describe_tensor(torch.ones(3))
    with pytest.raises(RuntimeError, match="timed out"):
        receiver.receive(spec)
    sender.close()
    with pytest.raises(RuntimeError, match="closed the pipe"):
        receiver.receive(spec)
