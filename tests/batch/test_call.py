"""A call's arguments: keywords of the model's that are also the pipeline's, inputs with a graph, entries of lists."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from error_text import error_text
from models import LayerListNet, toy
from reference import OneProcess, gradients
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps

WIDTH, ROWS, M = 4, 8, 4
mse = nn.functional.mse_loss


def scaled() -> nn.Module:
    """Has a parameter for each name that `step` takes for itself."""

    def forward(self: Any, x: Tensor, scale: float = 1.0, target: Any = None, *, losses: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)) * scale * losses

    return toy(forward, linear=nn.Linear(WIDTH, WIDTH))


def several() -> nn.Module:
    """Images and offsets of other rows than the tokens."""

    def forward(self: Any, tokens: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.linear(tokens)
        return hidden if images is None else hidden + images.mean(0)

    return toy(forward, linear=nn.Linear(WIDTH, WIDTH))


class Batch(NamedTuple):
    tokens: Tensor
    images: Tensor


def stages(first: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [first(), nn.Linear(WIDTH, WIDTH)]


def made(first: Callable[[], nn.Module]) -> ps.Pipeline:
    return ps.Pipeline(stages(first), mse, "1f1b", M)


def uncut(first: Callable[[], nn.Module]) -> tuple[Any, nn.ModuleList]:
    """The same in one process: its forward, and its modules."""
    modules = stages(first)
    return (lambda *args, **kwargs: modules[1](modules[0](*args, **kwargs))), nn.ModuleList(modules)


def data(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape), torch.randn(*shape)


def rank_names() -> dict[str, Any]:
    x, y = data(ROWS, WIDTH)
    results: dict[str, Any] = {}
    for name, call in {
        "scale": lambda pipe: pipe.step(x, target=y, scale=2.0),
        "losses": lambda pipe: pipe.step(x, 1.0, target=y, losses=[]),
        "next": lambda pipe: pipe.step(x, 2.0, target=y).item(),
    }.items():
        pipe = made(scaled)
        results[name] = call(pipe) if name == "next" else error_text(lambda: call(pipe), ps.MismatchError)  # noqa: B023
    pipe = made(scaled)
    results["both"] = pipe.step(x, 2.0, target=y, scale=0.5).item(), gradients(pipe.named_parameters())
    pipe = made(scaled)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe.step(x, target=y), pipe.step(x, target=y), pipe.eval(x, target=y)
    results["warned"] = [str(warning.message) for warning in given if "for itself" in str(warning.message)]
    results["entry"] = made(scaled).step_microbatches([{"x": x, "losses": 2.0}], [y]).item()
    return results


@pytest.mark.ranks
def test_a_keyword_that_is_the_models_and_the_pipelines_is_refused_with_the_way_to_give_it() -> None:
    first, last = on_ranks(rank_names, 2)
    (x, y), (model, modules) = data(ROWS, WIDTH), uncut(scaled)
    for result in (first, last):
        assert "step() takes scale= for itself, and the model's forward has a parameter scale too" in result["scale"]
        assert "give the model's by position, step(x, scale, ..)" in result["scale"]
        assert "give the model's in an entry of step_microbatches([{.., 'losses': value}], ..)" in result["losses"]
        assert result["next"] == result["both"][0] == pytest.approx(mse(model(x, 2.0), y).item(), abs=1e-6)
        assert result["entry"] == pytest.approx(mse(model(x, losses=2.0), y).item(), abs=1e-6)
    assert len(first["warned"]) == 1
    assert "step() takes target= for itself" in first["warned"][0]
    OneProcess(model, mse, None, M).step(x, 2.0, target=y, scale=0.5)
    grads = [*first["both"][1].values(), *last["both"][1].values()]
    assert all(torch.equal(grad, p.grad) for grad, p in zip(grads, modules.parameters(), strict=True))


class HasScale(LayerListNet):
    def __init__(self) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x) * scale


class HasKeywordScale(HasScale):
    def forward(self, x: Tensor, *, scale: Any = 1.0) -> Tensor:
        return super().forward(x, scale)


def rank_cut_models() -> list[Any]:
    (x, y), scale, results = data(ROWS, WIDTH), torch.tensor(3.0), list[Any]()
    for model in (HasScale, HasKeywordScale):
        torch.manual_seed(0)
        for cutting in ({"cuts": ["layers.1"]}, {"example_args": (x[:2],)}):
            pipe = ps.Pipeline(model(), mse, "1f1b", M, **cutting)  # type: ignore[arg-type]
            results.append(error_text(lambda: pipe.step(x, target=y, scale=3.0), ps.MismatchError))  # noqa: B023

        torch.manual_seed(0)  # as the error says
        module = model()
        pipe = ps.Pipeline(module, mse, "1f1b", M, example_args=(x[:2],), example_kwargs={"scale": torch.tensor(2.0)})
        results.append(error_text(lambda: pipe.step(x, target=y, scale=3.0), ps.MismatchError))  # noqa: B023
        by_position = [pipe.step(x, scale, target=y).item()] if model is HasScale else []
        entry = pipe.step_microbatches([{"x": x, "scale": scale}], [y]).item()
        results.append([*by_position, entry, mse(module(x, scale=scale), y).item()])
    return results


@pytest.mark.ranks
def test_a_keyword_of_a_model_that_was_cut_is_refused_with_a_way_that_works() -> None:
    for result in on_ranks(rank_cut_models, 2):
        cut = "the model was cut without it: cut it with example_kwargs={.., 'scale': value}, a tensor if it changes; give the"
        ways = "give the model's by position, step(x, scale, ..)", "give the model's in an entry of step_microbatches([{.., 'sc"
        for way, (by_cuts, by_example, with_scale, losses) in zip(ways, (result[:4], result[4:]), strict=True):
            assert cut in by_cuts
            assert cut in by_example
            assert cut not in with_scale
            assert all(way in text for text in (by_cuts, by_example, with_scale))
            assert losses == [pytest.approx(losses[-1], abs=1e-6)] * len(losses)


def rank_graph() -> dict[str, Any]:
    x, y = data(ROWS, WIDTH)
    torch.manual_seed(5)
    outer = nn.Linear(WIDTH, WIDTH)
    inputs = torch.tanh(outer(x))
    pipe = made(several)
    wrong = {
        "step": lambda: pipe.step(inputs, target=y),
        "tree": lambda: pipe.step(x, images=ps.Replicated(inputs), target=y),
        "list": lambda: pipe.step_microbatches([inputs], [y]),
        "target": lambda: pipe.step(x, target=inputs),
    }
    results: dict[str, Any] = {name: error_text(call, ps.MismatchError) for name, call in wrong.items()}
    results["untouched"] = outer.weight.grad is None and all(p.grad is None for p in pipe.parameters())
    results["eval"] = pipe.eval(inputs, target=y)[1].item()

    leaf = inputs.detach().requires_grad_()
    pipe.step(leaf, target=y)
    if pipe.topology.rank == pipe.first_rank:
        inputs.backward(leaf.grad)
        results["outer"] = outer.weight.grad
    return results


@pytest.mark.ranks
def test_inputs_with_a_graph_are_refused_before_anything_runs_and_go_on_by_hand() -> None:
    first, last = on_ranks(rank_graph, 2)
    for result in (first, last):
        for name, what in (("step", "inputs"), ("tree", "inputs"), ("list", "inputs"), ("target", "target")):
            assert f"was given {what} with a graph (TanhBackward0)" in result[name]
            assert "leaf = x.detach().requires_grad_(); pipe.step" in result[name]
            assert "x.backward(leaf.grad)" in result[name]
        assert result["untouched"]

    (x, y), (model, _) = data(ROWS, WIDTH), uncut(several)
    torch.manual_seed(5)
    outer = nn.Linear(WIDTH, WIDTH)
    inputs = torch.tanh(outer(x))
    leaf = inputs.detach().requires_grad_()
    OneProcess(model, mse, None, M).step(leaf, target=y)
    inputs.backward(leaf.grad)
    assert torch.equal(first["outer"], outer.weight.grad)
    assert first["eval"] == last["eval"]


def rank_lists() -> dict[str, Any]:
    x, y = data(ROWS, WIDTH)
    images = torch.ones(3, WIDTH)
    entries = [{"tokens": x[:3], "images": images}, Batch(x[3:], images[:2]), (x[:2], images)]
    targets = [y[:3], y[3:], y[:2]]
    pipe = made(several)
    losses: list[Tensor] = []
    loss, outputs = pipe.step_microbatches(entries, targets, order=[2, 0, 1], losses=losses, return_outputs=True)
    results: dict[str, Any] = {"loss": loss, "losses": losses, "outputs": outputs, "grads": gradients(pipe.named_parameters())}
    results["evaluated"] = pipe.eval_microbatches(entries)
    for name, wrong in {
        "unknown": [entries[0], {"tokens": x[3:], "image": images}],
        "missing": [entries[0], {"images": images}],
    }.items():
        results[name] = error_text(lambda: pipe.step_microbatches(wrong, targets[:2]), ps.MismatchError)  # noqa: B023
    results["rows"] = error_text(lambda: pipe.step_microbatches([(x[:2], images)], [(y, y[:3])]), ps.MismatchError)
    return results


@pytest.mark.ranks
def test_entries_of_a_list_may_be_named_tuples_and_have_tensors_of_other_rows_and_outputs_are_returned() -> None:
    first, last = on_ranks(rank_lists, 2)
    (x, y), (model, modules) = data(ROWS, WIDTH), uncut(several)
    images = torch.ones(3, WIDTH)
    calls, targets = [(x[:3], images), (x[3:], images[:2]), (x[:2], images)], [y[:3], y[3:], y[:2]]
    losses: list[Tensor] = []
    OneProcess(model, mse).step_microbatches(calls, targets, order=[2, 0, 1], losses=losses)
    expected = [model(*call).detach() for call in calls]
    grads = [*first["grads"].values(), *last["grads"].values()]
    assert all(torch.equal(grad, p.grad) for grad, p in zip(grads, modules.parameters(), strict=True))
    assert first["outputs"] is first["evaluated"] is None
    assert all(map(torch.equal, last["outputs"], expected))
    assert all(map(torch.equal, last["evaluated"], expected))
    for result in (first, last):
        assert all(map(torch.equal, result["losses"], losses))
        assert "input 1 has image, which the model's forward does not take: it takes tokens, images" in result["unknown"]
        assert "input 1 lacks tokens, which the model's forward needs: it takes tokens, images" in result["missing"]
        assert "microbatch 0 has tensors that differ in rows, and so has its target" in result["rows"]
