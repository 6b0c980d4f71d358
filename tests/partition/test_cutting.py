"""Cuts of a model: every part once and under its name, where they were asked for, and the model's output after all stages."""

import math
import re
import types
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, DecoderModel, LayerListNet, RepeatedBlockModel, TiedModel, UNet, differing, toy
from torch import nn
from torch.nn import functional

from penstock import MismatchError, partition
from penstock.partition import model_names_of_stages, split


def layers_of(stages: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [named for stage in stages for named in stage._modules.items()]


def named(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    return model


def order_of(model: nn.Module, cuts: tuple[str, ...] = ()) -> list[str]:
    return partition.CuttableModel(model, cuts).unit_order


# -- a Sequential -----------------------------------------------------------------------------------------------------


@pytest.mark.costly
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, 1, 2, 5]), min_size=1, max_size=12), st.data())
def test_every_layer_is_kept_once_in_order_under_its_name(widths, data):
    model = nn.Sequential(*[nn.ReLU() if width is None else nn.Linear(width, width) for width in widths])
    stages = split(model, data.draw(st.integers(1, len(widths))))
    assert layers_of(stages) == list(model.named_children())
    assert all(len(stage) for stage in stages)


def test_stages_share_the_layers_of_the_model():
    model = named("a", "b", "c")
    parameters = {name: p for stage in split(model, 3) for name, p in stage.named_parameters()}
    assert parameters.keys() == dict(model.named_parameters()).keys()
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_stages_one_after_the_other_are_the_model():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    for stages in range(1, 6):
        assert torch.equal(partition.run(split(model, stages), inputs), model(inputs))


@pytest.mark.parametrize(("stages", "example"), [(1, None), (3, None), (4, None), (5, None), (3, (torch.ones(2, 3),))])
def test_a_layer_that_stands_in_several_places_runs_in_each(stages, example):
    act, wide = nn.Tanh(), nn.Linear(3, 3)
    model = nn.Sequential(wide, act, nn.Linear(3, 3), act, wide)
    pieces = split(model, stages, example_args=example)
    assert layers_of(pieces) == list(model._modules.items())
    assert layers_of(split(model, 2, cuts=["3"])[1:]) == [("3", act), ("4", wide)]
    inputs = torch.randn(5, 3)
    assert torch.equal(partition.run(pieces, inputs), model(inputs))


def test_a_frozen_layer_counts_a_third_for_each_pass_over_its_parameters():
    def starts(frozen: range) -> list[str]:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)])
        for number in frozen:
            model[number].requires_grad_(False)
        return partition.CuttableModel(model).choose_cuts(4)

    assert starts(range(0)) == ["6", "12", "18"]
    assert starts(range(12)) == ["12", "16", "20"]  # its forwards
    assert starts(range(12, 24)) == ["5", "10", "17"]  # their forwards, and backwards to their inputs


def test_parameters_decide_where_an_uneven_model_is_cut():
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert [[name for name, _ in stage.named_children()] for stage in split(model, 2)] == [["0"], ["1", "2", "3", "4"]]


@pytest.mark.parametrize("cuts", [("b",), ("c",), ("b", "d"), ("b", "c", "d"), ()])
def test_a_cut_names_the_first_layer_of_the_stage_behind_it(cuts):
    stages = split(named("a", "b", "c", "d"), len(cuts) + 1, cuts=cuts)
    assert [name for name, _ in layers_of(stages)] == ["a", "b", "c", "d"]
    assert tuple(next(stage.named_children())[0] for stage in stages) == ("a", *cuts)


def test_a_sequential_with_a_forward_of_its_own_is_followed():
    class Residual(nn.Sequential):
        def forward(self, hidden):
            return hidden + super().forward(hidden)

    model, inputs = Residual(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(4, 3)
    for stages in split(model, 2), split(model, 3, cuts=["1", "2"]):
        assert torch.equal(partition.run(stages, inputs), model(inputs))
    longer = nn.Sequential(model, nn.Tanh())
    assert torch.equal(partition.run(split(longer, 2, cuts=["0.1"]), inputs), longer(inputs))


# -- any other model --------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Units in a ModuleList in a ModuleDict, in nested Sequentials, and as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.towers = nn.ModuleDict(
            {
                "left": nn.ModuleList([NormMLPBlock(), NormMLPBlock()]),
                "right": nn.Sequential(NormMLPBlock(), nn.Sequential(NormMLPBlock())),
            }
        )
        self.last = nn.Linear(4, 2)
        self.offset = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, hidden):
        hidden = left = self.first(hidden)
        for block in self.towers["left"]:
            left = block(left)
        return self.last(left * self.scale + self.towers["right"](hidden) + self.offset)


class NormMLPBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))

    def forward(self, hidden):
        return hidden + self.mlp(self.norm(hidden))


LEFT = ["towers.left.0", "towers.left.1"]


def test_units_are_the_elements_of_containers_and_the_modules_beside_them():
    assert order_of(Nested()) == ["first", *LEFT, "towers.right", "last"]
    assert order_of(DecoderModel()) == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output"]
    assert order_of(RepeatedBlockModel()) == ["token", "block", "between.0", "between.1", "between.2", "head"]


def test_a_cut_inside_a_unit_makes_units_of_its_children():
    parts = ["towers.left.1.norm", "towers.left.1.mlp"]
    assert order_of(Nested(), ("towers.left.1.mlp",)) == ["first", LEFT[0], *parts, "towers.right", "last"]
    layers = [f"towers.left.1.mlp.{number}" for number in range(3)]
    assert order_of(Nested(), ("towers.left.1.mlp.2",)) == ["first", LEFT[0], parts[0], *layers, "towers.right", "last"]
    assert order_of(Nested(), ("towers.right.1",)) == ["first", *LEFT, "towers.right.0", "towers.right.1", "last"]


PLACES = [
    ("towers",), ("towers.left",), ("towers.left.1",), ("towers.right",), ("towers.right.1",), ("last",),
    ("towers.left.1.mlp",), ("towers.right.0.mlp.1",), ("towers.left.1", "towers.right"),
    ("towers.left.1.norm", "towers.right.1.0.mlp", "last"),
]  # fmt: skip


@pytest.mark.parametrize("cuts", PLACES, ids=" ".join)
def test_wherever_it_is_cut_the_stages_are_the_model_and_share_its_parts(cuts):
    model, inputs = Nested(), torch.randn(5, 4)
    stages = split(model, len(cuts) + 1, cuts=cuts)
    assert torch.equal(partition.run(stages, inputs), model(inputs))
    state = {name: value for stage in stages for name, value in stage.state_dict(keep_vars=True).items()}
    expected = model.state_dict(keep_vars=True)
    assert state.keys() == expected.keys()
    assert all(state[name] is value for name, value in expected.items())


def test_a_cut_before_a_module_that_contains_units_is_before_its_first():
    stages = split(CASES["encoder-decoder"].model(), 3, cuts=["encoder", "decoder"])
    names = [{name.partition(".")[0] for name, _ in stage.named_parameters()} for stage in stages]
    assert names == [{"source"}, {"encoder", "target"}, {"decoder", "head"}]


