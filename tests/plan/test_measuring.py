"""Layers measured, planned for, and run: with the bits of one process."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from reference import accumulate, assert_same, data, gradients, make, merged
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock.commands.train.setup import token_loss
from penstock.model import GPT, GPTConfig
from penstock.partition import unit_times
from penstock.partition.balance import Balance
from penstock.plan import LayerCost, estimate, estimate_transformers, load, measure, measuring, plan
from penstock.plan.recut import profile_of_run
from penstock.plan.stage_costs import LayerChain
from penstock.schedule import Kind, Measurement

ROWS = 8


class ManualTime:
    """Goes on when somebody passes time, and not otherwise."""

    def __init__(self):
        self.now = 0.0

    def pass_time(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock by which layers are measured."""
    clock = ManualTime()
    for module in (measuring, unit_times):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Busy(nn.Module):
    """A product whose forward, backward and weight's gradient take 2, 4 and 6 ms."""

    def __init__(self, clock):
        super().__init__()
        self.product, self.clock = nn.Linear(16, 16, bias=False), clock
        self.product.weight.register_hook(lambda gradient: clock.pass_time(0.006))

    def forward(self, hidden):
        self.clock.pass_time(0.002)
        hidden = self.product(hidden)
        hidden.register_hook(lambda gradient: self.clock.pass_time(0.004))
        return hidden


def test_what_layers_cost_is_measured(clock):
    model = nn.Sequential(Busy(clock), nn.ReLU(), Busy(clock))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure(model, (torch.randn(4, 16),), seconds=0)
    assert [sample.rows for sample in found.samples] == [1, 4]
    assert found.layer_names == ["0", "1", "2"]
    last = found.costs_at(4)[2]
    assert last[1:4] == pytest.approx((0.002, 0.004, 0.006))
    assert found.costs_at(4)[1].seconds == 0
    assert (last.activation, last.keep, last.parameters, last.output) == (256, 512, 1024, 256)  # keeps input and gradient for W
    relu = found.costs_at(4)[1]
    assert (relu.activation, relu.ends) == (0, 256)  # what a ReLU keeps is what the next product keeps
    line = LayerChain(found.costs_at(4))
    assert (
        line.stage_cost(0, 2).policies[0].activation == line.stage_cost(0, 1).policies[0].activation + 256
    )  # unless that is elsewhere
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


LOG: list[str] = []  # no attribute of a layer, which measuring restores


class Logged(nn.Module):
    """Writes its name into the log: F0 in the forward, B0 in the backward."""

    def __init__(self, name):
        super().__init__()
        self.product, self.name = nn.Linear(4, 4), name

    def forward(self, hidden):
        LOG.append(f"F{self.name}")
        hidden = self.product(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: LOG.append(f"B{self.name}"))
        return hidden


@pytest.mark.parametrize(
    ("group_bytes", "passes"), [(2**28, "F0F1F2B2B1B0" * 4), (2 * 80, "F0F1B1B0" * 4), (0, "F0B0" * 4 + "F0B0" + "F1B1" * 4)]
)
def test_layers_are_measured_in_the_order_of_a_step_as_many_at_once_as_fit(group_bytes, passes, monkeypatch):
    """To warm up and in a round, with whole and with split backwards; then the bytes of each."""
    monkeypatch.setattr(measuring, "GROUP_BYTES", group_bytes)
    LOG.clear()
    measure(nn.Sequential(*map(Logged, range(3))), (torch.ones(1, 4),), rounds=1, seconds=0)
    assert passes in "".join(LOG)


