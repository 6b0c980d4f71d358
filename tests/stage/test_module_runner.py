"""How a stage runs its layers: each with random numbers of its own, whatever draws them, and hooks where users put them."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from models import toy
from reference import assert_same, gradients
from torch import Tensor, nn

import penstock as ps
from penstock.schedule import Action, Kind, Schedule

M = 3


def one_rank(stages: int) -> Schedule:
    """All stages on one rank, one microbatch after the other."""
    row = []
    for m in range(M):
        row += [Action(Kind.F, s, m) for s in range(stages)] + [Action(Kind.B, s, m) for s in reversed(range(stages))]
    return ps.schedule.from_rows("one after the other", [row], "loop")


def noisy(_: Any, __: Any, output: Tensor) -> Tensor:
    return output + torch.rand_like(output)


def noisy_before(_: Any, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] + torch.rand_like(inputs[0])


def by_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(noisy)


def by_hook_before(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(noisy_before)


def by_parametrization(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", toy(lambda self, weight: weight + torch.rand_like(weight)))


def by_a_forward_of_its_own(layer: nn.Module) -> None:
    layer.forward = lambda value: noisy(None, None, type(layer).forward(layer, value))


WAYS = [by_hook, by_hook_before, by_parametrization, by_a_forward_of_its_own]


def losses(make_noisy: Callable[[nn.Module], None], schedule: Any) -> tuple[list[float], dict[str, Tensor | None]]:
    """Of two steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (model[0], model[3]):
        make_noisy(layer)
    pipe = ps.Pipeline(model, nn.functional.mse_loss, schedule, M, topology=ps.Topology())
    torch.manual_seed(2)  # what is drawn does not depend on it
    batch = torch.ones(7, 4)
    return [pipe.step(batch, target=batch).item() for _ in range(2)], gradients(pipe.named_parameters())


@pytest.mark.parametrize("make_noisy", WAYS)
def test_what_is_drawn_around_a_layer_that_draws_nothing_is_the_same_for_any_cut_and_schedule(make_noisy: Any) -> None:
    expected, grads = losses(make_noisy, "gpipe")
    assert expected[0] != expected[1]
    for schedule in ("zb-h1", one_rank(2), one_rank(4)):
        found, ours = losses(make_noisy, schedule)
        assert found == expected
        assert_same(ours, grads)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output + torch.rand_like(output), target)


def test_what_a_loss_draws_differs_from_step_to_step_and_is_the_same_for_any_cut_and_schedule() -> None:
    found = []
    for schedule in ("gpipe", one_rank(2), one_rank(4)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = ps.Pipeline(model, noisy_loss, schedule, M, topology=ps.Topology())
        found.append([pipe.step(torch.ones(7, 4), target=torch.ones(7, 4)).item() for _ in range(2)])
    assert found[0][0] != found[0][1]
    assert found[1:] == found[:1] * 2


def test_a_stage_with_a_forward_of_its_own_runs_that() -> None:
    class Scaled(nn.Sequential):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) * 2

    torch.manual_seed(1)
    stages = [Scaled(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    pipe = ps.Pipeline(stages, nn.functional.mse_loss, one_rank(2), M, topology=ps.Topology())
    batch = torch.ones(7, 4)
    loss = pipe.step(batch, target=batch)
    torch.testing.assert_close(loss, nn.functional.mse_loss(stages[1](stages[0](batch)), batch))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_that_took_the_place_of_another_runs_from_the_next_step_on(dropout: float) -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout))
    pipe = ps.Pipeline([stage], nn.functional.mse_loss, one_rank(1), M, topology=ps.Topology())
    batch = torch.ones(7, 4)
    pipe.step(batch, target=batch)
    stage[1] = nn.Linear(4, 4)
    loss = pipe.step(batch, target=batch)
    assert stage[1].weight.grad is not None
    if not dropout:
        torch.testing.assert_close(loss, nn.functional.mse_loss(stage(batch), batch))