class Leftover(nn.Module):
    """Parameters and buffers that nothing uses, and a second name of one that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.alone, self.alias = nn.Parameter(torch.ones(2)), self.a
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("forgotten", torch.zeros(3), persistent=False)

    def forward(self, hidden):
        return self.b(self.a(hidden))


@pytest.mark.costly
@pytest.mark.parametrize("example", [None, (torch.ones(3, 2),)])
def test_no_name_is_lost_also_of_what_nothing_uses(example):
    model = Leftover()
    first, last = split(model, 2, cuts=["b"], example_args=example)
    assert set(first.state_dict()) == {"a.weight", "a.bias", "alias.weight", "alias.bias"}
    rest = {"b.weight", "b.bias", "unused.weight", "unused.bias", "alone", "count"}
    assert set(last.state_dict()) == rest
    assert {name for name, _ in last.named_buffers()} == {"count", "forgotten"}


def test_what_a_sequential_has_besides_its_layers_is_not_lost_in_silence():
    model = named("a", "b")
    model.register_parameter("gain", nn.Parameter(torch.ones(2)))
    with pytest.raises(MismatchError, match=r"^the cut loses gain, which Sequential has besides its layers: register it"):
        split(model, 2)


@pytest.mark.costly
def test_no_name_of_a_model_is_in_the_way():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("inputs", "sources", "graph", "code", "run", "numbers"):
                self.add_module(name, nn.Linear(2, 2))
            self.device, self.takers = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            for layer in (self.inputs, self.sources, self.graph, self.code, self.run, self.numbers):
                x = layer(x) + self.device
            return x * self.takers

    model, x = Named(), torch.randn(3, 2)
    for example in (None, (x,)):
        stages = split(model, 3, cuts=["graph", "run"], example_args=example)
        assert torch.equal(partition.run(stages, x), model(x))
        assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


@pytest.mark.costly
def test_stages_are_in_the_mode_of_the_model():
    model = DecoderModel()
    assert all(stage.training for stage in split(model, 2))
    assert not any(stage.training for stage in split(model.eval(), 2))
    assert not any(module.training for module in model.modules())
    leftover = Leftover().eval()
    assert not any(stage.training for stage in split(leftover, 2, ["b"], (torch.ones(3, 2),)))
    assert not any(module.training for module in leftover.modules())


# -- the model's output, for any number of rows and in both modes -------------------------------------------------------


NAMES = ("transformer", "u-net", "encoder-decoder with dropout", "tied three times", "recurrent", "wide")
BY = [(name, "names") for name in NAMES] + [pytest.param(name, "example", marks=pytest.mark.slow) for name in NAMES[2:4]]


@pytest.mark.parametrize(("name", "by"), BY)
def test_stages_run_one_after_the_other_are_the_model(name, by):
    case = CASES[name]
    model, batch = case.model(), case.batch(3, 0)
    example = {} if by == "names" else {"example_args": batch.args, "example_kwargs": batch.kwargs}
    whole = partition.CuttableModel(model, (), **example)
    stages = whole.cut([] if name == "recurrent" else whole.unit_order[1:])
    for rows in (3, 1, 2, 8):
        args, _, kwargs = case.batch(rows, 5)
        for training, grad in ((True, True), (False, True), (False, False)):
            if rows == 1 and training and name == "wide":
                continue  # BatchNorm takes no single row
            for module in (model, *stages):
                module.train(training)
            results = []
            for run in (model, lambda *a, **k: partition.run(stages, *a, **k)):
                buffers = {key: value.clone() for key, value in model.named_buffers()}
                torch.manual_seed(3)
                with torch.set_grad_enabled(grad):
                    results.append((run(*args, **kwargs), {key: value.clone() for key, value in model.named_buffers()}))
                for key, value in model.named_buffers():
                    value.copy_(buffers[key])
            assert not differing(results[1], results[0]), (rows, training, grad)


@pytest.mark.costly
@pytest.mark.parametrize("example", [None, (torch.ones(2, 8),)])
def test_dropout_between_units_follows_training(example):
    def drop_and_scale(self, hidden):
        hidden = functional.dropout(self.a(hidden), 0.5, training=self.training)
        return self.b(hidden) * hidden.shape[0]  # a value that is not a tensor

    model, hidden = toy(drop_and_scale, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(6, 8)
    stages = split(model, 2, cuts=["b"], example_args=example)
    outputs = []
    for training in (True, False):
        for stage in (model, *stages):
            stage.train(training)
        for run in (model, lambda hidden: partition.run(stages, hidden)):
            torch.manual_seed(1)
            outputs.append(run(hidden))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert not torch.allclose(outputs[0], outputs[2])


# -- forwards of every kind ---------------------------------------------------------------------------------------------


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, shift=None, scale=1.0, **more):
        hidden = self.a(x) * scale
        if shift is not None:
            hidden = hidden + shift
        for value in more.values():
            hidden = hidden + value
        return self.b(hidden)


def test_without_an_example_parameters_keep_their_defaults():
    model, x = Optional(), torch.randn(3, 4)
    stages = split(model, 2, cuts=["b"])
    assert torch.equal(partition.run(stages, x), model(x))
    assert torch.equal(partition.run(stages, x=x, scale=1.0, shift=None), model(x))
    for kwargs, name in (({"shift": x}, "shift"), ({"scale": 2.0}, "scale"), ({"other": x}, "other")):
        message = f"^the model was cut without {name}=: where it is cut, give it in example_args or _kwargs$"
        with pytest.raises(MismatchError, match=message):
            partition.run(stages, x, **kwargs)


@pytest.mark.costly
def test_with_an_example_optional_parameters_and_further_keywords_are_followed():
    model, x = Optional(), torch.randn(3, 4)
    stages = split(model, 2, cuts=["b"], example_args=(x, x), example_kwargs={"scale": 2.0, "one": x, "two": x})
    y = torch.randn(5, 4)
    assert torch.equal(partition.run(stages, y, -y, 2.0, two=y, one=2 * y), model(y, -y, 2.0, one=2 * y, two=y))


class RowCountBranch(nn.Module):
    """Does another thing for more than three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        hidden = self.a(x) * scale
        return self.b(hidden * 2 if x.shape[0] > 3 else hidden)


