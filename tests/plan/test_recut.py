"""A cut at the times of the last steps: whatever made a stage slow, the next cut is about as fast as one that knew."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from error_text import error_text
from reference import merged
from runners import cases_on_ranks, on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps
from penstock.comms import current_topology
from penstock.partition.balance import PARAMETERS, SECONDS, Balance
from penstock.plan.recut import fastest_cut, rank_speeds
from penstock.schedule import Costs, Measurement, build, simulate
from penstock.schedule.schedule import Schedule
from penstock.timing.timeline import Timeline

LAYERS = 32
EVEN, HEAVY = [1.0] * LAYERS, [1.0] * 20 + [7.0] + [1.0] * 11
ALL_EQUAL, ONE_SLOW = (1.0,) * 4, (1.0, 0.6, 1.0, 1.0)


def step(table: Schedule, costs: Sequence[float], speeds: Sequence[float], starts: Sequence[int]) -> Timeline:
    """A step of this cut, where a layer's backward takes twice its forward."""
    stages = [sum(costs[start:end]) for start, end in pairwise((*starts, LAYERS))]
    forward = [cost / speeds[rank] for cost, rank in zip(stages, table.placement, strict=True)]
    return simulate(table, Costs(forward, forward, forward))


def starts_of(cuts: Sequence[str]) -> list[int]:
    return [0, *map(int, cuts)]


def balance(costs: Sequence[float], starts: Sequence[int], kind: str = SECONDS) -> Balance:
    return Balance(tuple(map(str, range(LAYERS))), tuple(costs), tuple(starts), kind)


@pytest.mark.parametrize("schedule", slow_except(["1f1b"], ["1f1b", "gpipe", "zb-v", "zb-h1"]))
@pytest.mark.parametrize(("costs", "speeds"), [(EVEN, ONE_SLOW), (HEAVY, ALL_EQUAL), (HEAVY, ONE_SLOW)])
def test_where_a_layer_is_heavy_or_a_rank_slow_the_next_cut_is_as_fast_as_the_plan_that_knew(schedule, costs, speeds):
    table = build(schedule, 4, 16)
    even = [LAYERS * stage // table.stages for stage in range(table.stages)]
    found = fastest_cut(Measurement.from_timelines(step(table, costs, speeds, even)), balance(costs, even))
    layers = [ps.plan.LayerCost(str(number), cost, cost, cost) for number, cost in enumerate(costs)]
    [planned, *_] = ps.plan.plan(
        layers, 4, 1e9, batch=16, microbatches=16, speeds=speeds, schedules=schedule, fewer=False, effort="quick"
    )
    makespan = step(table, costs, speeds, starts_of(found.cuts)).makespan
    assert makespan <= 1.03 * planned.seconds
    assert found.predicted_seconds == pytest.approx(makespan)


@pytest.mark.parametrize(("costs", "speeds"), [(EVEN, ONE_SLOW), (HEAVY, ALL_EQUAL)])
def test_without_measured_layers_a_few_cuts_come_as_near(costs, speeds):
    """Each predicts from the times of the cut before."""
    table, starts = build("1f1b", 4, 16), [0, 8, 16, 24]
    for _ in range(4):
        measured = Measurement.from_timelines(step(table, costs, speeds, starts))
        found = fastest_cut(measured, balance(EVEN, starts, PARAMETERS))
        if not found.is_notable:
            break
        starts = starts_of(found.cuts)
    knew = fastest_cut(Measurement.from_timelines(step(table, costs, speeds, starts)), balance(costs, starts))
    assert step(table, costs, speeds, starts).makespan <= 1.03 * knew.predicted_seconds


def test_the_call_to_paste_names_the_cuts_or_says_that_none_gains_enough():
    table, starts = build("1f1b", 4, 8), [0, 8, 16, 24]
    slow, even = (Measurement.from_timelines(step(table, EVEN, speeds, starts)) for speeds in (ONE_SLOW, ALL_EQUAL))
    cut = fastest_cut(slow, balance(EVEN, starts))
    names = ", ".join(f'"{start}"' for start in starts_of(cut.cuts)[1:])
    assert str(cut).startswith(f"pipe.rebuild(cuts=[{names}]): ")
    assert str(cut).endswith(f" ms, {cut.gain:.1%} less")
    assert str(fastest_cut(even, balance(EVEN, starts))) == "no other cut would make the step 1% shorter, the best 0.0%"


def test_a_cut_for_another_table_follows_the_same_speeds():
    measured = Measurement.from_timelines(step(build("1f1b", 4, 16), EVEN, ONE_SLOW, [0, 8, 16, 24]))
    assert rank_speeds(measured, balance(EVEN, [0, 8, 16, 24])) == pytest.approx(ONE_SLOW)
    table = build("zb-v", 4, 16)
    cut = fastest_cut(measured, balance(EVEN, [0, 8, 16, 24]), table)
    sizes = [end - start for start, end in pairwise((*starts_of(cut.cuts), LAYERS))]
    layers_of_rank = [sum(sizes[stage] for stage in table.stages_of(rank)) for rank in range(4)]
    assert layers_of_rank[1] < min(layers_of_rank[rank] for rank in (0, 2, 3))


# ---- on ranks


class SlowerOnRank1(nn.Module):
    """Sleeps in forward and backward as a device would work; rank 1 takes two and a half times as long."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _Sleep.apply(hidden)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        time.sleep(0.0025 if current_topology().rank == 1 else 0.001)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.0025 if current_topology().rank == 1 else 0.001)
        return gradient.clone()


def rank_trains(recuts: bool) -> Any:
    """Losses, weights and optimizer state by name, and the cuts before and after."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), SlowerOnRank1()) for _ in range(6)]
    example = (torch.ones(2, 4),) if recuts else None
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, "1f1b", 4, example_args=example)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    losses, cuts = [], [pipe.cuts]
    for number in range(6):
        if recuts and number == 3:
            pipe, optimizer = pipe.rebuild(cuts="measured", optimizer=optimizer)
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        losses.append(float(pipe.step(rows, target=rows)))
        optimizer.step(), optimizer.zero_grad()
    cuts.append(pipe.cuts)
    moments = {f"{name}.{key}": value for name, p in pipe.named_parameters() for key, value in optimizer.state[p].items()}
    return losses, dict(pipe.state_dict()) | moments, cuts


