"""Values of one stage's output that share memory: the stages after it may read them, but change none of them in place."""

import pytest
import torch
from models import toy
from runners import on_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import penstock as ps
from penstock.errors import MismatchError
from penstock.stage.aliasing import AliasedMessage, mark_aliased
from penstock.stage.backward.autograd_edges import detach_for_next_stage
from penstock.stage.stage import Stage

TOLD = r"stage \d changes in place a value of shape \(\d, \d\) that shares memory with another one, .* clone one of them"


def does(act):
    """What `act` does with what the stage before gave."""
    return toy(lambda self, *values: act(*values))


def apart(value):
    """As another rank receives it."""
    return detach_for_next_stage(
        tree_map_only(Tensor, lambda value: value.detach().clone().requires_grad_(value.requires_grad), value)
    )


def through(carry, acts, keep=True, recompute=None, trained=True):
    """What the last of some stages makes, each given by `carry` what the one before made."""
    value = (torch.full((2, 4), 3.0, requires_grad=trained) * 1,), {}
    for index, act in enumerate(acts):
        stage = Stage(index, does(act), torch.device("cpu"), recompute=recompute)
        stage.begin_step()
        value = carry(stage.forward(0, [value] if index else value, with_backward=keep))
    return value


SHARED = {
    "a tensor and a view of it": lambda x: (x, x[:, :2]),
    "the same tensor twice":     lambda x: (x, x),
    "views that meet":           lambda x: (x[:, :3], x[:, 2:]),
    "another shape":             lambda x: (x.t(), x.view(-1)[3:5].view(1, 2)),
    "another dtype":             lambda x: (x, x.detach().view(torch.int64)),
}  # fmt: skip
BETWEEN = {
    "nothing":   [],
    "a stage":   [lambda *values: values],
    "its order": [lambda one, other: (other, one[0] + 1, one[:1])],
}  # fmt: skip


@pytest.mark.parametrize("carry", [apart, detach_for_next_stage])
@pytest.mark.parametrize("options", [{}, {"keep": False}, {"recompute": "stage"}, {"trained": False}], ids=str)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
def test_a_value_that_shares_memory_with_another_is_not_changed_in_place_by_a_later_stage(carry, make, between, options):
    for changed in (0, -1):
        with pytest.raises(MismatchError, match=TOLD):
            through(carry, [make, *between, lambda *values, place=changed: values[place].mul_(2)], **options)


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
def test_values_that_share_memory_come_as_they_are_where_they_are_only_read(make):
    made = through(apart, [make, lambda *values: values, lambda *values: [value * 1 for value in values]])
    expected = make(torch.full((2, 4), 3.0))
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


APART = {
    "columns side by side": lambda x: x.chunk(2, 1),
    "rows":                 lambda x: x.split(1),
    "every other":          lambda x: (x[:, ::2], x[:, 1::2]),
    "a clone":              lambda x: (x, x[:, :2].clone()),
    "nothing of it":        lambda x: (x, x[:, :0]),
    "one value":            lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("make", APART.values(), ids=APART.keys())
def test_values_without_memory_in_common_may_be_changed_in_place(make):
    assert (through(apart, [make, lambda *values: values[0].mul_(2)]) == 6).all()


def test_the_last_stage_that_takes_a_value_may_change_it_in_place():
    value = torch.ones(2, 3)
    first, nothing, last = mark_aliased([value, (), value[0]], ())
    assert type(first) is AliasedMessage
    assert first.leaf_numbers == [0]
    assert nothing == ()
    assert type(last) is Tensor


def late():
    """A view is used after an activation has changed what it is a view of."""

    def forward(self, batch):
        hidden = self.first(batch)
        left = hidden[:, :2]
        return self.last(self.act(hidden)) + left

    return toy(forward, first=nn.Linear(4, 4), act=nn.SiLU(inplace=True), last=nn.Linear(4, 2))


def listed():
    linear = nn.Linear(4, 2)
    return [
        does(lambda x: (linear(x), x[:2], x)),
        does(lambda *values: values),
        does(lambda made, _, x: made + x.mul_(2)[:, :2]),
    ]


def rank_shared():
    """What steps and evaluations come to, where a view goes along with the value, and where it goes past the stage between."""
    results, batch = [], torch.ones(4, 4)
    for make, cuts in ((late, ["act", "last"]), (listed, None)):
        pipe = ps.Pipeline(make(), nn.functional.mse_loss, "1f1b", 2, cuts=cuts)
        for call in (pipe.step, pipe.step, pipe.eval):
            try:
                results.append(f"{call(batch, target=batch[:, :2])}")
            except MismatchError as error:
                results.append(str(error))
    return results


@pytest.mark.ranks
def test_a_cut_model_whose_views_would_not_change_with_a_value_is_refused_on_all_ranks():
    for result in on_ranks(rank_shared, 3):
        assert all("stage 1 changes in place a value of shape (2, 4)" in value for value in result[:3])
        assert all("stage 2 changes in place a value of shape (2, 4)" in value for value in result[3:])


def rank_renormalised():
    """What two ranks are told whose first stage renormalises the embedding that is the last one's matrix too."""
    results, tokens = [], torch.arange(8).view(4, 2)
    for schedule in ("1f1b", "zb-v"):  # the last stage is on another rank, or on the same
        model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8))
        model[3].weight = model[0].weight
        pipe = ps.Pipeline(model, lambda output, target: output.sum(), schedule, 2)
        for call in (pipe.step, pipe.eval):
            with pytest.raises(MismatchError) as caught:
                call(tokens, target=tokens)
            results.append(str(caught.value))
    return results


@pytest.mark.ranks
def test_a_forward_that_changes_in_place_a_parameter_of_several_stages_is_refused_on_all_ranks():
    for result in on_ranks(rank_renormalised, 2):
        assert all(
            "stage 0 changes in place a parameter of shape (8, 4) that another stage has too" in value for value in result
        )