NUMBER = ", or a 0-dimensional tensor in both if the number only scales values and changes from step to step"
REFUSED = [
    # rows in the example, what the stages are called with, what is told, and behind the advice
    (2, (5, 4),    {},              "the model was cut for x.size()[0] <= 3, which does not hold here: ", ""),
    (5, (2, 4),    {},              "the model was cut for x.size()[0] > 3, which does not hold here: ", ""),
    (5, (5, 4, 4), {},              "x = torch.float32 of shape (any, 2 or more), not torch.float32 of shape (5, 4, 4): ", ""),
    (5, (5, 4),    {"scale": 3.0},  "the model was cut for scale = 2.0, not 3.0: ", NUMBER),
    (5, (5, 4),    {"scale": None}, "the model was cut for scale = 2.0, not None: ", ""),
]  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize(("rows", "shape", "kwargs", "message", "end"), REFUSED)
def test_a_batch_for_which_the_example_does_not_speak_is_refused(rows, shape, kwargs, message, end):
    stages = split(RowCountBranch(), 2, cuts=["b"], example_args=(torch.ones(rows, 4),), example_kwargs={"scale": 2.0})
    with pytest.raises(MismatchError, match=re.escape(f"{message}give an example like this batch{end}") + "$"):
        partition.run(stages, torch.ones(shape), **({"scale": 2.0} | kwargs))
    assert partition.run(stages, torch.ones(rows, 4), scale=2.0).shape == (rows, 4)


@pytest.mark.costly
def test_the_layout_of_integers_does_not_matter():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(tokens=nn.Embedding(7, 4), inner=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    batch = torch.randint(7, (6, 9))[:, :-1]
    for example in (batch[:2], batch[:2].contiguous()):
        first, second = split(model, 2, ["inner.1"], example)
        for tokens in (batch, batch[:, 2:5], batch.contiguous()):
            assert torch.equal(second(first(tokens)), model(tokens))


def test_a_size_of_one_is_told_that_the_example_must_have_it():
    stages = split(RowCountBranch(), 2, cuts=["b"], example_args=(torch.ones(5, 4),))
    message = (
        "x = torch.float32 of shape (any, 2 or more), not torch.float32 of shape (5, 1): give an example like this batch, with"
    )
    with pytest.raises(MismatchError, match=re.escape(f"{message} a size of 1 where this has one") + "$"):
        partition.run(stages, torch.ones(5, 1))


@pytest.mark.slow
def test_an_example_of_one_row_speaks_for_any_number():
    model = UNet().eval()
    stages = split(model, 3, cuts=["middle", "up1"], example_args=(torch.randn(1, 1, 8, 8),))
    for rows in (1, 2, 5):
        inputs = torch.randn(rows, 1, 8, 8)
        assert torch.equal(partition.run(stages, inputs), model(inputs))


@pytest.mark.costly
def test_a_missing_input_and_another_structure_are_refused():
    batch = CASES["wide"].batch(4, 0)
    stages = split(CASES["wide"].model(), 2, cuts=["body"], example_args=batch.args)
    with pytest.raises(
        MismatchError, match=r"the model's forward.* cannot be called so: missing a required argument: 'features'"
    ):
        partition.run(stages)
    with pytest.raises(MismatchError, match="the model was cut for another structure of features: "):
        partition.run(stages, {**batch.args[0], "nothing": batch.args[0]["dense"], "more": None})


# -- what cannot be cut -------------------------------------------------------------------------------------------------

WRONG_CUTS = [
    (("x",),      "cannot cut before 'x': Sequential has a, b, c, .."),
    (("b",),      "cuts ['b'] do not make 3 stages: name 2 layers after the first, in the order in which they run"),
    (("c", "b"),  "cuts ['c', 'b'] do not make 3 stages: name 2 layers after the first, in the order in which they run"),
    (("b", "b"),  "cuts ['b', 'b'] do not make 3 stages: name 2 layers after the first, in the order in which they run"),
    (("a", "b"),  "cuts ['a', 'b'] do not make 3 stages: name 2 layers after the first, in the order in which they run"),
]  # fmt: skip


@pytest.mark.parametrize(("cuts", "message"), WRONG_CUTS)
def test_wrong_cuts_are_told(cuts, message):
    with pytest.raises(MismatchError) as caught:
        split(named("a", "b", "c"), 3, cuts=cuts)
    assert str(caught.value) == message


WRONG_CUTS_OF_ANY = [
    (("layer.2",),              "cannot cut before 'layer.2': DecoderModel has layers.2, "),
    (("layers.1", "layers.9"),  "cannot cut before 'layers.9': DecoderModel has layers.3, "),
    (("output", "layers.1"),    "cuts ['output', 'layers.1'] do not make 3 stages: name 2 layers after the first, in"),
    (("tok_embeddings", "norm"), "cuts ['tok_embeddings', 'norm'] do not make 3 stages"),
    (("layers", "layers.0"),    "cuts ['layers', 'layers.0'] do not make 3 stages"),
    (("layers.1",),             "cuts ['layers.1'] do not make 3 stages"),
]  # fmt: skip


@pytest.mark.parametrize(("cuts", "message"), WRONG_CUTS_OF_ANY)
def test_wrong_cuts_of_any_model_are_told_with_the_names_nearest_to_them(cuts, message):
    with pytest.raises(MismatchError) as caught:
        split(DecoderModel(), 3, cuts=cuts)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("example", [None, (torch.ones(3, 2),)])
def test_a_cut_before_a_module_that_is_not_called_is_told(example):
    with pytest.raises(MismatchError, match=r"^cannot cut before 'unused': the forward of Leftover does not call it$"):
        split(Leftover(), 2, cuts=["unused"], example_args=example)


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_a_number_of_stages_that_the_layers_cannot_make_is_told(stages):
    with pytest.raises(MismatchError, match=f"cannot cut 3 layers into {stages} stages: use 1 to 3 stages"):
        split(named("a", "b", "c"), stages)


def test_more_stages_than_units_are_told():
    with pytest.raises(MismatchError, match="cannot cut 7 layers into 8 stages: use 1 to 7 stages"):
        split(DecoderModel(), 8)


class BranchingModel(nn.Module):
    def __init__(self, forward) -> None:
        super().__init__()
        self.a, self.b, self.c, self._forward = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x):
        return self._forward(self, x)