@pytest.mark.parametrize("recompute", [None, "stage", "block"])
def test_hooks_of_a_stage_run_and_its_layers_draw_what_they_would_without(recompute: Any) -> None:
    found, calls = [], []
    for hooked in (False, True):
        torch.manual_seed(1)
        stages = [nn.Sequential(nn.Linear(4, 4), nn.Dropout()), nn.Sequential(nn.Dropout(), nn.Linear(4, 4))]
        if hooked:
            stages[0].register_forward_pre_hook(lambda *_: calls.append("before"))
            stages[0].register_forward_hook(lambda *_: calls.append("after"))
        pipe = ps.Pipeline(stages, nn.functional.mse_loss, one_rank(2), M, topology=ps.Topology(), recompute=recompute)
        batch = torch.ones(7, 4)
        found.append((pipe.step(batch, target=batch).item(), gradients(pipe.named_parameters())))
        assert "forward" not in vars(stages[0])
    assert calls[:2] == ["before", "after"]
    assert calls.count("before") == M * (2 if recompute == "stage" else 1)
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def drop(module, args):
    return (args[0] * (torch.rand_like(args[0]) > 0.5),)


def gradients_with_a_hook(recompute, before):
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.functional.mse_loss, "1f1b", 2, recompute=recompute)
    pipe.stages[0].register_forward_pre_hook(drop)
    torch.manual_seed(before)
    loss = pipe.step(torch.linspace(-1, 1, 32).view(4, 8), target=torch.ones(4, 8))
    return [loss, *[parameter.grad for parameter in pipe.parameters()]]


@pytest.mark.parametrize("recompute", [None, "stage", "block"])
def test_a_hook_of_the_whole_stage_draws_the_same_whatever_was_drawn_before_and_when_it_runs_again(recompute):
    expected = gradients_with_a_hook(None, 1)
    assert all(map(torch.equal, gradients_with_a_hook(recompute, 2), expected))


@pytest.mark.parametrize("recompute", ["stage", "block"])
def test_what_runs_again_begins_with_the_buffers_that_it_began_with_the_first_time(recompute: Any) -> None:
    def scale_by_runs(self: Any, value: Tensor) -> Tensor:
        self.runs = self.runs + 1  # another tensor each time
        return value.tanh() * self.runs

    found = []
    for again in (None, recompute):
        torch.manual_seed(1)
        counter = toy(scale_by_runs)
        counter.register_buffer("runs", torch.ones(()))
        normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        model = nn.Sequential(normed, counter, nn.BatchNorm1d(4), nn.Linear(4, 4))
        pipe = ps.Pipeline(model, nn.functional.mse_loss, "gpipe", M, topology=ps.Topology(), recompute=again)
        batch = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            pipe.step(batch, target=batch)
        state = {f"{name} now": value for name, value in pipe.state_dict().items()}
        found.append(gradients(pipe.named_parameters()) | state)
    assert_same(found[1], found[0])


