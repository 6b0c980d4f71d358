"""From the meta device to memory: the values of one process for any cut, ties kept, nothing left without a value."""

import warnings
from itertools import combinations, pairwise

import limited_memory
import pytest
import torch
from models import toy
from reference import accumulate, assert_same, gradients, merged
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock import MismatchError
from penstock.model import GPT, GPTConfig
from penstock.partition.materialise import has_meta_tensors, materialise


class Gain(nn.Module):
    """A parameter and buffers of its own, and no way to initialise them."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        return inputs * self.gain


class Loose(nn.Module):
    """Initialises in the ways that go round autograd: .data, another parameter, a module inside, whole numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.empty(4)) for _ in range(3))
        self.inside = nn.Linear(2, 2)
        self.register_buffer("order", torch.empty(4, dtype=torch.int64), persistent=False)

    def reset_parameters(self):
        self.first.data.normal_()
        self.second = nn.Parameter(torch.randn(4))
        self.third.data = torch.randn(4)
        self.inside.bias.data = torch.randn(2)
        torch.randperm(4, out=self.order)


def sequential():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6, bias=False), Loose(), nn.Bilinear(2, 3, 4), nn.PReLU())


def transformer():
    with warnings.catch_warnings(action="ignore"):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, norm=nn.LayerNorm(8)).layers


def convolution():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(4, momentum=None), nn.LSTM(4, 4, 2)).to(memory_format=torch.channels_last)


def by_name():
    return nn.ModuleDict(
        {"a": nn.Embedding(7, 4, padding_idx=0), "b": nn.EmbeddingBag(7, 4), "c": nn.ModuleList([nn.GRU(4, 4)])}
    )


def gpt():
    return GPT(GPTConfig(vocabulary=17, context=6, width=8, layers=3, heads=2))


MODELS = [sequential, transformer, convolution, by_name, gpt]


def tensors(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def on_meta(make):
    return make().to("meta")


def cuts_of(count):
    return [[*cut, count] for size in range(count) for cut in ((0, *rest) for rest in combinations(range(1, count), size))]


# ---- values


@pytest.mark.costly
@pytest.mark.parametrize("make", MODELS)
def test_values_are_those_of_one_process_wherever_the_model_is_cut(make):
    whole = on_meta(make)
    materialise(whole, seed=5)
    assert not has_meta_tensors(whole)
    expected = tensors(whole)
    for cut in cuts_of(len(whole)):
        found = {}
        for start, end in pairwise(cut):
            children = list(on_meta(make).named_children())[start:end]
            stage = nn.ModuleDict(dict(children))
            materialise(stage, seed=5)
            found |= tensors(stage)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), cut


def test_stages_of_a_list_are_named_as_the_sequential_they_make():
    whole = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Loose(), nn.ReLU()), nn.Linear(3, 3)).to("meta")
    stages = [nn.Linear(3, 3), nn.Sequential(Loose(), nn.ReLU()), nn.Linear(3, 3)]
    materialise(whole)
    for number, stage in enumerate(stages):
        materialise(stage.to("meta"), {name: f"{number}.{name}" for name in stage.state_dict()})
        assert all(torch.equal(value, tensors(whole)[f"{number}.{name}"]) for name, value in tensors(stage).items())


def test_the_seed_and_the_name_make_the_values():
    twins = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("meta")
    materialise(twins, seed=1)
    assert not torch.allclose(twins[0].weight, twins[1].weight)
    for seed, same in ((1, True), (2, False)):
        again = nn.Sequential(nn.Linear(3, 3)).to("meta")
        materialise(again, seed=seed)
        assert torch.equal(again[0].weight, twins[0].weight) is same


def test_the_generator_is_where_it_was():
    model = on_meta(sequential)
    before = torch.get_rng_state()
    materialise(model, seed=5, init=lambda module: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [transformer, convolution, by_name])