def by_value(model, x):
    return model.b(model.a(x)) if x.sum() > 0 else model.a(x)


def in_numpy(model, x):
    return model.b(torch.from_numpy(model.a(x).detach().numpy()))


def with_a_head_for_training(model, x):
    hidden = model.a(x)
    if not model.training:
        return model.b(hidden)
    helper = model.c(hidden)
    return model.b(hidden * helper) + hidden + x, helper


def drawn_in_training(model, x):
    mean, scale = model.a(x), model.c(x)
    sample = mean + scale * 2 if model.training else mean
    return model.b(sample), mean, scale


def without_a_layer_in_training(model, x):
    return model.b(model.a(x) if model.training else model.c(model.a(x)))


def one_or_other(model, x):
    return model.b(model.a(x) if model.training else model.b(x))


def without_gradients(model, x):
    hidden = model.a(x)
    with torch.no_grad():
        factor = model.c(hidden).exp() * 2
        with torch.enable_grad():
            factor = factor + 1
    return model.b(hidden * factor)


def in_place(model, x):
    hidden = model.a(x) * 1
    hidden.add_(model.c(x))
    hidden[:, 2:].mul_(2)
    functional.relu(hidden, inplace=True)
    return model.b(hidden)


def add_to(hidden, other):
    hidden += other


def in_place_by_assignment(model, x):
    hidden = model.a(x) * 1
    before, rows = hidden[:, :2], x.shape[0]
    hidden += model.c(x)
    rows *= 2
    add_to(hidden, rows)
    twice = model.b(hidden)
    left = torch.cat([before, before], 1)
    twice -= left
    return twice / rows


def assigned(model, x):
    hidden = model.a(x) * 1
    hidden[:, :2] = 0.5
    return model.b(hidden)


def two_branches(model, x):
    hidden = model.a(x)
    first, second = hidden.chunk(2, -1)
    size = {"left": first, "right": [second, hidden[..., :2]]}
    return {"sum": model.b(model.c(torch.cat([size["left"], *size["right"]], -1)[..., -4:])), "sides": size, "rows": x.shape[0]}


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, factor):
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class SteeperRound(torch.autograd.Function):
    @staticmethod
    def forward(hidden, steps):
        return (hidden * steps).round() / steps, hidden > 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        steps, is_positive = ctx.saved_tensors
        return gradient * is_positive * 3, (gradient * steps).sum(0)


reverse = Reversal.apply  # as many modules name it


def with_backwards_of_its_own(model, x):
    hidden = reverse(model.a(x), 0.5)
    rounded, is_positive = SteeperRound.apply(hidden, model.c.bias)
    return model.b(torch.where(is_positive, rounded, hidden))


EXAMPLE = (torch.ones(3, 4),)
WITH_EITHER = (without_gradients, in_place, in_place_by_assignment, two_branches)
FORWARDS = [(forward, example) for forward in WITH_EITHER for example in (None, EXAMPLE)]