class Translator(nn.Module):
    """An encoder whose output every layer of the decoder looks at."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.Bilinear(4, 16, 4) for _ in range(2)])

    def forward(self, source, target):
        for layer in self.encoder:
            source = layer(source)
        for layer in self.decoder:
            target = layer(target, source)
        return target


@pytest.mark.slow
def test_a_border_carries_what_flies_past_it_as_well():
    example = torch.randn(4, 16), torch.randn(4, 4)
    source, target = 4 * 16 * 4, 4 * 4 * 4  # bytes
    both = [source + target, source + target, source + target, target]
    for rows, times in ((4, 1), (1, 0.25)):
        found = measure(Translator(), example, seconds=0).costs_at(rows)
        assert [layer.output for layer in found] == [times * result for result in both]
    with torch.device("meta"):
        model = Translator()
    assert [layer.output for layer in estimate(model, example, speed=1e9).costs_at(1)] == both


ROW = torch.randn(4, 2)
PAIR = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ([nn.Linear(2, 2)], (ROW,), "one nn.Module, not a list"),
        (nn.Linear(2, 2), (ROW,), "Linear has no layers to plan with"),
        (PAIR, {"input": ROW}, "a tuple of the forward's arguments, got dict"),
        (PAIR, (ROW[:0],), "a row or more"),
        (PAIR, (ROW[:, :1],), "fails on 1 rows of the example, .*: mat1 and mat2 shapes cannot be multiplied"),
        (nn.Sequential(PAIR, nn.BatchNorm1d(2)), (ROW,), "fails on 1 rows .* all and a quarter are measured: Expected more"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(model, args, message):
    with pytest.raises(ps.MismatchError, match=message):
        measure(model, args)


def memory_planned_and_measured_in_slices():
    """What a microbatch of a GPT in two slices is planned to take in flight, and took."""
    tokens = torch.zeros(8, 64, dtype=torch.long)

    layers = measure(GPT(GPTConfig()), (tokens[:4],), loss_fn=token_loss, target=tokens[:4], rounds=1, seconds=0)
    [planned] = plan(layers, 1, 1e12, batch=8, microbatches=2, slices=2, schedules="1f1b", effort="quick")
    options = {"example_args": (tokens[:4],), "slices": 2, "loss_weight": ps.tokens()}
    pipe = ps.Pipeline(GPT(GPTConfig()), token_loss, "1f1b", 2, **options)
    pipe.step(tokens, target=tokens)
    return sum(layer.keys_and_values for layer in layers.costs_at(4)), planned.costs.act, pipe.timeline().activation_sizes


@pytest.mark.slow
def test_keys_and_values_are_measured_as_their_gradients_wait_in_slices():
    attention, [planned], [measured] = on_ranks(memory_planned_and_measured_in_slices, 1)[0]
    assert attention == 2 * 4 * 64 * GPTConfig().width * 4 * GPTConfig().layers
    assert planned == pytest.approx(measured.act, rel=0.001)
    assert planned - measured.keep == pytest.approx(attention / 2, rel=0.01)  # W needs no gradients of earlier slices


def test_one_tensor_is_an_example_too(clock):
    assert measure(PAIR, ROW, seconds=0).costs_at(4)[0].output == 4 * 2 * 4


def test_the_loss_counts_to_the_last_layer(clock):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def loss_fn(output, target):
        clock.pass_time(0.005)
        return nn.functional.mse_loss(output, target)

    first, last = measure(model, (torch.randn(1, 16),), loss_fn=loss_fn, target=torch.randn(1, 16), seconds=0).costs_at(1)
    assert (first.forward, last.forward) == (0, pytest.approx(0.005))


def test_what_the_loss_keeps_is_counted_where_its_stage_is_recomputed_too():
    model, rows = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64)), torch.randn(ROWS, 16)
    target, loss_fn = torch.zeros(ROWS, dtype=torch.long), nn.functional.cross_entropy
    layers = measure(model, (rows[:2],), loss_fn=loss_fn, target=target[:2], seconds=0)
    find = partial(plan, layers, 1, batch=ROWS, microbatches=4, schedules="gpipe", optimizer=0, effort="quick")
    [found] = find(memory=0.95 * find(memory=1e9)[0].peak_memory[0])
    assert found.recompute != (None,)
    pipe = ps.Pipeline(model, loss_fn, plan=found)
    pipe.step(rows, target=target)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert pipe.timeline().peak_memory[0] <= found.peak_memory[0] - 2 * weights


def test_layers_that_are_not_there_are_estimated_by_their_operations():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    first, middle, last = estimate(model, (torch.randn(1, 16),), speed=1e9).costs_at(4)
    products = 2 * 4 * 16 * 32 / 1e9
    assert (first.forward, first.backward_input, first.backward_weight) == pytest.approx((products, 0, products))
    assert middle.seconds == 0
    products = 2 * 4 * 32 * 8 / 1e9
    assert last[1:4] == pytest.approx((products, products, products))
    assert (first.parameters, last.output) == (4 * (16 * 32 + 32), 4 * 4 * 8)
    with pytest.raises(ps.PenstockError, match="speed=0: give the operations a second"):
        estimate(model, (torch.randn(1, 16),), speed=0)


@pytest.mark.slow
def test_a_config_of_transformers_is_estimated_without_a_device(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32}')
    found = estimate_transformers(tmp_path / "config.json", tokens=8, speed=1e9)
    assert sum(name.startswith("transformer.h.") for name in found.layer_names) == 2
    assert plan(found, 2, 1e9, batch=4, effort="quick")[0].seconds > 0
    with pytest.raises(ps.PenstockError, match="rows of 0 tokens are none"):
        estimate_transformers(tmp_path / "config.json", tokens=0, speed=1e9)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ps.PenstockError, match=r"no causal language model can be made of .* give another config"):
        estimate_transformers(tmp_path / "config.json", tokens=8, speed=1e9)


def test_a_broken_installation_of_transformers_is_told_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nat ..')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(
        ps.PenstockError, match=r"needs transformers, which cannot be imported here \(.*\): pip install"
    ) as caught:
        estimate_transformers(tmp_path / "config.json", tokens=8, speed=1e9)
    assert "\n" not in str(caught.value)


def test_a_class_of_transformers_that_cannot_be_imported_is_told_in_one_sentence(tmp_path, monkeypatch):
    def fails(path):
        raise RuntimeError("Failed to import transformers.models.gpt2:\nno module numpy")

    fake = SimpleNamespace(AutoConfig=SimpleNamespace(from_pretrained=fails), AutoModelForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    message = (
        r"^no causal language model can be made of .*config\.json \(Failed to import transformers.models.gpt2:\): give another"
    )
    with pytest.raises(ps.PenstockError, match=message):
        estimate_transformers(tmp_path / "config.json", tokens=8, speed=1e9)


def test_a_runs_steps_are_costs_of_its_layers():
    table, sizes = ps.schedule.build("1f1b", 2, 4), ((80, 0), (20, 0))
    seconds = dict(zip(Kind, [(4.0, 6.0), (8.0, 12.0), (6.0, 9.0), (2.0, 3.0)], strict=True))
    measured = Measurement(table, seconds, dict.fromkeys(Kind, (0.0, 1.0)), (0.5,), activation_sizes=sizes)
    found = profile_of_run(measured, Balance(("a", "b", "c"), (1, 3, 2), (0, 2)), (10, 20, 30), rows=2)
    assert found.costs_at(2)[:2] == (LayerCost("a", 1, 1.5, 0.5, 20, 0, 10), LayerCost("b", 3, 4.5, 1.5, 60, 0, 20))
    assert found.costs_at(2)[2] == LayerCost(
        "c", 7, 9, 4, 20, 0, 30, split=1
    )  # the engine's time after an action is in its own


def test_a_run_whose_w_takes_longer_than_its_b_costs_nothing_negative(tmp_path):
    """B, I and W are measured in other actions each, so the median of W may be above that of B."""
    table = ps.schedule.build("zb-h1", 2, 4)
    seconds = dict(zip(Kind, [(4.0, 6.0), (8.0, 12.0), (6.0, 9.0), (8.5, 13.0)], strict=True))
    measured = Measurement(table, seconds, dict.fromkeys(Kind, (0.0, 0.0)), (0.5,))
    found = profile_of_run(measured, Balance(("a", "b"), (1, 1), (0, 1)), (10, 20), rows=2)
    assert [layer.backward_input + layer.backward_weight for layer in found.costs_at(2)] == [8, 12]
    assert min(min(layer[1:]) for layer in found.costs_at(2)) == 0
    found.save(tmp_path / "costs.json")
    assert ps.plan.ModelProfile.load(tmp_path / "costs.json") == found


def rank_planned(name, found):
    model, loss_fn = make(name)
    inputs, target = data(name, ROWS)
    pipe = ps.Pipeline(model, loss_fn, plan=found)
    loss = pipe.step(inputs, target=target)
    return loss, gradients(pipe.named_parameters()), pipe.schedule == found.schedule, pipe.timeline().peak_memory


def ranks_planned(jobs):
    return [rank_planned(*job) for job in jobs]


@pytest.mark.slow
@pytest.mark.ranks
def test_planned_pipelines_have_the_bits_of_one_process_and_the_memory_of_the_plan():
    jobs = []
    for name in ("gpt", "mlp"):
        model, loss_fn = make(name)
        inputs, target = data(name, ROWS)
        layers = measure(model, (inputs[:2],), loss_fn=loss_fn, target=target[:2], seconds=0).costs_at(1)
        layers = [layer._replace(forward=1, backward_input=1, backward_weight=1) for layer in layers]  # the same plans anywhere
        find = partial(plan, layers, 3, batch=ROWS, microbatches=4, schedules=["zb-v", "1f1b"], optimizer=0, fewer=False)
        free = find(memory=1e9)[0]
        jobs += [(name, free), (name, find(memory=0.9 * max(free.peak_memory))[0])]
    jobs[0] = "gpt", replace(jobs[0][1], recompute=("block", *jobs[0][1].recompute[1:]))
    results = on_ranks(ranks_planned, 3, jobs)
    for (name, found), parts in zip(jobs, zip(*results, strict=True), strict=True):
        model, loss_fn = make(name)
        losses, gradients_of, runs, peaks = zip(*parts, strict=True)
        assert torch.equal(losses[0], accumulate(model, loss_fn, data(name, ROWS), 4))
        assert_same(merged(gradients_of), gradients(model.named_parameters()))
        assert all(runs)
        assert peaks[0][1] == pytest.approx(found.timeline.peak_memory[1], rel=0.1)
        assert all(held <= 1.02 * said for held, said in zip(peaks[0], found.timeline.peak_memory, strict=True))


@pytest.mark.parametrize(
    ("count", "message"), [(8, "this one has 8: 4 is not in the plan"), (2, "has 2: 2 is not in the model")]
)
def test_a_plan_for_a_model_of_other_layers_is_refused(tmp_path, count, message):
    plan([LayerCost(str(number), 1, 1, 1) for number in range(4)], 1, 1e9, batch=1, effort="quick")[0].save(
        tmp_path / "plan.json"
    )
    found, model = load(tmp_path / "plan.json"), nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])
    with pytest.raises(ps.MismatchError, match=f"the plan is for a model of 4 layers, 0 to 3, and .*{message}"):
        ps.Pipeline(model, nn.functional.mse_loss, plan=found)


def test_a_plan_beside_cuts_of_ones_own_is_refused():
    model, loss_fn = make("mlp")
    found = plan([LayerCost(name, 1, 1, 1) for name in dict(model.named_children())], 1, 1e9, batch=1, effort="quick")[0]
    with pytest.raises(ps.MismatchError, match="leave out cuts="):
        ps.Pipeline(model, loss_fn, plan=found, cuts=["1"])
    with pytest.raises(ps.MismatchError, match="not a str"):
        ps.Pipeline(model, loss_fn, plan="plan.json")
