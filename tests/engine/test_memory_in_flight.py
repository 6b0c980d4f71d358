"""What a rank holds: stage outputs go once sent, receives are posted a few at a time, in flight is what the table says."""

import sys
import time
import types
import weakref

import pytest
import torch
from runners import cases_on_ranks
from torch import nn

import penstock as ps
from penstock.comms.transport import channels
from penstock.schedule.program import RECEIVES_AHEAD

pytestmark = pytest.mark.ranks

RANKS, MICROBATCHES = 3, 8


class WatchedMemory(bytearray):
    """Memory one can hold a weak reference to."""


class MemoryCount:
    """Weak references by identity: memory of equal content counts twice."""

    def __init__(self):
        self.references, self.peak = [], 0

    def add(self, memory):
        self.references.append(weakref.ref(memory))
        self.peak = max(self.peak, len(self))

    def __len__(self):
        return sum(reference() is not None for reference in self.references)


class _Watched(torch.autograd.Function):
    """The same numbers in memory that is counted."""

    @staticmethod
    def forward(ctx, hidden, count):
        memory = WatchedMemory(hidden.numel() * hidden.element_size())
        count.add(memory)
        return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MemoryCounter(nn.Module):
    """Counts the inputs, which its weight's gradient needs, and each time it runs its earlier outputs that are still held."""

    def __init__(self, waits):
        super().__init__()
        self.linear, self.waits = nn.Linear(4, 4), waits
        self.linear.weight.register_hook(lambda gradient: None)  # otherwise too small to be deferred
        self.outputs, self.held_outputs = MemoryCount(), 0

    def forward(self, hidden):
        deadline = time.monotonic() + 1000  # not to wait for ever
        while self.waits and self.outputs and time.monotonic() < deadline:
            time.sleep(0.001)  # the next stage takes what was sent without anything more from here
        self.held_outputs = max(self.held_outputs, len(self.outputs))
        # All stages of a rank count together, and find the count by name: it is no state that they share.
        return _Watched.apply(self.linear(_Watched.apply(hidden, sys.modules["__inputs__"].count)), self.outputs)


def rank_counts(schedule):
    """The most inputs that are alive, outputs held after they were sent, and receives posted; what was measured."""
    table, inputs = ps.schedule.build(schedule, RANKS, MICROBATCHES), types.ModuleType("__inputs__")
    inputs.count = MemoryCount()
    one_a_rank = table.stages == RANKS
    stages = [MemoryCounter(waits=one_a_rank and stage < RANKS - 1) for stage in range(table.stages)]
    pipe = ps.Pipeline(stages, nn.functional.mse_loss, table)
    posted, receive = [0], channels.ReceiveChannel.receive

    def counted(self, transfer, device):
        posted.append(len(self.posted))
        return receive(self, transfer, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels.ReceiveChannel, "receive", counted)
        patch.setitem(sys.modules, "__inputs__", inputs)
        for _ in range(2):
            inputs.count.peak = 0
            for stage in pipe.stages.values():
                stage.held_outputs = 0
            pipe.step(torch.ones(MICROBATCHES, 4, requires_grad=True), target=torch.zeros(MICROBATCHES, 4))
    held = [stage.held_outputs for stage in pipe.stages.values() if stage.waits]
    return inputs.count.peak, held, max(posted), pipe.timeline().peak_in_flight


SCHEDULES = tuple((name,) for name in ps.schedule.names())


@pytest.mark.parametrize("schedule", ps.schedule.names())
def test_outputs_go_once_sent_receives_are_bounded_and_saved_activations_are_the_tables(schedule):
    planned = ps.schedule.simulate(ps.schedule.build(schedule, RANKS, MICROBATCHES)).peak_in_flight
    for rank, (saved, held_outputs, posted, measured) in enumerate(cases_on_ranks(rank_counts, RANKS, SCHEDULES)[schedule,]):
        assert measured == planned
        assert saved == planned[rank]
        assert posted <= RECEIVES_AHEAD
        assert not any(held_outputs)