@pytest.mark.costly
@pytest.mark.parametrize(("forward", "example"), [*FORWARDS, (assigned, EXAMPLE), (with_backwards_of_its_own, EXAMPLE)])
def test_what_stands_between_units_does_what_it_does_in_the_model(forward, example):
    model, x = BranchingModel(forward), torch.randn(5, 4)
    results = []
    for run in (model, lambda x: partition.run(split(model, 2, cuts=["b"], example_args=example), x)):
        model.zero_grad()
        output = run(x)
        (output["sum"] if isinstance(output, dict) else output).sum().backward()
        results.append(
            (output, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
        )
    assert not differing(results[1], results[0])
    assert type(results[1][0]) is type(results[0][0])


@pytest.mark.parametrize("forward", [with_a_head_for_training, drawn_in_training])
@pytest.mark.parametrize("example", [None, EXAMPLE])
@pytest.mark.parametrize("cuts", [["c", "b"], ["c"], ["b"]])
def test_a_forward_may_leave_out_in_evaluation_what_it_does_in_training(forward, example, cuts):
    model, x = BranchingModel(forward), torch.randn(5, 4)
    stages = split(model, len(cuts) + 1, cuts=cuts, example_args=example)
    for is_training in (True, False, True):
        for module in (model, *stages):
            module.train(is_training)
        results = []
        for run in (model, lambda x: partition.run(stages, x)):
            model.zero_grad()
            output = run(x)
            sum(tensor.sum() for tensor in (output if isinstance(output, tuple) else [output])).backward()
            results.append((output, {name: parameter.grad for name, parameter in model.named_parameters()}))
        assert not differing(results[1], results[0])


def test_layers_inside_autocast_in_the_forward_are_not_exported_wrongly():
    def mixed(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.a(x)
        return model.b(hidden.float())

    with pytest.raises(MismatchError, match=r"the forward enters torch.autocast, which is lost where it is cut: enter it in"):
        split(BranchingModel(mixed), 2, cuts=["b"], example_args=(torch.ones(2, 4),))


def test_what_the_forward_wants_of_autograd_between_its_layers_is_refused_where_an_export_would_lose_it():
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return model.c(hidden)

    def hooked(model, x):
        model.a(x).register_hook(torch.neg)

    def asked(model, x):
        hidden = model.a(x)
        return model.b(hidden * 2 if hidden.requires_grad else hidden)

    def reentrant(model, x):
        return model.b(torch.utils.checkpoint.checkpoint(model.a, x, use_reentrant=True))

    def with_a_layer_inside(model, x):
        return model.b(Inside.apply(model.a(x)))

    errors = {
        hooked: r"^the forward calls register_hook\(\) of a tensor between its layers, which is lost where it is cut: do it in",
        asked: r"^the forward asks for .requires_grad of a tensor between its layers, which no trace of it knows: do it in",
        reentrant: r"^the forward gives a function to CheckpointFunction.apply between its layers.*give use_reentrant=False",
        with_a_layer_inside: r"^the forward calls the layer c inside Inside.apply: call it outside",
    }
    for forward, message in errors.items():
        model = BranchingModel(forward)
        with pytest.raises(MismatchError, match=message):
            split(model, 2, cuts=["b"], example_args=EXAMPLE)
    with pytest.raises(MismatchError, match=r"\(it calls a torch.autograd.Function between its layers\): give example_args"):
        split(BranchingModel(with_backwards_of_its_own), 2, cuts=["b"])


def test_torchs_encoder_may_ask_in_evaluation_whether_its_input_requires_a_gradient():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.embedding, self.encoder = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 2)

        def forward(self, tokens, mask):
            return self.encoder(self.embedding(tokens), src_key_padding_mask=mask)

    model, tokens = Masked().eval(), torch.randint(9, (4, 5))
    mask = torch.arange(5) > torch.tensor([[4], [2], [3], [4]])
    stages = split(model, 2, cuts=["encoder.layers.1"], example_args=(tokens, mask))
    assert torch.equal(partition.run(stages, tokens, mask), model(tokens, mask))


INSTEAD = "give example_args, so that it can be exported; or a list with one module for each stage"


def test_a_forward_that_cannot_be_followed_is_told_with_what_to_do_instead():
    with pytest.raises(
        MismatchError, match=r"^cannot follow the forward of BranchingModel \(.*control flow.*\): " + INSTEAD + "$"
    ):
        split(BranchingModel(by_value), 2, cuts=["b"])
    with pytest.raises(MismatchError, match=r"^cannot follow the forward of RowCountBranch \(.*\): " + INSTEAD + "$"):
        split(RowCountBranch(), 2, cuts=["b"])
    with pytest.raises(
        MismatchError, match=r"^cannot follow the forward of BranchingModel \(.*item assignment\): " + INSTEAD + "$"
    ):
        split(BranchingModel(assigned), 2, cuts=["b"])
    by_values = "it decides by the values of a tensor, which differ in the next batch: decide with torch.where"
    for forward, change in {by_value: by_values, in_numpy: "change what it says"}.items():
        instead = f"{change}, or give a list with one module for each stage"
        with pytest.raises(MismatchError, match=r"^cannot export the forward of BranchingModel \(.+\): " + instead + "$"):
            split(BranchingModel(forward), 2, cuts=["b"], example_args=(torch.ones(2, 4),))


@pytest.mark.costly
@pytest.mark.parametrize("forward", [without_a_layer_in_training, one_or_other])
@pytest.mark.parametrize("example", [None, (torch.ones(2, 4),)])
def test_a_forward_that_differs_between_training_and_evaluation_is_told(forward, example):
    message = (
        "the forward of BranchingModel calls layers in evaluation that it does not call in training, or in another order: "
        "give a list with one module for each stage"
    )
    with pytest.raises(MismatchError, match=message):
        split(BranchingModel(forward), 2, cuts=["b"], example_args=example)


def test_a_forward_of_any_number_of_arguments_is_refused():
    class Any(BranchingModel):
        def forward(self, *tensors):
            return self.b(self.a(sum(tensors)))

    message = r"a forward that takes \*tensors cannot be cut along its graph: give its parameters names"
    with pytest.raises(MismatchError, match=message):
        split(Any(None), 2, cuts=["b"])
    with pytest.raises(MismatchError, match=message):
        split(Any(None), 2, cuts=["b"], example_args=(torch.ones(2, 4),))


def test_running_statistics_that_two_stages_would_move_are_refused():
    parts = {"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "b": nn.Linear(4, 4)}
    model = toy(lambda self, x: self.norm(self.b(self.norm(self.a(x)))), **parts)
    message = "^norm runs in stages 0 and 1, which cannot share its running statistics: cut elsewhere$"
    with pytest.raises(MismatchError, match=message):
        split(model, 2, cuts=["b"])
    split(model, 2, cuts=["norm"])
    norm = nn.BatchNorm1d(4)
    with pytest.raises(MismatchError, match=r"^norm runs in stages 0 and 1, which cannot share"):
        split(nn.Sequential(OrderedDict(norm=norm, a=nn.Linear(4, 4), again=norm)), 2, cuts=["a"])


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), BranchingModel(lambda model, x: model.b(model.a(x)))]
)
def test_a_hook_of_the_whole_model_is_refused_where_no_stage_would_run_it(model):
    cuts = [list(dict(model.named_children()))[1]]
    split(model, 2, cuts=cuts)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(MismatchError, match=f"^a hook of the whole {type(model).__name__}, .* on none of its stages: give it"):
        split(model, 2, cuts=cuts)
    handle.remove()
    model.forward = model.forward
    with pytest.raises(MismatchError, match="or a forward put in the place of its own"):
        split(model, 2, cuts=cuts)


