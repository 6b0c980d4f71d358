"""A snapshot of a tensor that is taken step by step."""

from unittest import mock

import pytest
import torch
from torch import nn

from penstock.guards import tensor_snapshot
from penstock.guards.tensor_snapshot import RepeatedSnapshot

WEIGHTS = {
    "contiguous": torch.arange(1000.0),
    "not contiguous": torch.randn(8, 8).t(),
    "in 16 bits": torch.randn(1000).bfloat16(),
    "complex": torch.randn(10, dtype=torch.complex128),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_repeated_snapshot_sees_changes_of_data(kind):
    weight, snapshot = nn.Parameter(WEIGHTS[kind].clone()), RepeatedSnapshot()
    for _ in range(3):
        snapshot.take(weight)
        assert snapshot.is_unchanged()
        weight.data += 1
        assert not snapshot.is_unchanged()


def test_a_repeated_snapshot_follows_a_weight_to_other_memory_and_to_another_layout():
    weight, snapshot = nn.Parameter(torch.ones(8, 8)), RepeatedSnapshot()
    for data in (torch.full((8, 8), 2.0), torch.randn(8, 8).t(), torch.randn(8, 8).double()):
        snapshot.take(weight)
        weight.data = data
        assert not snapshot.is_unchanged()
        snapshot.take(weight)
        assert snapshot.is_unchanged()


def test_a_repeated_snapshot_of_the_same_weight_calls_no_operation_of_torch():
    weight, snapshot = nn.Parameter(torch.ones(1000)), RepeatedSnapshot()
    snapshot.take(weight)
    with mock.patch.object(tensor_snapshot, "torch"), mock.patch.object(tensor_snapshot, "TensorSnapshot"):
        snapshot.take(weight)
    assert snapshot.is_unchanged()
