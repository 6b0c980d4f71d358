"""Cuts of a model: every layer once and in order, as even as can be, or where they were asked for."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock import MismatchError
from penstock.partition import balanced, names_of, split


def layers_of(stages: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [named for stage in stages for named in stage.named_children()]


def named(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    return model


# ---- without cuts


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
    expected = model(inputs)
    for stages in range(1, 6):
        hidden = inputs
        for stage in split(model, stages):
            hidden = stage(hidden)
        assert torch.equal(hidden, expected)


def test_parameters_decide_where_an_uneven_model_is_cut():
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert [[name for name, _ in stage.named_children()] for stage in split(model, 2)] == [["0"], ["1", "2", "3", "4"]]


def sum_of_squares(costs: list[int], starts: tuple[int, ...]) -> int:
    return sum(sum(costs[start:end]) ** 2 for start, end in zip(starts, [*starts[1:], len(costs)], strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_balanced_is_the_best_of_all_cuts(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    every = [(0, *cuts) for cuts in combinations(range(1, len(costs)), parts - 1)]
    found = balanced(costs, parts)
    assert tuple(found) in every
    assert sum_of_squares(costs, tuple(found)) == min(sum_of_squares(costs, starts) for starts in every)


BALANCED = [
    # costs                parts  starts
    ([1, 1, 1, 1],           2,   [0, 2]),
    ([1, 1, 1, 1, 1],        2,   [0, 3]),  # a tie: the earlier part is the longer
    ([1, 1, 1, 1, 1],        3,   [0, 2, 4]),
    ([9, 1, 1, 1],           2,   [0, 1]),
    ([1, 1, 1, 9],           2,   [0, 3]),
    ([5],                    1,   [0]),
    ([0, 0, 0],              3,   [0, 1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("costs", "parts", "starts"), BALANCED)
def test_parts_are_balanced(costs, parts, starts):
    assert balanced(costs, parts) == starts


# ---- with cuts


@pytest.mark.parametrize("cuts", [("b",), ("c",), ("b", "d"), ("b", "c", "d"), ()])
def test_a_cut_names_the_first_layer_of_the_stage_behind_it(cuts):
    stages = split(named("a", "b", "c", "d"), len(cuts) + 1, cuts=cuts)
    assert [name for name, _ in layers_of(stages)] == ["a", "b", "c", "d"]
    assert tuple(next(stage.named_children())[0] for stage in stages) == ("a", *cuts)


WRONG_CUTS = [
    (("x",),      "cannot cut before 'x': the layers are a, b, c"),
    (("b",),      "cuts ['b'] do not make 3 stages: name 2 layers after the first, in order"),
    (("c", "b"),  "cuts ['c', 'b'] do not make 3 stages: name 2 layers after the first, in order"),
    (("b", "b"),  "cuts ['b', 'b'] do not make 3 stages: name 2 layers after the first, in order"),
    (("a", "b"),  "cuts ['a', 'b'] do not make 3 stages: name 2 layers after the first, in order"),
]  # fmt: skip


@pytest.mark.parametrize(("cuts", "told"), WRONG_CUTS)
def test_wrong_cuts_are_told(cuts, told):
    with pytest.raises(MismatchError) as caught:
        split(named("a", "b", "c"), 3, cuts=cuts)
    assert str(caught.value) == told


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_a_number_of_stages_that_the_layers_cannot_make_is_told(stages):
    with pytest.raises(MismatchError, match=f"cannot cut 3 layers into {stages} stages: use 1 to 3 stages"):
        split(named("a", "b", "c"), stages)


def test_only_a_sequential_can_be_cut():
    with pytest.raises(MismatchError, match=r"cannot cut a Linear: give an nn.Sequential, or a list"):
        split(nn.Linear(2, 2), 1)


# ---- names


def test_names_that_are_unique_stay_those_of_the_model():
    assert names_of([["0.weight", "0.bias"], ["2.weight"]]) == [
        {"0.weight": "0.weight", "0.bias": "0.bias"},
        {"2.weight": "2.weight"},
    ]


def test_names_that_stand_in_two_stages_get_their_stage_in_front():
    assert names_of([["weight", "bias"], ["weight"], []]) == [
        {"weight": "0.weight", "bias": "0.bias"},
        {"weight": "1.weight"},
        {},
    ]


def test_names_of_modules_cut_apart_are_those_of_the_sequential_they_make():
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    found = names_of([list(stage.state_dict()) for stage in stages])
    assert [whole for names in found for whole in names.values()] == list(nn.Sequential(*stages).state_dict())
