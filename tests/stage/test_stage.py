"""What stages may be, and what may pass between them."""

import copy
import dataclasses
import re
from typing import Any, NamedTuple

import pytest
import torch
from error_text import outcome
from models import toy
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, data, gradients, merged, same, stepped
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock.commands.train.setup import token_loss
from penstock.errors import MismatchError
from penstock.stage.stage import Stage

# -- a rank's own slice ---------------------------------------------------------------------------------------------


def rank_slices():
    topology = ps.comms.init_distributed()
    torch.manual_seed(5)
    own = ps.ShardedMLP(12, 7, topology.rank, topology.world_size, classes=3)
    pipe = ps.Pipeline({topology.rank: own}, nn.functional.cross_entropy, microbatches=3)
    inputs, target = data("mlp", 8)
    first, last = topology.get_prev_rank() is None, topology.get_next_rank() is None
    loss = pipe.step(inputs if first else None, target=target if last else None)
    return loss, gradients(pipe.named_parameters()), dict(pipe.state_dict())


@pytest.mark.ranks
def test_slices_built_by_each_rank_train_as_the_monolith_and_only_the_ends_need_the_batch():
    everyone = on_ranks(rank_slices, 3)
    torch.manual_seed(5)
    model = ps.model.mlp(12, 7, classes=3)
    loss = accumulate(model, nn.functional.cross_entropy, data("mlp", 8), 3)
    assert_as_one_process(everyone, (loss, gradients(model.named_parameters()), dict(model.state_dict())))


# -- what passes ----------------------------------------------------------------------------------------------------


class HiddenAndScale(NamedTuple):
    hidden: torch.Tensor
    scale: torch.Tensor


