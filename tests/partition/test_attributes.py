"""Plain attributes of modules: what layers count while they are measured, and what a forward that is cut reads."""

import random

import pytest
import torch
from reference import accumulate
from torch import nn

import penstock as ps
from penstock.partition import split

X = torch.linspace(-1, 1, 16).reshape(4, 4)
mse = nn.functional.mse_loss
CUT = {"by names": {"cuts": ["layers.2"]}, "by an example": {"example_args": (X[:2],)}}


class CallCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.history, self.stats = nn.Linear(4, 4), 0, [], {}

    def forward(self, hidden):
        self.calls += 1
        self.history.append(self.calls)
        self.stats["calls"] = self.stats.get("calls", 0) + 1
        self.cache = hidden.shape
        return self.linear(hidden)

    def counted(self):
        return self.calls, self.history, self.stats, hasattr(self, "cache")


class AttributeNet(nn.Module):
    kind = "plus"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([CallCounter() for _ in range(4)])
        self.alpha, self.scales, self.act, self.unread = 0.5, [1.0, 2.0], torch.tanh, 1
        self.register_buffer("beta", torch.tensor(1.0))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = self.act(layer(hidden)) * self.alpha * self.beta + self.scales[0]
        return hidden if self.kind == "plus" else -hidden


def rank_counts(cut):
    model = AttributeNet()
    history = model.layers[0].history
    ps.Pipeline(model, mse, "1f1b", 2, **cut)
    assert model.layers[0].history is history
    return [layer.counted() for layer in model.layers]


@pytest.mark.ranks
@pytest.mark.parametrize("cut", CUT)
def test_what_layers_count_while_they_are_cut_and_measured_is_put_back_on_every_rank(cut):
    assert ps.launch(rank_counts, 2, CUT[cut]) == [[(0, [], {}, False)] * 4] * 2


def test_a_plan_is_measured_and_estimated_without_a_trace():
    model = nn.Sequential(CallCounter(), CallCounter())
    ps.plan.measure(model, (X,), seconds=0.0)
    ps.plan.estimate(model, (X,), speed=1e9)
    split(model, 2, example_args=X)
    assert [layer.counted() for layer in model] == [(0, [], {}, False)] * 2


CHANGES = {
    "alpha": (
        0.25,
        "AttributeNet.alpha is 0.25, and was 0.5 when its forward was cut, which keeps that: set it back, or have it in a",
    ),
    "act": (torch.relu, "AttributeNet.act is not what it was when its forward was cut"),
    "scales": ([2.0, 2.0], "AttributeNet.scales is [2.0, 2.0], and was [1.0, 2.0] when"),
    "kind": ("minus", "AttributeNet.kind is 'minus', and was 'plus' when"),
}


def rank_changes(cut):
    """What each change on rank 1 is told; then the loss once all are undone, and a buffer's value is another."""
    model = AttributeNet()
    pipe = ps.Pipeline(model, mse, "gpipe", 2, **cut)
    pipe.step(X, target=X)
    results = {}
    for name, (value, _) in CHANGES.items():
        before = getattr(model, name)
        setattr(model, name, value if pipe.topology.rank == 1 else before)
        for act in (lambda: pipe.step(X, target=X), lambda: pipe.eval(X)):
            with pytest.raises(ps.MismatchError) as caught:
                act()
            results.setdefault(name, []).append(str(caught.value))
        setattr(model, name, before)
    model.unread = 2
    model.beta.fill_(0.5)
    pipe.zero_grad()
    return results, pipe.step(X, target=X), {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("cut", CUT)
def test_an_attribute_that_the_cut_forward_reads_is_told_on_every_rank_if_it_changes_and_a_buffer_is_read(cut):
    model = AttributeNet()
    model.beta.fill_(0.5)
    loss = accumulate(model, mse, (X, X), 2)
    for result, here, gradients in ps.launch(rank_changes, 2, CUT[cut]):
        assert result.keys() == CHANGES.keys()
        for name, texts in result.items():
            assert [CHANGES[name][1] in text and "\n" not in text for text in texts] == [True, True], texts
        assert torch.equal(here, loss)
        assert gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, model.get_parameter(name).grad)


def replace(model):
    model[1] = nn.Linear(4, 4)


LAYOUTS = {
    "replaced": replace,
    "appended": lambda model: model.append(nn.Tanh()),
    "hooked": lambda model: model.register_forward_pre_hook(lambda module, inputs: inputs),
}


def rank_replaces(change):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipe = ps.Pipeline(model, mse, "1f1b", 2)
    pipe.step(X, target=X)
    LAYOUTS[change](model)
    with pytest.raises(ps.MismatchError, match=r"^Sequential has other layers or hooks than when it was cut"):
        pipe.step(X, target=X)
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("change", LAYOUTS)
def test_a_sequence_that_has_other_layers_or_hooks_than_its_pipeline_is_told(change):
    assert ps.launch(rank_replaces, 2, change) == [True, True]


# -- what a forward that is followed without data does between its layers


class Between(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.first, self.last = what, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs):
        return self.last(BETWEEN[self.what][0](self, self.first, inputs))


def in_autocast(model, layer, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(inputs)


def counted(model, layer, inputs):
    model.count += 1
    return layer(inputs) * model.count


BETWEEN = {
    "autocast": (in_autocast, "enters torch.autocast, which is lost where it is cut: enter it in the forward of a layer"),
    "random": (lambda model, layer, inputs: layer(inputs) if random.random() < 2 else inputs, "draws random numbers between"),
    "torch.rand": (lambda model, layer, inputs: layer(inputs) * torch.rand(()).item(), "draws random numbers between"),
    "a buffer": (counted, "makes or changes a tensor between its layers, which cannot be followed without data"),
    "a tensor": (
        lambda model, layer, inputs: layer(inputs) * torch.tensor([1.0, 2, 3, 4]),
        "makes or changes a tensor between",
    ),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_a_cut_forward_would_lose_is_told(what):
    with pytest.raises(ps.MismatchError, match=f"^the forward of Between {BETWEEN[what][1]}"):
        split(Between(what), 2, cuts=["last"])
