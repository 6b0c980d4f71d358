"""A snapshot of a tensor that is taken step by step."""

import torch
from torch import nn

from penstock.guards.tensor_snapshot import RepeatedSnapshot


def test_a_repeated_snapshot_sees_changes_of_data():
    weight, snapshot = nn.Parameter(torch.arange(1000.0)), RepeatedSnapshot()
    for _ in range(3):
        taken = snapshot.take(weight)
        assert taken.is_unchanged()
        weight.data += 1
        assert not taken.is_unchanged()


def test_a_repeated_snapshot_uses_its_memory_again_until_the_tensor_has_another():
    weight, snapshot = nn.Parameter(torch.ones(1000)), RepeatedSnapshot()
    first, second = snapshot.take(weight).values, snapshot.take(weight).values
    assert first.data_ptr() == second.data_ptr()

    weight.data = torch.full((1000,), 2.0)
    taken = snapshot.take(weight)
    assert taken.is_unchanged()
    assert torch.equal(taken.values.view(torch.float32), torch.full((63,), 2.0))


def test_a_repeated_snapshot_takes_weights_that_are_not_contiguous():
    weight, snapshot = nn.Parameter(torch.randn(8, 8).t()), RepeatedSnapshot()
    taken = snapshot.take(weight)
    assert taken.is_unchanged()
    weight.data[0, 0] += 1
    assert not taken.is_unchanged()