def test_stages_are_not_cut_again():
    message = "cuts= and example_args= are for a whole model, but the stages were given"
    with pytest.raises(MismatchError, match=f"{message} as a list"):
        partition.as_cuttable([nn.Linear(2, 2), nn.Linear(2, 2)], ["1"], None, None)
    with pytest.raises(MismatchError, match=f"{message} by number"):
        partition.as_cuttable({1: nn.Linear(2, 2)}, ["1"], None, None)


# -- what travels -------------------------------------------------------------------------------------------------------


def test_values_go_straight_to_the_stages_that_use_them():
    whole = partition.CuttableModel(UNet(), ["down2", "middle", "up2", "up1"])
    stages = whole.cut(whole.choose_cuts(5))
    assert [stage.penstock.destinations for stage in stages] == [(1, 4), (2, 3), (3,), (4,), ()]
    assert [stage.penstock.sources for stage in stages] == [{}, {0: 1}, {1: 1}, {1: 1, 2: 1}, {0: 1, 3: 1}]
    assert "up2" in [node.target for node in stages[3].penstock._nodes[True] if node.op == "call_module"]


def test_a_tied_weight_is_one_parameter_in_every_stage_that_uses_it():
    model = TiedModel(3)
    stages = split(model, 3, cuts=["again", "head"])
    names = [("token.weight", "head.weight"), ("again.weight",), ("head.weight",)]
    assert stages[0].get_parameter(names[0][0]) is stages[1].get_parameter(names[1][0]) is stages[2].get_parameter(names[2][0])


# -- names --------------------------------------------------------------------------------------------------------------