def test_without_a_seed_the_values_are_those_of_building_the_model(make):
    torch.manual_seed(3)
    built = make()
    module = on_meta(make)
    torch.manual_seed(3)
    materialise(module, seed=None)
    if make is transformer:  # which copies one layer
        built, module = built[0], module[0]
    assert tensors(module).keys() == tensors(built).keys()
    assert all(torch.equal(value, tensors(built)[name]) for name, value in tensors(module).items())


def test_running_statistics_start_as_they_do():
    norm = nn.BatchNorm1d(3).to("meta")
    materialise(norm)
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert norm.running_var.tolist() == [1, 1, 1]
    assert norm.num_batches_tracked.item() == 0


def wide(module):
    for name, parameter in module.named_parameters():
        if name.count(".") == 1 and parameter.dim() == 2:  # of another module, which may stay without memory
            nn.init.normal_(parameter, std=9)


@pytest.mark.parametrize("make", [transformer, convolution, by_name, gpt])
def test_a_part_of_the_uncut_model_can_be_materialised_in_it(make):
    whole, part = on_meta(make), on_meta(make)
    materialise(whole, seed=5, init=wide)
    only = {name for number, name in enumerate(tensors(whole)) if number % 3 == 1}
    materialise(part, seed=5, init=wide, only=only)
    assert {name for name, value in tensors(part).items() if not value.is_meta} == only
    assert all(torch.equal(tensors(part)[name], tensors(whole)[name]) for name in only)


def test_a_tied_parameter_has_its_value_under_whichever_name_it_is_wanted():
    whole, part = on_meta(gpt), on_meta(gpt)
    part.head.weight = part.embedding.token.weight
    materialise(whole)
    materialise(part, only={"head.weight"})
    assert torch.equal(part.head.weight, whole.embedding.token.weight)
    assert part.head.bias.is_meta


# ---- init


def linear_ones(module):
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def scaled(module):
    for name, parameter in module.named_parameters():
        if name == "down.weight":
            nn.init.normal_(parameter, std=0.001)


def test_init_is_applied_as_to_a_model_that_was_built():
    model = on_meta(gpt)
    materialise(model, init=linear_ones)
    untouched = on_meta(gpt)
    materialise(untouched)
    for name, value in tensors(model).items():
        one = name.endswith("weight") and not name.startswith("embedding") and "norm" not in name
        assert torch.equal(value, torch.ones_like(value) if one else tensors(untouched)[name]), name


def test_init_of_a_module_may_write_what_is_inside():
    model, block = on_meta(gpt), on_meta(gpt).block1
    materialise(model, init=scaled)
    materialise(block, {name: f"block1.{name}" for name, _ in block.named_parameters()}, init=scaled)
    assert 0 < block.down.weight.std() < 0.002
    assert all(torch.equal(value, tensors(model.block1)[name]) for name, value in tensors(block).items())


def test_init_can_give_values_to_what_has_no_reset_parameters():
    def init(module):
        if isinstance(module, Gain):
            module.gain.data.fill_(2)
            module.steps.zero_()

    module = nn.Sequential(nn.Linear(2, 2), Gain()).to("meta")
    materialise(module, init=init)
    assert module[1].gain.tolist() == [2, 2, 2]


# ---- what stays


def test_tied_parameters_stay_one_and_have_the_value_of_the_first():
    model = on_meta(gpt)
    model.head.weight = model.embedding.token.weight  # after to(), which makes two of them
    model.norm.register_parameter("again", model.block0.up.bias)
    weight = model.head.weight
    materialise(model, init=linear_ones)
    untied = on_meta(gpt)
    materialise(untied, init=linear_ones)
    assert model.head.weight is model.embedding.token.weight is weight
    assert model.norm.again is model.block0.up.bias
    assert torch.equal(weight, untied.embedding.token.weight)
    assert torch.equal(model.block0.up.bias, untied.block0.up.bias)


def test_a_module_used_twice_stays_one():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared).to("meta")
    materialise(model)
    assert model[0] is model[2]
    model[2](torch.ones(3)).sum().backward()
    assert model[0].weight.grad is not None