class CountingLayer(nn.Module):
    """Decides by a counter, a list, a moving mean and a tensor that are attributes, and changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean, self.last_rows, self.seen = 0, 0.0, None, {"largest": 0.0}
        self.history, self.sums = [], torch.zeros(4)

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * value.mean().item()
        self.history.append(self.calls % 3)
        self.seen["largest"] = max(self.seen["largest"], value.detach().max().item())
        value = value * sum(self.history) if self.calls > 3 else value
        value = value if self.last_rows is None else value + self.last_rows.mean()
        self.sums += value.detach().sum(0)
        self.last_rows = value.detach()
        return value.tanh() - self.mean + self.seen["largest"] * self.sums


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", one_rank(2)])
def test_what_runs_again_begins_with_the_attributes_that_it_began_with_the_first_time(schedule: Any) -> None:
    found = []
    for recompute in (None, "block", "stage"):
        torch.manual_seed(1)
        layers = [CountingLayer(), CountingLayer()]
        model = nn.Sequential(nn.Linear(4, 4), layers[0], nn.Linear(4, 4), layers[1], nn.Linear(4, 4))
        pipe = ps.Pipeline(model, nn.functional.mse_loss, schedule, M, topology=ps.Topology(), recompute=recompute)
        batch = torch.linspace(-1, 1, 28).view(7, 4)
        losses = [pipe.step(batch, target=batch).item() for _ in range(2)]
        state = [(layer.calls, layer.mean, layer.history, layer.seen, layer.sums.tolist()) for layer in layers]
        found.append((losses, state, gradients(pipe.named_parameters())))
    for losses, state, grads in found[1:]:
        assert (losses, state) == found[0][:2]
        assert_same(grads, found[0][2])


def scales_in_place() -> nn.Module:
    """Its weight needs the input as it was."""
    return toy(lambda self, value: value.mul_(self.scale), scale=nn.Parameter(torch.linspace(0.5, 2, 4)))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", one_rank(2)])
@pytest.mark.parametrize("recompute", ["stage", "block"])
def test_what_runs_again_begins_with_the_input_that_it_has_changed_in_place(schedule: Any, recompute: Any) -> None:
    found = []
    for again in (None, recompute):
        torch.manual_seed(1)
        layers = [nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Dropout(inplace=True), scales_in_place(), nn.Linear(4, 4)]
        model = nn.Sequential(scales_in_place(), *layers)
        cuts = ["3"] if isinstance(schedule, Schedule) else None
        pipe = ps.Pipeline(model, nn.functional.mse_loss, schedule, M, topology=ps.Topology(), cuts=cuts, recompute=again)
        losses = [pipe.step(torch.full((7, 4), 0.3), target=torch.ones(7, 4)) for _ in range(2)]
        found.append(gradients(pipe.named_parameters()) | {str(step): loss for step, loss in enumerate(losses)})
    assert_same(found[1], found[0])


def test_an_input_that_others_have_changed_in_place_before_it_is_needed_again_is_an_error() -> None:
    def forward(self: Any, value: Tensor) -> Tensor:
        value = value * 2
        return self.second(value.add_(self.first(value)))

    model = toy(forward, first=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), second=nn.Linear(4, 4))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "gpipe", M, topology=ps.Topology(), cuts=[], recompute="block")
    words = r"the input \[3, 4\] of what recompute= runs again was modified by an inplace operation in it or after it"
    with pytest.raises(ps.StageError, match=words):
        pipe.step(torch.ones(7, 4), target=torch.ones(7, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", one_rank(2)])
def test_a_hook_that_a_forward_puts_on_the_gradient_of_its_input_runs_once_where_the_forward_runs_again(schedule: Any) -> None:
    found, calls = [], dict[Any, int]()
    for recompute in (None, "block", "stage"):
        calls[recompute] = 0

        def double(gradient: Tensor, recompute: Any = recompute) -> Tensor:
            calls[recompute] += 1
            return gradient * 2

        def hook_input(_: Any, inputs: tuple[Tensor], double: Any = double) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(double)

        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in (model[1], model[2]):
            layer.register_forward_pre_hook(hook_input)
        pipe = ps.Pipeline(model, nn.functional.mse_loss, schedule, M, topology=ps.Topology(), recompute=recompute)
        pipe.step(torch.ones(7, 4), target=torch.ones(7, 4))
        found.append(gradients(pipe.named_parameters()))
    assert calls == dict.fromkeys(calls, 2 * M)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


class DrawsFrom(nn.Module):
    """Scales its input by numbers that no seed of torch's default generator reaches."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source = nn.Linear(4, 4), source
        self.torchs, self.pythons = torch.Generator().manual_seed(5), random.Random(5)
        self.numpys, self.old_numpys = numpy.random.default_rng(5), numpy.random.RandomState(5)

    def forward(self, value: Tensor) -> Tensor:
        draws: dict[str, Callable[[], Any]] = {
            "random": random.random,
            "numpy.random": numpy.random.rand,
            "torch.Generator": lambda: torch.rand((), generator=self.torchs),
            "random.Random": self.pythons.random,
            "numpy.random.Generator": self.numpys.random,
            "numpy.random.RandomState": self.old_numpys.rand,
        }
        factor = draws[self.source]()
        return torch.tanh(self.linear(value) * factor) * factor


SOURCES = ["random", "numpy.random", "torch.Generator", "random.Random", "numpy.random.Generator", "numpy.random.RandomState"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("source", "schedule"),
    [*((source, "1f1b") for source in SOURCES), *(("random", other) for other in ("gpipe", "zb-h1", one_rank(2)))],
)
def test_what_a_layer_draws_from_any_generator_it_draws_again_in_a_recomputation(source: str, schedule: Any) -> None:
    found = []
    for recompute in (None, "block", "stage"):
        torch.manual_seed(0)
        random.seed(3)
        numpy.random.seed(3)
        model = nn.Sequential(nn.Linear(4, 4), DrawsFrom(source), nn.Linear(4, 4))
        pipe = ps.Pipeline(model, nn.functional.mse_loss, schedule, M, topology=ps.Topology(), recompute=recompute)
        batch = torch.linspace(-1, 1, 28).view(7, 4)
        loss = [pipe.step(batch, target=batch).item() for _ in range(2)]
        found.append((loss, gradients(pipe.named_parameters()), random.random(), numpy.random.rand()))
    for loss, grads, *drawn_next in found[1:]:
        assert [loss, *drawn_next] == [found[0][0], *found[0][2:]]
        assert_same(grads, found[0][1])
