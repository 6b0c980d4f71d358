"""Plain attributes of modules: what layers count while they are measured, and what a forward that is cut reads."""

import random
from types import SimpleNamespace

import pytest
import torch
from reference import accumulate
from runners import on_ranks
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock.partition import CuttableModel, run, split

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
    assert on_ranks(rank_counts, 2, CUT[cut]) == [[(0, [], {}, False)] * 4] * 2


def test_a_plan_is_measured_and_estimated_without_a_trace():
    model = nn.Sequential(CallCounter(), CallCounter())
    ps.plan.measure(model, (X,), seconds=0.0)
    ps.plan.estimate(model, (X,), speed=1e9)
    split(model, 2, example_args=X)
    assert [layer.counted() for layer in model] == [(0, [], {}, False)] * 2


class InitialisedByData(nn.Module):
    """Scales its weight by the first batch, as ActNorm does; `is_ready` is there before, or not."""

    def __init__(self, **is_ready):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        vars(self).update(is_ready)

    def forward(self, hidden):
        if not getattr(self, "is_ready", False):
            with torch.no_grad():
                self.linear.weight.mul_(hidden.std())
                self.linear.bias.data = self.linear.bias.data + hidden.mean()
            self.is_ready = True
        return self.linear(hidden)


class InitialisedNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([InitialisedByData(), InitialisedByData(is_ready=False)])

    def forward(self, hidden):
        return self.layers[1](self.layers[0](hidden).tanh())


MEASURED = {
    "exported": lambda model: split(model, 2, cuts=["layers.1"], example_args=(X,)),
    "cut by time": lambda model: split(model, 2, example_args=(X,)),
    "a sequence": lambda model: split(nn.Sequential(*model.layers), 2, example_args=(X,)),
    "a plan": lambda model: ps.plan.measure(model, (X,), seconds=0.0),
}


@pytest.mark.costly
@pytest.mark.parametrize("what", MEASURED)
def test_layers_that_initialise_themselves_by_their_first_batch_are_as_before_once_they_are_cut_and_measured(what):
    model, before = InitialisedNet(), InitialisedNet()
    MEASURED[what](model)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert [vars(layer).get("is_ready") for layer in model.layers] == [None, False]
    assert torch.equal(model(X), before(X))


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
@pytest.mark.parametrize("cut", slow_except(["by names"], CUT))
def test_an_attribute_that_the_cut_forward_reads_is_told_on_every_rank_if_it_changes_and_a_buffer_is_read(cut):
    model = AttributeNet()
    model.beta.fill_(0.5)
    loss = accumulate(model, mse, (X, X), 2)
    for result, here, gradients in on_ranks(rank_changes, 2, CUT[cut]):
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
    assert on_ranks(rank_replaces, 2, change) == [True, True]


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


# -- what a forward leaves for its next call


class Stateful(nn.Module):
    """Two layers; `STATE[what]` runs between them."""

    calls_of_class = 0

    def __init__(self, what, function):
        super().__init__()
        torch.manual_seed(0)
        self.what, self.function = what, function
        self.first, self.last, self.part = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.calls, self.tau, self.is_new, self.earlier, self.table = 0, 1.0, True, None, None
        self.history, self.state, self.part.calls, self.zeros = [], SimpleNamespace(calls=0), 0, torch.zeros(2, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs):
        return self.last(self.function(self, self.first(inputs)))


def branches_by_counter(model, hidden):
    model.calls += 1
    return hidden * 2 if model.calls > 3 else hidden


def multiplies_by_counter(model, hidden):
    model.calls += 1
    return hidden * model.calls


def anneals(model, hidden):
    model.tau = max(model.tau * 0.9, 0.1)
    return hidden / model.tau


def differs_in_the_first_call(model, hidden):
    hidden = hidden * 3 if model.is_new else hidden
    model.is_new = False
    return hidden


def adds_the_last_hidden(model, hidden):
    hidden = hidden if model.earlier is None else hidden + model.earlier
    model.earlier = hidden.detach()
    return hidden


def concatenates_the_last_hidden(model, hidden):
    both = torch.cat([hidden, model.zeros])
    model.zeros = hidden.detach()
    return both


def multiplies_by_the_history(model, hidden):
    model.history.append(1)
    return hidden * len(model.history)


def counts_in_an_object(model, hidden):
    model.state.calls += 1
    return hidden * model.state.calls


def counts_in_a_part(model, hidden):
    model.part.calls += 1
    return hidden * model.part.calls


def counts_in_the_class(model, hidden):
    Stateful.calls_of_class += 1
    return hidden * Stateful.calls_of_class


READS_STATE = {
    branches_by_counter: "Stateful.calls",
    multiplies_by_counter: "Stateful.calls",
    anneals: "Stateful.tau",
    differs_in_the_first_call: "Stateful.is_new",
    adds_the_last_hidden: "Stateful.earlier",
    concatenates_the_last_hidden: "Stateful.zeros",
    multiplies_by_the_history: "Stateful.history",
    counts_in_an_object: "Stateful.state",
    counts_in_a_part: "part.calls",
    counts_in_the_class: "Stateful.calls_of_class",
}
CUTS = {"by names": {"cuts": ["last"]}, "by an example": {"example_args": (X[:2],)}}


READS_STATE_IN_CUTS = [(function, cut) for function in READS_STATE for cut in CUTS]
QUICK = [(function, "by names") for function in READS_STATE] + [(adds_the_last_hidden, "by an example")]