def used_twice():
    shared = nn.Linear(3, 3)
    again = toy(lambda self, inputs: self.layer(inputs), layer=shared)
    return nn.Sequential(shared, nn.ReLU(), nn.Linear(3, 3), again).to("meta")


def rank_used_twice():
    pipe = ps.Pipeline(used_twice(), nn.functional.mse_loss, microbatches=2)
    pipe.step(torch.ones(2, 3), target=torch.zeros(2, 3))
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.ranks
def test_a_module_used_in_two_stages_has_one_value():
    model = used_twice()
    materialise(model)
    accumulate(model, nn.functional.mse_loss, (torch.ones(2, 3), torch.zeros(2, 3)), 2)
    assert_same(merged(on_ranks(rank_used_twice, 2)), gradients(model.named_parameters()))


def test_a_tie_between_two_stages_of_one_rank_stays():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    first.to("meta"), second.to("meta")
    second.weight = first.weight
    materialise(first)
    before = first.weight.clone()
    materialise(second)
    assert second.weight is first.weight
    assert torch.equal(first.weight, before)


class Special(nn.Parameter):
    pass


def test_kind_dtype_layout_and_what_is_frozen_stay():
    module = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3))
    module[2].weight = Special(module[2].weight.data)
    module[2].weight.mark = "mine"
    module[2].bias.requires_grad_(False)
    module.to(memory_format=torch.channels_last)
    expected = [(type(p), p.dtype, p.stride(), p.requires_grad) for p in module.parameters()]
    for parameter in module.parameters():
        torch.utils.swap_tensors(parameter, like_on_meta(parameter))
    objects = list(module.parameters())
    materialise(module)
    assert [(type(p), p.dtype, p.stride(), p.requires_grad) for p in module.parameters()] == expected
    assert module[2].weight.mark == "mine"
    assert all(a is b for a, b in zip(objects, module.parameters(), strict=True))


def like_on_meta(parameter):
    new = torch.empty_like(parameter, device="meta").as_subclass(type(parameter))
    new.__dict__.update(parameter.__dict__)
    return new.requires_grad_(parameter.requires_grad)


def test_what_has_memory_keeps_its_values():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].to("meta")
    model[2].bias = nn.Parameter(torch.empty(2, device="meta"))
    before = {name: value.clone() for name, value in tensors(model).items() if not value.is_meta}
    materialise(model, init=linear_ones)
    assert all(torch.equal(tensors(model)[name], value) for name, value in before.items())
    assert model[1].weight.tolist() == [[1, 1], [1, 1]]
    assert model[2].bias.tolist() == [0, 0]


def test_a_module_with_memory_is_left_alone():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    materialise(model, init=linear_ones)
    assert torch.equal(model.weight, before)
    assert not has_meta_tensors(model)
    assert has_meta_tensors(nn.BatchNorm1d(2, affine=False).to("meta"))


def test_a_materialised_model_trains():
    model = on_meta(convolution)[:5]
    materialise(model)
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class SelfInitialisingModel(nn.Module):
    """As models of transformers are: it initialises the modules inside it, which do not do it themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Gain(), nn.Linear(3, 3), Gain()])

    def _init_weights(self, module):
        if isinstance(module, Gain):
            nn.init.constant_(module.gain, 4)
            module.steps.zero_()
        elif isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


def test_a_models_own_init_weights_initialises_what_is_inside_it():
    model = nn.Sequential(nn.Linear(3, 3), SelfInitialisingModel()).to("meta")
    materialise(model, only={name for name, _ in model.named_parameters() if "layers.2" not in name} | {"1.layers.0.steps"})
    assert model[1].layers[0].gain.tolist() == [4, 4, 4]
    assert torch.equal(model[1].layers[1].weight, torch.ones(3, 3))
    assert not torch.equal(model[0].weight, torch.ones(3, 3))
    assert model[1].layers[2].gain.is_meta


# ---- what is loaded


def rank_loads() -> list[str]:
    results = []

    def tries(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except MismatchError as error:
            results.append(str(error))

    inputs = torch.ones(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), Gain())).to("meta")
    ones = {name: torch.ones_like(value, device="cpu") for name, value in model.state_dict().items()}
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
    tries(pipe.step, inputs, target=inputs)
    tries(pipe.eval, inputs)
    tries(pipe.state_dict)
    pipe.load_state_dict(ones)
    tries(pipe.eval, inputs)
    tries(ps.Pipeline, nn.Sequential(nn.Linear(3, 3), Unsaved().to("meta")), nn.functional.mse_loss, microbatches=2)
    return [*results, str(all((value == 1).all() for value in pipe.state_dict().values()))]


class Unsaved(Gain):
    """A buffer that is in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.ones(2), persistent=False)


