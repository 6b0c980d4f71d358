"""Random valid tables, proved, run on real processes: the bits of one process that sums in the table's order."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from random_tables import valid_tables
from reference import assert_same, data, gradients, make, merged
from runners import on_ranks
from torch import Tensor

import penstock as ps
from penstock.schedule import Kind, Schedule, verify

pytestmark = pytest.mark.ranks

DEPTH, ROWS = 12, 2


def rank_run(table: Schedule, kind: str) -> tuple[Tensor, dict[str, Any]]:
    model, loss_fn = make(kind, depth=DEPTH)
    pipe = ps.Pipeline(model, loss_fn, table)
    inputs, target = data(kind, ROWS * table.microbatches)
    return pipe.step(inputs, target=target), gradients(pipe.named_parameters())


def in_table_order(table: Schedule, kind: str) -> tuple[Tensor, dict[str, Any]]:
    """One process: each microbatch by itself, then every stage's gradients summed in the order of its B or W."""
    model, loss_fn = make(kind, depth=DEPTH)
    inputs, target = data(kind, ROWS * table.microbatches)
    losses, parts = [], []
    for m in range(table.microbatches):
        model.zero_grad()
        loss = loss_fn(model(inputs[ROWS * m : ROWS * (m + 1)]), target[ROWS * m : ROWS * (m + 1)])
        loss.backward(torch.full_like(loss, 1 / table.microbatches))
        losses.append(loss.detach() * (1 / table.microbatches))
        parts.append(gradients(model.named_parameters()))
    sums: dict[str, Any] = {}
    for stage, module in enumerate(ps.partition.split(model, table.stages)):
        row = table.actions[table.placement[stage]]
        order = [action.microbatch for action in row if action.stage == stage and action.kind in (Kind.B, Kind.W)]
        for name, _ in module.named_parameters():
            value = [parts[m][name] for m in order]
            sums[name] = None if value[0] is None else sum(value[1:], value[0].clone())
    return sum(losses[1:], losses[0]), sums


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(valid_tables())
def test_a_random_valid_table_runs_to_the_end_with_the_right_bits(table: Schedule) -> None:
    verify(table)
    kind = ("mlp", "gpt", "mixed")[len(table.actions[0]) % 3]
    everyone = on_ranks(rank_run, table.ranks, table, kind)
    loss, expected = in_table_order(table, kind)
    assert all(result == loss for result, _ in everyone)
    assert_same(merged([grads for _, grads in everyone]), expected)
