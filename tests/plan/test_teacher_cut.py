"""Plans with a teacher: both models are cut by what the ranks have idle, and memory counts what the teacher takes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import OneProcess, assert_as_one_process, gradients, stepped
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.plan_option import apply_plan
from penstock.plan import LayerCost, Plan, load, plan

MB = 1e6


def layers(count: int, name: str, first: float = 1.0, seconds: float = 0.002) -> list[LayerCost]:
    """Layers of 2 ms a row for each of F, I and W, 4 MB of activations, 1 MB of parameters; the first some times as slow."""
    block = LayerCost("", seconds, seconds, seconds, 4 * MB, 2 * MB, 1 * MB, 0.5 * MB)
    blocks = [block._replace(name=f"{name}.{number}") for number in range(count)]
    times = {kind: first * getattr(block, kind) for kind in ("forward", "backward_input", "backward_weight")}
    return [blocks[0]._replace(**times), *blocks[1:]]


def planned(memory: float = 1e9, **options: Any) -> list[Plan]:
    defaults = {"batch": 8, "microbatches": 8, "effort": "quick", "schedules": ["1f1b"], "teacher": layers(12, "teacher")}
    return plan(layers(8, "model", first=3.0), 2, memory, **defaults | options)


def layers_by_rank(found: Plan, names: tuple[str, ...], cuts: tuple[str, ...], placement: tuple[int, ...]) -> list[int]:
    """Return how many of the layers each rank has."""
    borders = [0, *map(names.index, cuts), len(names)]
    counts = [0] * found.ranks
    for rank, (start, end) in zip(placement, pairwise(borders), strict=True):
        counts[rank] += end - start
    return counts


@pytest.mark.costly
def test_both_models_are_cut_by_what_each_rank_has_idle() -> None:
    """Rank 0 has the slow layer, so that rank 1 has most of the teacher's layers, and both work as long."""
    found = planned()[0]
    table, teacher = found.schedule, found.schedule.num_trained_stages
    assert (table.teacher, table.ahead) == (teacher, True)
    assert len(found.cuts) == len(found.recompute) - 1 == teacher - 1
    of_model = layers_by_rank(found, found.layers, found.cuts, table.placement[:teacher])
    of_teacher = layers_by_rank(found, found.teacher_layers, found.teacher_cuts, table.placement[teacher:])
    seconds = [
        8 * (0.006 * (model + slow) + 0.002 * frozen) for model, slow, frozen in zip(of_model, (2, 0), of_teacher, strict=True)
    ]
    assert found.timeline.busy == pytest.approx(seconds)
    assert max(seconds) - min(seconds) <= 8 * 0.002  # a layer of the teacher
    assert sum(seconds) / 2 <= found.bound <= found.seconds == pytest.approx(ps.schedule.simulate(table, found.costs).makespan)


@pytest.mark.costly
def test_memory_counts_the_teachers_parameters_once_and_its_outputs_while_they_wait() -> None:
    found = planned()[0]
    table, teacher = found.schedule, found.schedule.num_trained_stages
    assert found.costs.teacher_output == 0.5 * MB
    assert max(found.timeline.peak_waiting_outputs) >= 8
    frozen = layers_by_rank(found, found.teacher_layers, found.teacher_cuts, table.placement[teacher:])
    trained = layers_by_rank(found, found.layers, found.cuts, table.placement[:teacher])
    for rank, peak in enumerate(found.peak_memory):
        always = MB * (4 * trained[rank] + frozen[rank])  # Adam's two states, the gradient and the parameter; the teacher's
        borders = sum(rank in pair and pair[0] != pair[1] for pair in pairwise(table.placement[:teacher]))
        borders += sum(rank in pair and pair[0] != pair[1] for pair in pairwise(table.placement[teacher:]))
        assert peak == pytest.approx(found.timeline.peak_memory[rank] + always + 0.5 * MB * borders)
    with pytest.raises(ps.PenstockError, match=r"nothing fits: at best .* with a teacher ahead"):
        planned(memory=12 * MB)


@pytest.mark.slow
def test_a_table_is_searched_for_both_models(tmp_path: Path) -> None:
    found = planned(schedules=None, effort="normal")
    assert found[0].seconds <= planned(schedules=None)[0].seconds
    found[0].save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == found[0]
    assert f"its stages on ranks {' '.join(map(str, found[0].schedule.placement[found[0].schedule.teacher :]))}" in str(
        found[0]
    )
    with pytest.raises(
        ps.PenstockError, match=r"plan\.json is for a model and its teacher, and `penstock train` has no teacher"
    ):
        apply_plan(TrainConfig(plan=str(tmp_path / "plan.json")))


def test_a_teacher_without_times_and_slices_are_refused() -> None:
    with pytest.raises(ps.PenstockError, match="all layers of the teacher take 0 seconds"):
        planned(teacher=[LayerCost("a", 0, 0, 0)])
    with pytest.raises(ps.PenstockError, match="slices=2 with a teacher, whose tokens are not cut: use slices=1"):
        planned(slices=[1, 2])


# -- on ranks --------------------------------------------------------------------------------------------------------------


def linear(count: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def loss_fn(output: Tensor, target: Tensor, teacher_output: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) + nn.functional.mse_loss(output, teacher_output)


def plan_of_modules() -> Plan:
    costs = layers(6, ""), layers(9, "")
    named = [[layer._replace(name=layer.name[1:]) for layer in some] for some in costs]
    return plan(named[0], 2, 1e9, batch=8, microbatches=4, effort="quick", schedules="1f1b", fewer=False, teacher=named[1])[0]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(8, 4), torch.randn(8, 4)


def rank_runs(found: Plan) -> tuple[Any, ...]:
    pipe = ps.Pipeline(linear(6, 0), loss_fn, plan=found, teacher=linear(9, 1))
    inputs, target = batch()
    losses = [pipe.step(inputs, target=target, next_args=(inputs,)) for _ in range(2)]
    actions = [str(event.action) for event in pipe.timeline().rows[pipe.topology.rank]]
    with pytest.raises(ps.MismatchError) as other:
        ps.Pipeline(linear(6, 0), loss_fn, plan=found, teacher=linear(8, 1))
    return losses, gradients(pipe.named_parameters()), actions, str(other.value)


@pytest.mark.ranks
def test_a_pipeline_runs_a_plan_with_a_teacher_with_the_bits_of_one_process() -> None:
    found = plan_of_modules()
    model, teacher, (inputs, target) = linear(6, 0), linear(9, 1), batch()
    expected = stepped(OneProcess(model, loss_fn, None, 4, teacher=teacher), [(inputs, target)] * 2)
    results = on_ranks(rank_runs, 2, found)
    for rank, (*_, actions, other) in enumerate(results):
        assert [text for text in actions if int(text[0]) < found.schedule.teacher] == [
            str(action) for action in found.schedule.actions[rank] if action.stage < found.schedule.teacher
        ]
        assert "the plan is for a model of 9 layers" in other
    assert_as_one_process([result[:2] for result in results], expected)