@pytest.mark.ranks
def test_what_nothing_initialises_must_be_loaded_before_the_first_step():
    first, second = on_ranks(rank_loads, 2)
    unset = (
        "what has no value yet (2: 1.1.gain, 1.1.steps) cannot be used: the model was built on the meta device and nothing "
        "initialises them; load them (load_state_dict, checkpoint.import_weights or checkpoint.resume) or pass init="
    )
    unsaved = (
        "buffer 1.angles is on the meta device and no reset_parameters() writes it: give Unsaved a reset_parameters() that "
        "does, pass init=, or build it on a real device"
    )
    assert first == [unset, unset, unsaved, "True"]  # its own state_dict is whole
    assert second == [unset, unset, unset, unsaved, "True"]


# ---- errors


UNTOUCHED = [
    (lambda: nn.Sequential(Unsaved(), Unsaved()), None,
     "buffer 0.angles (and 1 more) is on the meta device and no reset_parameters() writes it: "
     "give Unsaved a reset_parameters() that does, pass init=, or build it on a real device"),
    (lambda: nn.Sequential(Unsaved()), lambda module: [p.data.zero_() for p in module.parameters(recurse=False)],
     "buffer 0.angles is on the meta device and neither reset_parameters() nor init= writes it: "
     "give Unsaved a reset_parameters() that does, extend init=, or build it on a real device"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "init", "message"), UNTOUCHED)
def test_what_nothing_initialises_is_told(make, init, message):
    module = on_meta(make)
    with pytest.raises(MismatchError) as caught:
        materialise(module, init=init)
    assert str(caught.value) == message
    assert all(value.is_meta for value in tensors(module).values())


def test_an_error_names_what_it_is_called_in_the_uncut_model():
    names = {name: f"3.{name}" for name in ("gain", "steps", "angles")}
    with pytest.raises(MismatchError, match=r"buffer 3\.angles"):
        materialise(Unsaved().to("meta"), names)
    assert materialise(Gain().to("meta"), names) == {"3.gain", "3.steps"}


def test_a_failing_init_leaves_the_module_as_it_was():
    def init(module):
        raise RuntimeError("no")

    model = on_meta(sequential)
    with pytest.raises(RuntimeError, match="no"):
        materialise(model, init=init)
    assert all(value.is_meta for value in tensors(model).values())
    materialise(model)


# ---- more than a process can hold


@pytest.mark.ranks
@pytest.mark.skipif(not limited_memory.CAN_LIMIT_MEMORY, reason="the memory of a process is limited on Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_of_three_times_the_memory_of_a_process_trains_on_four_of_them(frozen):
    (whole,) = ps.launch(limited_memory.train_whole, 1, frozen)
    assert "not enough memory" in whole or "can't allocate memory" in whole
    everyone = ps.launch(limited_memory.train_stage, 4, frozen)
    ((expected, _),) = ps.launch(limited_memory.train_stage, 1, frozen, None)
    assert [loss for loss, _ in everyone] == [expected] * 4
    held = sum(nbytes for _, nbytes in everyone)
    assert held > 3 * limited_memory.LIMIT
    assert max(nbytes for _, nbytes in everyone) < limited_memory.LIMIT
