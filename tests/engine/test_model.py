"""The reference models: slices that are the monolith, and a GPT that can be cut anywhere."""

import pytest
import torch
from torch import nn

from penstock import MismatchError, ShardedMLP
from penstock.model import GPT, GPTConfig, mlp
from penstock.partition import split


def seeded(make, seed: int = 5):
    torch.manual_seed(seed)
    return make()


def chained(stages, hidden: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        hidden = stage(hidden)
    return hidden


def same_weights(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- ShardedMLP

SLICES = [(layers, world) for layers in (5, 7, 16) for world in range(1, 6)]


@pytest.mark.parametrize(("layers", "world"), SLICES)
def test_the_slices_together_have_the_names_and_weights_of_the_monolith(layers, world):
    whole = seeded(lambda: mlp(6, layers, classes=3))
    slices = [seeded(lambda: ShardedMLP(6, layers, rank, world, classes=3)) for rank in range(world)]  # noqa: B023
    names = [name for value in slices for name in value.state_dict()]
    assert names == list(whole.state_dict())
    together = {name: value for item in slices for name, value in item.state_dict().items()}
    assert same_weights(together, whole.state_dict())


@pytest.mark.parametrize(("layers", "world"), SLICES)
def test_the_slices_one_after_the_other_compute_what_the_monolith_does(layers, world):
    whole = seeded(lambda: mlp(6, layers, classes=3))
    slices = [seeded(lambda: ShardedMLP(6, layers, rank, world, classes=3)) for rank in range(world)]  # noqa: B023
    inputs = torch.randn(4, 6)
    assert torch.equal(chained(slices, inputs), whole(inputs))


def test_layers_that_do_not_divide_go_to_the_first_ranks():
    linears = [sum(isinstance(layer, nn.Linear) for layer in ShardedMLP(4, 16, rank, 5).children()) for rank in range(5)]
    assert linears == [4, 3, 3, 3, 3 + 1]  # the last has the head


def test_a_slice_holds_nothing_of_the_others():
    assert sum(p.numel() for p in ShardedMLP(10, 16, 1, 4).parameters()) == 4 * (10 * 10 + 10)


def test_hidden_layers_keep_the_width_and_the_head_has_the_classes():
    assert ShardedMLP(8, 16, 0, 2)(torch.randn(3, 8)).shape == (3, 8)
    assert ShardedMLP(8, 16, 1, 2, classes=5)(torch.randn(3, 8)).shape == (3, 5)
    assert ShardedMLP(8)(torch.randn(3, 8)).shape == (3, 2)


def test_every_slice_leaves_the_generator_in_the_same_state():
    after = [seeded(lambda: (ShardedMLP(4, 8, rank, 4), torch.rand(1))[1]) for rank in range(4)]  # noqa: B023
    assert len({value.item() for value in after}) == 1


@pytest.mark.parametrize(("rank", "world", "layers"), [(2, 2, 16), (-1, 2, 16), (0, 0, 16), (0, 4, 3)])
def test_a_slice_that_cannot_be_is_refused(rank, world, layers):
    with pytest.raises(MismatchError, match=f"no slice {rank} of {world}: .* at most one for each of {layers} layers"):
        ShardedMLP(4, layers, rank, world)


@pytest.mark.parametrize(("dim", "layers", "classes"), [(0, 4, 2), (4, 0, 2), (4, 4, 0), (-1, 4, 2)])
def test_an_mlp_of_nothing_is_refused(dim, layers, classes):
    with pytest.raises(MismatchError, match=f"layers and classes of 1 or more, got {dim}, {layers} and {classes}"):
        mlp(dim, layers, classes)


# ---- two models

MAKERS = {
    "mlp": lambda: mlp(4, 3),
    "ShardedMLP": lambda: ShardedMLP(4, 3),
    "GPT": lambda: GPT(GPTConfig(vocabulary=11, context=8, width=8, layers=2, heads=2)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_the_seed_decides_the_weights_and_two_models_in_a_row_differ(make):
    first, second = seeded(lambda: (make(), make()))
    assert not any(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True) if varied(p))
    assert same_weights(seeded(make).state_dict(), first.state_dict())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_no_two_layers_of_a_model_are_alike(make):
    weights = [p.flatten()[:8] for p in seeded(make).parameters() if varied(p)]
    assert not any(torch.equal(p, q) for i, p in enumerate(weights) for q in weights[:i] if p.shape == q.shape)


def varied(parameter: torch.Tensor) -> bool:
    """Whether it was drawn at random, not set to one number."""
    return bool((parameter != parameter.flatten()[0]).any())


# ---- GPT

CONFIG = GPTConfig(vocabulary=13, context=10, width=16, layers=3, heads=4)


@pytest.fixture
def gpt():
    return seeded(lambda: GPT(CONFIG)).eval()


@pytest.fixture
def tokens():
    return seeded(lambda: torch.randint(13, (2, 10)))


def test_a_gpt_gives_logits_for_every_token(gpt, tokens):
    assert gpt(tokens).shape == (2, 10, 13)
    assert gpt(tokens[:, :4]).shape == (2, 4, 13)
    assert [name for name, _ in gpt.named_children()] == ["embedding", "block0", "block1", "block2", "norm", "head"]


def test_a_later_token_changes_no_earlier_logit(gpt, tokens):
    before = gpt(tokens)
    for time in range(10):
        changed = tokens.clone()
        changed[:, time] = (changed[:, time] + 1) % 13
        after = gpt(changed)
        assert torch.equal(after[:, :time], before[:, :time])
        assert not torch.equal(after[:, time], before[:, time])


def test_an_earlier_token_changes_the_later_logits(gpt, tokens):
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 13
    assert (gpt(changed) != gpt(tokens)).any(dim=-1).all()


@pytest.mark.parametrize("stages", range(1, 7))
def test_any_cut_of_a_gpt_gives_the_same_output(gpt, tokens, stages):
    assert torch.equal(chained(split(gpt, stages), tokens), gpt(tokens))


def test_dropout_acts_in_training_only():
    gpt = seeded(lambda: GPT(GPTConfig(vocabulary=13, context=10, width=16, layers=1, heads=2, dropout=0.5)))
    tokens = torch.arange(10)[None]
    assert not torch.equal(gpt(tokens), gpt(tokens))
    assert torch.equal(gpt.eval()(tokens), gpt(tokens))


def test_a_width_that_does_not_divide_by_the_heads_is_refused():
    with pytest.raises(MismatchError, match="width 10 does not divide by 4 heads"):
        GPT(GPTConfig(width=10, heads=4))
