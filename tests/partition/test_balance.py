"""Balance: no cut has a cheaper dearest stage; what units cost is measured on inputs of a real forward, and leaves no trace."""

import math
import random
import types
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock import MismatchError
from penstock.batch.pieces import split_sizes
from penstock.model import GPT, GPTConfig
from penstock.partition import balance, unit_times
from penstock.partition.balance import PARAMETERS, Balance, balanced_starts
from penstock.partition.materialise import has_meta_tensors
from penstock.partition.unit_times import RecordedUnit, measure_unit_seconds, record_unit_inputs

# ---- the cut


def parts_of(costs, cut):
    return [sum(costs[start:end]) for start, end in pairwise([*cut, len(costs)])]


def worth(costs, cut):
    """The smaller the better: the dearest part, the squares, and then the longer the earlier parts."""
    parts = parts_of(costs, cut)
    return max(parts), sum(part**2 for part in parts), [-start for start in cut]


DRAWS = {
    "whole numbers": lambda draw: draw.randint(0, 9),
    "many ties": lambda draw: draw.choice([0, 1, 1, 2]),
    "halves": lambda draw: draw.randint(0, 40) / 2,
    "a few large ones": lambda draw: draw.choice([1, 1, 1, 1, 25]),
    "parameter counts": lambda draw: draw.randint(0, 10**12),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_no_other_cut_is_better(kind):
    draw = random.Random(kind)
    for _ in range(1000):
        costs = [DRAWS[kind](draw) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        every = ([0, *cuts] for cuts in combinations(range(1, len(costs)), parts - 1))
        assert balanced_starts(costs, parts) == min(every, key=lambda cut: worth(costs, cut)), (costs, parts)


STARTS = [
    # costs                        parts  starts
    ([1, 1, 1, 1],                   2,   [0, 2]),
    ([1, 1, 1, 1, 1],                2,   [0, 3]),        # a tie: the earlier part is the longer
    ([0.1, 0.1, 0.1, 0.1, 0.1],      2,   [0, 3]),        # sums of floats do not blur it
    ([1, 1, 1, 1, 1],                3,   [0, 2, 4]),
    ([9, 1, 1, 1, 1],                3,   [0, 1, 3]),     # the first is dearest anyway, the rest is even too
    ([4, 6, 3, 4, 2, 3],             3,   [0, 1, 3]),     # 4 9 9; the smallest squares alone would be 10 7 5
    ([4, 4, 4, 9, 1, 1],             3,   [0, 2, 3]),
    ([5],                            1,   [0]),
    ([0, 0, 0],                      3,   [0, 1, 2]),
    ([0, 0, 7, 0],                   2,   [0, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("costs", "parts", "expected"), STARTS)
def test_where_parts_start(costs, parts, expected):
    assert balanced_starts(costs, parts) == expected


def costs_of(count, heavy):
    draw = random.Random(3)
    return [draw.random() for _ in range(count - 1)] + [heavy]


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [0.0, 1.0, 1e6])
def test_two_thousand_units_are_cut_into_consecutive_parts(heavy):
    found = balanced_starts(costs_of(2000, heavy), 64)
    assert len(set(found)) == 64
    assert found == sorted(found)


@pytest.mark.parametrize("heavy", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("count", [400, 1600])
def test_of_n_units_at_most_n_log_n_ends_are_tried_for_each_part(count, heavy, monkeypatch):
    """Were every end tried for every start, it would be n^2."""
    tried, parts = [], 16

    def counted(*sequences, strict):
        pairs = list(zip(*sequences, strict=strict))
        tried.append(len(pairs))
        return pairs

    monkeypatch.setattr(balance, "zip", counted, raising=False)  # of an end with what comes after it
    balanced_starts(costs_of(count, heavy), parts)
    assert 0 < sum(tried) < parts * count * math.log2(count)
    assert heavy < 1e6 or sum(tried) > count


WRONG = [
    ([1, 2],      3, "cannot cut 2 layers into 3 stages: use 1 to 2 stages"),
    ([1, 2],      0, "cannot cut 2 layers into 0 stages: use 1 to 2 stages"),
    ([],          1, "the model has no layers: there is nothing to cut into stages"),
    ([1, -1.0],   1, "a cost is a finite number of 0 or more, got -1.0"),
    ([1, float("nan")], 1, "a cost is a finite number of 0 or more, got nan"),
]  # fmt: skip


@pytest.mark.parametrize(("costs", "parts", "message"), WRONG)
def test_what_cannot_be_cut_is_told(costs, parts, message):
    with pytest.raises(MismatchError) as caught:
        balanced_starts(costs, parts)
    assert str(caught.value) == message


def test_a_balance_of_times_says_what_it_reached():
    balance = Balance.best(["embedding", "block0", "block1", "norm", "head"], [0.001, 0.002, 0.002, 0.0001, 0.004], 3)
    assert balance.starts == (0, 2, 4)
    assert balance.bottleneck == balance.lower_bound == 0.004
    assert str(balance) == (
        "stage 0  embedding..block0  3.000 ms\n"
        "stage 1  block1..norm       2.100 ms\n"
        "stage 2  head               4.000 ms\n"
        "slowest stage 4.000 ms, no cut can be below 4.000 ms (100.0% of it)"
    )


def test_a_balance_of_parameters_says_what_it_reached():
    balance = Balance.best("abc", [1000, 1000, 1000], 2, PARAMETERS)
    assert str(balance) == (
        "stage 0  a..b  2,000 parameters\n"
        "stage 1  c     1,000 parameters\n"
        "largest stage 2,000 parameters, no cut can be below 1,500 parameters (75.0% of it)"
    )


# ---- recording


def test_units_are_recorded_in_the_order_and_with_the_inputs_of_their_first_call():
    class EmbeddingModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(5, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, tokens, scale):
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = block(input=hidden * scale)
            return hidden

    model, tokens, scale = EmbeddingModel(), torch.tensor([[1, 2]]), torch.tensor(2.0)
    units = {"blocks.1": model.blocks[1], "blocks.0": model.blocks[0], "embedding": model.embedding}
    found = record_unit_inputs(model, units, [tokens], {"scale": scale})
    assert [unit.name for unit in found] == ["embedding", "blocks.0", "blocks.1"]
    assert found[0].args[0].data_ptr() == tokens.data_ptr()
    hidden = model.embedding(tokens) * scale
    assert torch.equal(found[1].kwargs["input"], hidden)
    assert torch.equal(found[2].kwargs["input"], model.blocks[0](hidden) * scale)
    assert all(unit.kwargs["input"].grad_fn is None for unit in found[1:])


def test_inputs_require_a_gradient_exactly_if_they_do_in_training():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    found = record_unit_inputs(model, dict(model.named_children()), [torch.ones(2, 3)])
    assert [unit.args[0].requires_grad for unit in found] == [False, False, True]


def test_a_unit_that_the_forward_does_not_call_is_told():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(MismatchError, match="cannot measure other: the forward of Sequential does not call it"):
        record_unit_inputs(model, {"0": model[0], "other": nn.Linear(3, 3)}, [torch.ones(2, 3)])


class DataDependentLinear(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) if hidden.sum() > 0 else hidden


def test_a_forward_that_cannot_run_on_the_meta_device_is_told():
    model = nn.Sequential(DataDependentLinear(3, 3, device="meta"))
    with pytest.raises(MismatchError, match=r"forward of Sequential cannot run on the meta device.*name the cuts with cuts="):
        record_unit_inputs(model, {"0": model[0]}, [torch.ones(2, 3)])


# ---- measuring


class ManualClock:
    """Goes on only when it is told to, so that a test knows how long everything takes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Sleeper(nn.Module):
    def __init__(self, clock, forward, backward):
        super().__init__()
        self.clock, self.seconds, self.weight = clock, forward, nn.Parameter(torch.ones(()))
        self.weight.requires_grad_(False)
        self.backward = backward

    def forward(self, hidden):
        self.clock.sleep(self.seconds)
        hidden = hidden * self.weight
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.clock.sleep(self.backward))
        return hidden


def test_forward_and_backward_of_each_unit_alone_are_measured(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(unit_times, "perf_counter", clock)
    model = nn.Sequential(nn.Linear(2, 2), Sleeper(clock, 0.25, 0.5), Sleeper(clock, 0.125, 0.0))
    linear, slow, fast = measure_unit_seconds(
        record_unit_inputs(model, dict(model.named_children()), [torch.ones(2, 2)]), rounds=8, seconds=0
    )
    assert (linear, slow, fast) == (0, 0.75, 0.125)


def test_the_fastest_of_several_runs_counts(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(unit_times, "perf_counter", clock)
    model = nn.Sequential(Sleeper(clock, 1.0, 1.0))
    units = record_unit_inputs(model, {"0": model[0]}, [torch.ones(2, 2, requires_grad=True)])
    disturbed = iter([9, 4, 9, 2, 9, 8])  # a run to warm up, and the one that is measured
    model[0].register_forward_pre_hook(lambda module, args: clock.sleep(next(disturbed)))
    assert measure_unit_seconds(units, rounds=3, seconds=0) == [2 + 2]


def test_units_are_measured_on_the_device_where_they_will_run_and_that_one_is_waited_for(monkeypatch):
    waited, seen = [], []
    device = types.SimpleNamespace(synchronize=lambda: waited.append(len(seen)))
    monkeypatch.setattr(torch, "get_device_module", lambda where: device if where == torch.device("meta") else torch.cpu)
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0].device.type, module.weight.device.type)))
    measure_unit_seconds([RecordedUnit("0", model[0], (torch.ones(2, 2),))], torch.device("meta"), rounds=1, seconds=0)
    assert seen == [("meta", "meta")] * 2
    assert waited == [0, 1, 1, 2]
    assert model[0].weight.device.type == "cpu"
    units = [
        RecordedUnit("", nn.Linear(2, 2, device="meta"), (torch.ones(2, 2, device="meta"),)),
        RecordedUnit("", nn.GELU(), (torch.ones(2),)),
    ]
    assert [unit_times.module_device(unit.module, unit.args).type for unit in units] == ["cpu", "cpu"]


def measured(units):
    """What one round measures."""
    costs = measure_unit_seconds(units, rounds=1, seconds=0)
    assert all(cost > 0 for cost in costs)
    return costs


def test_measuring_leaves_no_trace():
    tied = nn.Linear(4, 4)
    model = nn.Sequential(
        tied, nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), tied, nn.Unflatten(1, (2, 2)), nn.LSTM(2, 2)
    )
    model[1].eval()
    model[0].weight.grad = torch.ones(4, 4)
    batch, before = torch.randn(3, 4), {name: value.clone() for name, value in model.state_dict().items()}
    objects, generator = list(model.parameters()), torch.get_rng_state()
    assert (
        len(measured(record_unit_inputs(model, dict(model.named_children()), [batch]))) == len(model) - 1
    )  # one stands in two places
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert not model[1].training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model[6]._flat_weights[0] is model[6].weight_ih_l0


def test_a_model_on_the_meta_device_is_measured_unit_by_unit():
    model = GPT(GPTConfig(vocabulary=50, context=8, width=16, layers=2, heads=2)).to("meta")
    tokens = torch.randint(50, (2, 8))
    units = record_unit_inputs(model, dict(model.named_children()), [tokens])
    assert units[0].args[0].data_ptr() == tokens.data_ptr()
    assert units[1].args[0].is_meta
    assert len(measured(units)) == len(model)
    assert all(p.is_meta for p in model.parameters())
    assert has_meta_tensors(model)


def test_inputs_of_other_kinds_are_run_too():
    attention = nn.MultiheadAttention(8, 2, batch_first=True, device="meta")
    mask = torch.zeros(3, 3, dtype=torch.bool, device="meta").expand(2, 3, 3).repeat(2, 1, 1)
    hidden = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    unit = RecordedUnit("attention", attention, (hidden, hidden, hidden), {"attn_mask": mask, "need_weights": False})
    assert len(measured([unit])) == 1


@pytest.mark.slow
def test_the_cut_of_a_gpt_by_what_its_layers_cost_beats_equal_numbers_of_layers_predicted_and_run(monkeypatch):
    """With a large vocabulary the head costs as much as some blocks. The clock counts operations of matrix products."""
    config = GPTConfig(vocabulary=6000, context=64, width=64, layers=18, heads=2)
    model, tokens = GPT(config), torch.randint(6000, (4, 64))
    names = [name for name, _ in model.named_children()]
    units = record_unit_inputs(model, dict(model.named_children()), [tokens])
    counts = split_sizes(len(names), 4)
    with FlopCounterMode(display=False) as operations:
        monkeypatch.setattr(unit_times, "perf_counter", operations.get_total_flops)
        best = Balance.best(names, measure_unit_seconds(units, rounds=1, seconds=0), 4)
        uniform = Balance(best.names, best.costs, tuple(sum(counts[:stage]) for stage in range(4)))
        stages = [
            RecordedUnit(names[start], nn.Sequential(*list(model)[start:end]), units[start].args)
            for cut in (best, uniform)
            for start, end in pairwise([*cut.starts, len(names)])
        ]
        costs = measure_unit_seconds(stages, rounds=1, seconds=0)
    assert best.bottleneck < 0.9 * uniform.bottleneck
    assert costs == [*best.stage_costs, *uniform.stage_costs]
