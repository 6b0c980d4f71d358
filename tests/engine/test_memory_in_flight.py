"""What a rank holds: stage outputs go once sent, receives are posted a few at a time, in flight is what the table says."""

import time
import weakref

import pytest
import torch
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock.comms.transport import channels
from penstock.schedule.program import RECEIVES_AHEAD

pytestmark = pytest.mark.ranks

MICROBATCHES = 8


class WeakIdSet:
    """Weak references by identity: memory of equal content counts twice."""

    def __init__(self):
        self.references = []

    def add(self, item):
        self.references.append(weakref.ref(item))

    def __len__(self):
        return sum(reference() is not None for reference in self.references)


class OutputCounter(nn.Module):
    """Counts, each time it runs, its earlier outputs whose memory is still held, and activations saved for the backward."""

    def __init__(self, sends):
        super().__init__()
        self.linear, self.sends = nn.Linear(4, 4), sends
        self.outputs, self.peak_outputs = WeakIdSet(), 0
        self.saved, self.peak_saved = WeakIdSet(), 0

    def forward(self, hidden):
        deadline = time.monotonic() + 1000  # not to wait for ever
        while self.sends and self.outputs and time.monotonic() < deadline:
            time.sleep(0.001)  # the next stage takes what was sent without anything more from here
        self.peak_outputs = max(self.peak_outputs, len(self.outputs))
        hidden = self.linear(_Saving.apply(hidden, self))
        self.peak_saved = max(self.peak_saved, len(self.saved))
        return _Owned.apply(hidden, self)


class ReferencedMemory(bytearray):
    """Memory one can hold a weak reference to."""


class _Owned(torch.autograd.Function):
    """The same numbers in memory that is watched."""

    @staticmethod
    def forward(ctx, hidden, watched):
        memory = ReferencedMemory(hidden.numel() * hidden.element_size())
        watched.outputs.add(memory)
        return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SavedActivation:
    """Stands for what one microbatch saved for its backward; alive as long as the graph is."""


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, watched):
        ctx.held = SavedActivation()
        watched.saved.add(ctx.held)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def rank_watch(schedule):
    pipe = ps.Pipeline(
        [OutputCounter(sends=stage < 2) for stage in range(3)],
        nn.functional.mse_loss,
        schedule=schedule,
        microbatches=MICROBATCHES,
    )
    batch, posted = torch.ones(MICROBATCHES, 4, requires_grad=True), [0]
    take = channels.ReceiveChannel.receive

    def counting(self, transfer, device):
        posted.append(len(self.posted))
        return take(self, transfer, device)

    channels.ReceiveChannel.receive = counting
    (watched,) = pipe.stages.values()
    for _ in range(2):
        watched.peak_outputs = watched.peak_saved = 0
        pipe.step(batch, target=torch.zeros(MICROBATCHES, 4))
    return watched.peak_outputs, watched.peak_saved, max(posted), pipe.timeline().peak_in_flight


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_outputs_go_once_sent_receives_are_bounded_and_saved_activations_are_the_tables(schedule):
    planned = ps.schedule.simulate(ps.schedule.build(schedule, 3, MICROBATCHES)).peak_in_flight
    everyone = on_ranks(rank_watch, 3, schedule)
    for rank, (outputs, saved, posted, measured) in enumerate(everyone):
        assert measured == planned
        assert saved == planned[rank]
        assert posted <= RECEIVES_AHEAD
        if rank < 2:
            assert outputs == 0