@pytest.mark.ranks
def test_a_slow_rank_gets_fewer_layers_and_the_training_keeps_its_bits():
    ours, undisturbed = cases_on_ranks(rank_trains, 2, ((True,), (False,))).values()
    for losses, _, ([before], [after]) in ours:
        assert losses == undisturbed[0][0]
        assert int(after) > int(before) == 3
    states = [merged([state for _, state, _ in run]) for run in (ours, undisturbed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def rank_asks() -> Any:
    """What is said before two steps, of stages that were given, and of other calls; then a cut that cannot gain."""
    layers, rows = [nn.Sequential(nn.Linear(4, 4), SlowerOnRank1()) for _ in range(2)], torch.ones(4, 4)
    pipe, given = (ps.Pipeline(model, nn.functional.mse_loss, microbatches=2) for model in (nn.Sequential(*layers), layers))
    pipe.step(rows, target=rows), given.step(rows, target=rows)
    said = [error_text(partial(value.rebuild, cuts="measured"), ps.PenstockError) for value in (pipe, given)]
    said.append(error_text(lambda: pipe.rebuild(cuts="measured" if pipe.topology.rank else ["1"]), ps.PenstockError))
    for _ in range(2):
        pipe.step(rows, target=rows)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    unchanged = pipe.rebuild(cuts="measured"), *pipe.rebuild(cuts="measured", optimizer=optimizer)
    pipe.step(rows, target=rows)
    calls = [value.timeline().recut_call for value in (pipe, given)]
    return said, unchanged == (pipe, pipe, optimizer), calls


@pytest.mark.ranks
def test_without_a_measured_step_or_a_model_to_cut_it_is_refused_and_without_gain_the_pipeline_stays():
    (said, *rest), (other, *other_rest) = on_ranks(rank_asks, 2)
    assert rest == other_rest == [True, ['pipe.rebuild(cuts="measured")', ""]]
    for text, part in zip(
        said,
        (
            'cuts="measured" has no step to measure yet: run two steps first (the first of a kind',
            "cuts= are for a model that was cut",
            'rebuild(cuts="measured")',
        ),
        strict=True,
    ):
        assert part in text
    assert [text.partition(": ")[2] for text in said[:2]] == [text.partition(": ")[2] for text in other[:2]]