@pytest.mark.costly
@pytest.mark.parametrize(("function", "cut"), slow_except(QUICK, READS_STATE_IN_CUTS))
def test_a_cut_forward_that_reads_what_its_last_call_has_left_is_refused(function, cut):
    with pytest.raises(ps.MismatchError, match=f"^the forward of Stateful sets {READS_STATE[function]}, and reads it in"):
        split(Stateful("state", function), 2, **CUTS[cut])
    assert Stateful.calls_of_class == 0


def counts(model, hidden):
    model.calls += 1
    model.part.calls += 1
    Stateful.calls_of_class += 1
    if model.calls % 100 == 0:
        model.is_new = False
    return hidden


def collects(model, hidden):
    model.history.append(hidden.detach())
    model.history = model.history[-2:]
    model.earlier = hidden
    return hidden


def averages_for_a_log(model, hidden):
    model.tau = 0.9 * model.tau + 0.1 * hidden.mean().detach()
    model.state.calls += hidden.shape[0]
    return hidden


def keeps_within_one_call(model, hidden):
    model.losses = [hidden.mean()]
    model.hidden = hidden
    return model.hidden + sum(model.losses)


def fills_a_table(model, hidden):
    if model.table is None or model.table.shape[0] != hidden.shape[0]:
        model.table = torch.ones(hidden.shape[0], 4)
    return hidden * model.table


def fills_tables(model, hidden):
    if model.table is None or model.table[0].shape[0] != hidden.shape[0]:
        model.table = torch.ones(hidden.shape[0], 4), [torch.zeros(hidden.shape[0], 4)]
    return hidden * model.table[0] + model.table[1][0]


def sets_a_flag(model, hidden):
    if model.is_new:
        model.is_new = False
    return hidden


def leaves_an_object_that_refers_to_itself(model, hidden):
    model.cycle = SimpleNamespace(hidden=hidden)
    model.cycle.cycle = model.cycle
    return model.cycle.cycle.cycle.hidden


def replaces_a_buffer(model, hidden):
    model.mean = 0.9 * model.mean + 0.1 * hidden.detach().mean(0)
    return hidden - model.mean


def reads_a_buffer_then_replaces_it(model, hidden):
    hidden = hidden * model.mean.exp()
    model.mean = 0.9 * model.mean + 0.1 * hidden.detach().mean(0)
    return hidden


READS_NO_STATE = {counts: CUTS, collects: CUTS, averages_for_a_log: CUTS, keeps_within_one_call: CUTS}
READS_NO_STATE |= {sets_a_flag: CUTS, leaves_an_object_that_refers_to_itself: CUTS}
READS_NO_STATE |= {
    function: ["by an example"]
    for function in (fills_a_table, fills_tables, replaces_a_buffer, reads_a_buffer_then_replaces_it)
}


READS_NO_STATE_IN_CUTS = [(function, cut) for function, cuts in READS_NO_STATE.items() for cut in cuts]
QUICK = [(function, "by names") for function in READS_NO_STATE] + [(fills_a_table, "by an example")]


@pytest.mark.parametrize(("function", "cut"), slow_except(QUICK, READS_NO_STATE_IN_CUTS))
def test_a_cut_forward_that_leaves_values_and_does_not_read_them_is_that_of_the_model(function, cut):
    model, uncut = Stateful("state", function), Stateful("state", function)
    stages = split(model, 2, **CUTS[cut])
    for inputs in (X[:2], X, X[2:]):
        assert torch.equal(run(stages, inputs), uncut(inputs))
    assert torch.equal(model.mean, uncut.mean)


TRACES = {(fills_a_table, "by an example"): 1, (fills_tables, "by an example"): 1, (sets_a_flag, "by names"): 2}


@pytest.mark.costly
@pytest.mark.parametrize(("function", "cut"), TRACES)
def test_a_forward_is_traced_again_only_if_it_left_something_that_may_differ_in_the_next_call(function, cut, monkeypatch):
    traces = []
    trace = CuttableModel._export_or_trace_graph
    monkeypatch.setattr(
        CuttableModel, "_export_or_trace_graph", lambda *args, **kwargs: traces.append(1) or trace(*args, **kwargs)
    )
    split(Stateful("state", function), 2, **CUTS[cut])
    assert len(traces) == TRACES[function, cut]


def rank_replaces_buffer(function):
    model = Stateful("state", function)
    pipe = ps.Pipeline(model, mse, "1f1b", 2, example_args=(X[:2],), cuts=["last"])
    losses = [pipe.step(X, target=X) for _ in range(2)]
    return losses, pipe.state_dict(), {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.ranks
def test_a_buffer_that_the_forward_between_layers_replaces_has_the_bits_of_one_process():
    model = Stateful("state", replaces_a_buffer)
    expected = [accumulate(model, mse, (X, X), 2) for _ in range(2)]
    for losses, state, gradients in on_ranks(rank_replaces_buffer, 2, replaces_a_buffer):
        assert list(map(torch.equal, losses, expected)) == [True, True]
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert all(torch.equal(gradient, model.get_parameter(name).grad) for name, gradient in gradients.items())


def replaces_a_buffer_by_another_shape(model, hidden):
    model.mean = hidden.detach()
    return hidden


def test_a_buffer_that_is_replaced_by_one_of_another_shape_is_refused():
    with pytest.raises(ps.MismatchError, match=r"^the forward of Stateful replaces the buffer mean, torch"):
        split(Stateful("state", replaces_a_buffer_by_another_shape), 2, example_args=(X[:2],))