class ToDict(nn.Module):
    """A dict with a tensor not contiguous, integers, None, a number, a scalar tensor, and one nobody uses."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, batch, *, offset):
        hidden = self.linear(batch["x"]) + offset
        return {
            "turned": hidden.t(), "ids": batch["ids"], "nothing": None, "factor": 2, "mask": batch["ids"] > 1,
            "scalar": hidden.mean(), "unused": self.unused(hidden), "half": hidden.to(torch.bfloat16),
        }  # fmt: skip


def structured():
    def to_tuple(self, turned, ids, nothing, factor, mask, scalar, unused, half):
        assert nothing is None
        assert mask.dtype == torch.bool
        hidden = self.linear(turned.t() * factor) + self.embedding(ids) * mask[:, None] + half.float()
        return hidden[:, ::2], HiddenAndScale(hidden.tanh(), scalar)

    def from_tuple(self, every_other, pair):
        return [self.linear(every_other) + pair.hidden[:, :3] * pair.scale, self.only_parameters * 2]

    def add(self, parts):
        return self.linear(parts[0]) + parts[1]

    torch.manual_seed(1)
    second = toy(to_tuple, linear=nn.Linear(12, 12), embedding=nn.Embedding(4, 12))
    third = toy(from_tuple, linear=nn.Linear(6, 3), only_parameters=nn.Parameter(torch.ones(3)))
    return [ToDict(), second, third, toy(add, linear=nn.Linear(3, 3))]


def nested_batch(rows):
    inputs, target = data("mlp", rows)
    return {"x": inputs, "ids": torch.arange(rows) % 4}, {"classes": target, "more": [inputs[:, 0]]}


def nested_loss(output, target):
    return nn.functional.cross_entropy(output, target["classes"]) + (output[:, 0] - target["more"][0]).square().mean()


def run_structured(microbatches):
    first, second, third, last = stages = structured()
    batch, target = nested_batch(7)
    pipe = OneProcess(lambda x, offset: last(third(*second(**first(x, offset=offset)))), nested_loss, None, microbatches)
    return pipe.step(batch, target=target, offset=0.5), gradients(nn.Sequential(*stages).named_parameters())


def rank_structured(schedule):
    pipe = ps.Pipeline(structured(), nested_loss, schedule=schedule, microbatches=3)
    batch, target = nested_batch(7)
    first = pipe.step(batch, target=target, offset=0.5)
    before = gradients(pipe.named_parameters())
    second = pipe.step(batch, target=target, offset=0.5)  # now with everything agreed, receives posted ahead
    return first, before, second


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_tree_of_tensors_numbers_and_none_passes_between_stages(ranks):
    schedule = "1f1b" if ranks == 4 else one_rank_table(4, 3)
    everyone = on_ranks(rank_structured, ranks, schedule)
    loss, grads = run_structured(3)
    for first, _, second in everyone:
        assert torch.equal(first, loss)
        assert torch.equal(second, loss)
    ours = merged([before for _, before, _ in everyone])
    assert ours.keys() == grads.keys()
    for name, expected in grads.items():
        if name.startswith("0.unused"):
            assert expected is None
            assert ours[name] is None or not ours[name].any()
        else:
            assert same(ours[name], expected), name


def one_rank_table(stages, microbatches):
    """All stages on one rank, one microbatch after the other."""
    Action, Kind = ps.schedule.Action, ps.schedule.Kind
    row = []
    for m in range(microbatches):
        row += [Action(Kind.F, s, m) for s in range(stages)] + [Action(Kind.B, s, m) for s in reversed(range(stages))]
    return ps.schedule.from_rows("one after the other", [row], "loop")


# -- what a forward takes -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Unknown:
    """Torch does not know how to take it apart."""

    hidden: torch.Tensor


@dataclasses.dataclass
class Known(Unknown):
    pass


torch.export.register_dataclass(Known)


def gives(kind: Any) -> nn.Module:
    """Gives its output in an object of this kind."""
    return toy(lambda self, *, inputs: kind(hidden=self.linear(inputs)), linear=nn.Linear(12, 12))


TAKES = {
    "a keyword": lambda self, *, hidden: self.linear(hidden),
    "any keyword": lambda self, **values: self.linear(values["hidden"]),
    "a keyword of the batch": lambda self, hidden, *, factor: self.linear(hidden) * factor,
    "an object": lambda self, value: self.linear(value.hidden),
}


def takes(what: str) -> nn.Module:
    return toy(TAKES[what], linear=nn.Linear(12, 3))


class DictOutput(dict):
    """As outputs of the transformers library are: a dict that is made in its own way."""

    def __init__(self, hidden):
        super().__init__(hidden=hidden)


torch.utils._pytree.register_pytree_node(DictOutput, lambda own: ([own["hidden"]], None), lambda values, _: DictOutput(*values))


@pytest.mark.parametrize("recompute", [None, "stage", "block"])
@pytest.mark.parametrize(
    ("kind", "second", "keywords"),
    [
        (dict, "a keyword", {}),
        (dict, "any keyword", {}),
        (DictOutput, "a keyword", {}),
        (DictOutput, "a keyword of the batch", {"factor": torch.arange(7.0)[:, None]}),
        (Known, "an object", {}),
    ],
)
def test_forwards_may_take_keywords_only_and_give_objects_that_torch_takes_apart(kind, second, keywords, recompute):
    torch.manual_seed(2)
    stages = [gives(kind), takes(second)]
    inputs, target = data("mlp", 7)

    def forward(inputs, **own):
        made = stages[0](inputs=inputs)
        return stages[1](made) if second == "an object" else stages[1](**made, **own)

    OneProcess(forward, nn.functional.cross_entropy, None, 2).step(inputs, target=target, **keywords)
    expected = [gradients(stage.named_parameters()) for stage in stages]
    for stage in stages:
        stage.zero_grad()
    loss_fn = nn.functional.cross_entropy
    pipe = ps.Pipeline(stages, loss_fn, "zb-v", 2, topology=ps.Topology(), recompute=recompute)
    pipe.step(inputs=inputs, target=target, **keywords)
    for stage, grads in zip(stages, expected, strict=True):
        assert_same(gradients(stage.named_parameters()), grads)


def test_an_object_that_torch_cannot_take_apart_is_refused_since_its_tensors_would_get_no_gradient():
    pipe = ps.Pipeline([gives(Unknown), takes("an object")], nn.functional.cross_entropy, "zb-v", 2, topology=ps.Topology())
    inputs, target = data("mlp", 7)
    with pytest.raises(MismatchError, match=r"class Unknown.* or call torch.export.register_dataclass\(Unknown\)"):
        pipe.step(inputs=inputs, target=target)


# -- parts that need no gradient, parts that change in place, parts that are shared --------------------------------


def frozen(which):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    for layer in which:
        model[layer].requires_grad_(False)
    return model


FROZEN = ([], [0], [2], [4], [0, 2], [0, 2, 4])


def frozen_steps(pipeline):
    return [
        stepped(pipeline(frozen(which), nn.functional.cross_entropy, "1f1b", 2, cuts=["1", "3"]), [data("mlp", 6)])
        for which in FROZEN
    ]


@pytest.mark.ranks
def test_frozen_parts_and_layers_that_change_their_input_in_place_right_after_a_cut():
    assert_as_one_process(on_ranks(frozen_steps, 3, ps.Pipeline), frozen_steps(OneProcess))


def tied():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17, bias=False)).double()
    model[3].weight = model[0].weight
    return model


def rank_tied_fails(frozen):
    """A step that fails on the first rank as the last of its gradients comes, or is refused there, and a good one."""
    pipe = ps.Pipeline(tied(), token_loss, "1f1b", 2)
    tokens, target = data("gpt", 6)
    fault = pipe.topology.rank == 0
    weight = next(pipe.parameters()).requires_grad_(not (fault and frozen))
    hook = weight.register_hook(FailingHook(2)) if fault and not frozen else None
    message = outcome(lambda: pipe.step(tokens, target=target))
    if hook is not None:
        hook.remove()
    weight.requires_grad_(True)
    pipe.step(tokens, target=target)
    return message, weight.grad


class FailingHook:
    """The hook that fails when it is called for this time."""

    def __init__(self, time):
        self.left = time

    def __call__(self, gradient):
        self.left -= 1
        if not self.left:
            raise ValueError("boom")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("frozen", "words"), [(False, "0B1, .* boom$"), (True, "stage 0 gets 2 gradients for 1 values: freeze")]
)
def test_a_rank_that_fails_at_last_ends_the_step_on_the_others_that_have_its_weight(frozen, words):
    (result, first), (others, last) = on_ranks(rank_tied_fails, 2, frozen)
    assert re.search(words, result)
    assert result == others
    assert torch.equal(first, last)


def rank_where_nothing_counts():
    pipe = ps.Pipeline(tied(), token_loss, "1f1b", 2, loss_weight=lambda target: 0.0)
    tokens, target = data("gpt", 6)
    pipe.step(tokens, target=target)
    of_two_stages = ps.Pipeline(tied(), token_loss, "zb-v", 2)
    model = tied()
    model[1].spare = model[3].spare = nn.Parameter(torch.ones(2))  # in two stages, and used in none
    unused = ps.Pipeline(model, token_loss, "1f1b", 2, cuts=["2"])
    unused.step(tokens, target=target)
    grads = [parameter.grad for parameter in pipe.parameters()]
    grads += [parameter.grad for name, parameter in unused.named_parameters() if "spare" in name]
    return grads, [name for name, _ in of_two_stages.named_parameters()]


@pytest.mark.ranks
def test_a_tied_weight_has_no_gradient_where_nothing_counts_or_uses_it_and_one_name_on_the_rank_of_both_stages():
    (first, names), (last, others) = on_ranks(rank_where_nothing_counts, 2)
    assert first + last == [None] * 6
    assert (names, others) == (["0.weight"], ["1.weight", "1.bias"])


# -- names ----------------------------------------------------------------------------------------------------------


def rank_state(schedule, state):
    model, loss_fn = ps.model.mlp(12, 5, 3), nn.functional.cross_entropy
    pipe = ps.Pipeline(model, loss_fn, schedule=schedule, microbatches=4)
    if state is not None:
        pipe.load_state_dict(state)
    inputs, target = data("mlp", 8)
    return pipe.step(inputs, target=target), pipe.state_dict()


@pytest.mark.ranks
def test_a_state_moves_between_any_number_of_ranks_and_the_uncut_model():
    torch.manual_seed(9)
    model = ps.model.mlp(12, 5, 3)
    loss = accumulate(model, nn.functional.cross_entropy, data("mlp", 8), 4)
    state = model.state_dict()
    for ranks, schedule in ((4, "1f1b"), (2, "gpipe"), (1, "naive")):
        everyone = on_ranks(rank_state, ranks, schedule, state)
        assert all(torch.equal(result[0], loss) for result in everyone)
        state = merged([result[1] for result in everyone])
        assert_same(state, model.state_dict())
    model.load_state_dict(state)


def test_a_state_that_does_not_fit_is_refused_before_anything_is_loaded():
    pipe = ps.Pipeline(ps.model.mlp(12, 3, 3), topology=ps.Topology())
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    wrong = {name: value for name, value in state.items() if name != "2.bias"} | {
        "9.weight": torch.ones(1),
        "0.bias": torch.ones(5),
    }
    with pytest.raises(MismatchError, match=r"1 missing \(2.bias\); 1 unknown \(9.weight\); 1 of another shape \(0.bias\)"):
        pipe.load_state_dict(wrong)
    assert_same(pipe.state_dict(), before)


@pytest.mark.parametrize(
    ("batch", "target", "words"),
    [
        ((torch.ones(4, 12), torch.ones(3, 2)), torch.zeros(4), r"\[0\]\[0\] has shape \(4, 12\), .*\[1\] has shape \(3, 2\)"),
        ((torch.ones(4, 12),), torch.zeros(5).long(), "the batch has 4 rows but the target has 5"),
        ((torch.ones(4, 12),), None, "needs target="),
        ((3,), torch.zeros(4), "the batch has no tensor with rows"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_in_words(batch, target, words):
    pipe = ps.Pipeline(ps.model.mlp(12, 3, 3), nn.functional.cross_entropy, microbatches=2, topology=ps.Topology())
    with pytest.raises(MismatchError, match=words):
        pipe.step(*batch, target=target)
    pipe.step(torch.ones(4, 12), target=torch.zeros(4).long())


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape():
    pipe = ps.Pipeline(ps.model.mlp(12, 3, 3), lambda output, target: output, microbatches=2, topology=ps.Topology())
    with pytest.raises(
        ps.StageError, match=r"loss_fn must return a floating-point scalar tensor, got torch.float32 of shape \(2, 3\)"
    ):
        pipe.step(torch.ones(4, 12), target=torch.zeros(4).long())


@pytest.mark.parametrize("split", [False, True])
def test_what_a_microbatch_gives_back_is_not_changed_by_the_next_one(split):
    """A view of the gradient of what a layer adds is that of what it adds it to."""
    adds_places = toy(lambda self, hidden: torch.tanh(hidden + self.places.unsqueeze(0)), places=(4, 6))
    stage = Stage(1, adds_places, torch.device("cpu"))
    stage.begin_step()
    given = []
    for microbatch in range(2):
        output = stage.forward(microbatch, [torch.randn(1, 4, 6).requires_grad_()], split_backward=split)
        [[gradient]] = stage.backward(microbatch, [torch.ones_like(output)])
        given.append((gradient, gradient.clone()))
        if split:
            stage.backward_weight(microbatch)
    assert all(torch.equal(gradient, before) for gradient, before in given)


def test_what_a_weight_is_owed_is_not_changed_by_a_sum_that_begins_with_a_view_of_it():
    def forward(self, hidden):  # the weight of the product is owed the gradient of all three terms
        return torch.tanh(hidden + self.places.unsqueeze(0) + self.linear(hidden))

    module = toy(forward, places=nn.Parameter(torch.zeros(64, 64)), linear=nn.Linear(64, 64))
    stage, alone = Stage(1, module, torch.device("cpu"), in_order=True), copy.deepcopy(module)
    batch = torch.randn(3, 1, 64, 64)
    for value in batch:
        alone(value).sum().backward()
    for _ in range(2):  # from the second step on small gradients reach their parameters in I
        module.zero_grad()
        stage.begin_step()
        for microbatch, value in enumerate(batch):
            output = stage.forward(microbatch, [value.clone().requires_grad_()], split_backward=True)
            stage.backward(microbatch, [torch.ones_like(output)])
        for microbatch in range(3):
            stage.backward_weight(microbatch, is_last=microbatch == 2)
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Remembers(nn.Module):
    """Gives what it remembers, which the next microbatch changes in place, or a part of that."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.register_buffer("sum", torch.zeros(3, 2))

    def forward(self, hidden):
        self.sum += 1
        return hidden, self.sum[:2] if self.part else self.sum


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_buffer_that_a_stage_gives_is_as_it_was_when_the_next_microbatch_changes_it(part, training):
    stage = Stage(0, Remembers(part), torch.device("cpu"))
    for step in range(2):
        stage.begin_step()
        given = [stage.forward(microbatch, [(torch.ones(1),), {}], with_backward=training)[1] for microbatch in range(3)]
        assert [value.unique().item() for value in given] == [3 * step + 1, 3 * step + 2, 3 * step + 3]