def own(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def test_names_that_are_unique_stay_those_of_the_model():
    assert model_names_of_stages([own("0.weight", "0.bias"), own("2.weight")]) == [
        {"0.weight": "0.weight", "0.bias": "0.bias"},
        {"2.weight": "2.weight"},
    ]


def test_names_that_stand_in_two_stages_get_their_stage_in_front():
    assert model_names_of_stages([own("weight", "bias"), own("weight"), {}]) == [
        {"weight": "0.weight", "bias": "0.bias"},
        {"weight": "1.weight"},
        {},
    ]


def test_names_of_stages_cut_from_one_model_stay_though_a_parameter_stands_in_several():
    assert model_names_of_stages([own("weight", "bias"), own("weight")], is_cut=True) == [own("weight", "bias"), own("weight")]


def test_names_of_modules_cut_apart_are_those_of_the_sequential_they_make():
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    found = model_names_of_stages([partition.state_names_without_compile_prefix(stage) for stage in stages])
    assert [whole for names in found for whole in names.values()] == list(nn.Sequential(*stages).state_dict())


@pytest.mark.costly
def test_what_compile_adds_to_names_is_left_out():
    stage = torch.compile(nn.Sequential(nn.Linear(2, 2)))
    assert partition.state_names_without_compile_prefix(stage) == {
        "_orig_mod.0.weight": "0.weight",
        "_orig_mod.0.bias": "0.bias",
    }


@pytest.mark.slow
def test_a_measured_cut_of_any_model_tells_its_balance():
    whole = partition.CuttableModel(Nested(), example_args=(torch.ones(2, 4),))
    assert whole.depends_on_measurement
    stages = whole.cut(whole.choose_cuts(3))
    assert len(stages) == 3
    assert whole.balance.names == tuple(whole.unit_order)
    assert math.isclose(sum(whole.balance.stage_costs), sum(whole.balance.costs))


def negate_if_positive(self, hidden):
    for linear in self.layers:
        hidden = linear(hidden)
        if hidden.sum() > 0:
            hidden = -hidden
    return hidden


def test_a_forward_that_decides_by_values_is_refused_in_one_sentence_and_nothing_else_is_shown(capfd):
    model = toy(negate_if_positive, "Decides", layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))
    with pytest.raises(MismatchError) as caught:
        partition.split(model, 2, example_args=(torch.ones(2, 3),))
    message = str(caught.value)
    assert message.startswith("cannot export the forward of Decides (")
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


def look_at_values(self, hidden):
    hidden = self.linear(hidden)
    assert torch.isfinite(hidden).all()
    return hidden / 2 if hidden.abs().max().item() > 1e9 else hidden


def test_layers_that_look_at_values_are_told_to_be_cut_without_the_example_and_then_work():
    model = LayerListNet(*[toy(look_at_values, linear=nn.Linear(3, 3)) for _ in range(4)])
    inputs = torch.ones(2, 3)
    for cuts, hint in {
        None: "['layers.2'] alone (a name for each stage but the first; ",
        "layers.1": "['layers.1'] alone (",
    }.items():
        with pytest.raises(MismatchError) as caught:
            split(model, 2, cuts, example_args=(inputs,))
        assert f"or leave out the example and give cuts={hint}its layers are not looked into then)" in str(caught.value)
        stages = split(model, 2, cuts=[str(caught.value).split("cuts=['")[1].split("'")[0]])
        assert torch.equal(partition.run(stages, inputs), model(inputs))


class ReturnsACache(LayerListNet):
    """As a decoder of transformers: it returns an object of its own, unless its configuration says otherwise."""

    def __init__(self):
        super().__init__(*[nn.Linear(3, 3) for _ in range(4)])
        self.config = types.SimpleNamespace(use_cache=True)

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return (hidden, types.SimpleNamespace(keys=hidden)) if self.config.use_cache else (hidden,)


@pytest.mark.costly
def test_a_model_that_returns_a_cache_is_told_which_configuration_asks_for_it():
    model = toy(lambda self, hidden: self.decoder(hidden), decoder=ReturnsACache())
    inputs = torch.ones(2, 3)
    with pytest.raises(MismatchError, match=r"keys and values: set model\.decoder\.config\.use_cache = False before, or"):
        split(model, 2, example_args=(inputs,))
    model.decoder.config.use_cache = False
    assert torch.equal(partition.run(split(model, 2, example_args=(inputs,)), inputs)[0], model(inputs)[0])

    del model.decoder.config
    model.decoder.forward = lambda hidden: types.SimpleNamespace(keys=hidden)
    with pytest.raises(MismatchError, match=r"return tensors, in tuples, lists and dicts, or give"):
        split(model, 2, example_args=(inputs,))
