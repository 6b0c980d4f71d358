"""Microbatches: how a batch is cut, weighed and joined."""

import math
import warnings
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from penstock import MismatchError
from penstock.batch.pieces import (
    batch_signature,
    check_output_rows,
    count_rows,
    join,
    loss_shares,
    microbatch_weights,
    nonempty_split_sizes,
    split,
    split_sizes,
)
from penstock.rows import Replicated, Rows

Pair = namedtuple("Pair", ["left", "right"])


def equal(one, other) -> bool:
    """Whether two trees have the same structure, types, dtypes and bits."""
    (ours, tree), (theirs, other_tree) = tree_flatten(one), tree_flatten(other)
    same = (
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )
    return tree == other_tree and all(same)


# ---- sizes

SIZES = [
    # rows pieces  rows of each piece
    (8,    4,      [2, 2, 2, 2]),
    (5,    2,      [3, 2]),
    (7,    3,      [3, 2, 2]),
    (2,    4,      [1, 1, 0, 0]),
    (0,    2,      [0, 0]),
    (3,    1,      [3]),
]  # fmt: skip


@pytest.mark.parametrize(("count", "pieces", "expected"), SIZES)
def test_pieces_are_as_equal_as_can_be_the_larger_first(count, pieces, expected):
    assert split_sizes(count, pieces) == expected


SAMPLES = [
    # rows samples' rows  microbatches  rows of each
    (20,   2,             4,            [6, 6, 4, 4]),
    (6,    2,             4,            [2, 2, 2]),
    (6,    3,             1,            [6]),
    (5,    1,             2,            [3, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "rows_per_sample", "microbatches", "expected"), SAMPLES)
def test_a_batch_is_cut_between_samples(rows, rows_per_sample, microbatches, expected):
    assert nonempty_split_sizes(torch.zeros(rows), "the batch", microbatches, 0, rows_per_sample) == expected


@given(st.integers(0, 300), st.integers(1, 40))
@settings(deadline=None)
def test_no_row_is_lost_and_pieces_differ_by_one_at_most(count, pieces):
    found = split_sizes(count, pieces)
    assert (len(found), sum(found)) == (pieces, count)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


# ---- rows


def test_rows_are_the_first_dimension_that_all_tensors_share():
    batch = {"x": torch.zeros(6, 2), "more": (torch.zeros(6), [torch.zeros(6, 1, 3)]), "flag": True}
    assert count_rows(batch) == 6


def test_a_batch_without_a_tensor_that_has_rows_has_none():
    assert count_rows(None) is None
    assert count_rows({"temperature": torch.tensor(0.5), "name": "x", "none": None}) is None
    assert count_rows(()) is None


def test_zero_rows_are_not_the_same_as_none():
    assert count_rows(torch.zeros(0, 3)) == 0


LAYOUTS = (
    "give Pipeline(.., rows_dim=) if they are another one in all tensors, ps.Rows(tensor, dim) if in one, "
    "ps.Replicated(tensor) for a tensor without rows"
)


def test_tensors_of_different_rows_are_told_by_their_shapes_with_what_to_do():
    batch = {"x": torch.zeros(4, 2), "deep": [torch.zeros(5), torch.zeros(4)]}
    with pytest.raises(MismatchError) as caught:
        count_rows(batch, what="target")
    assert str(caught.value) == (
        "the tensors of a batch must have the same number of rows: target['x'] has shape (4, 2), target['deep'][0] has shape "
        f"(5,); rows are the first dimension: {LAYOUTS}"
    )


def test_a_tensor_without_the_dimension_of_the_rows_is_told():
    with pytest.raises(MismatchError) as caught:
        count_rows([torch.zeros(5, 4), torch.zeros(4)], rows_dim=1)
    assert str(caught.value) == (
        "the tensors of a batch must have the same number of rows: batch[0] has shape (5, 4), batch[1] has shape (4,);"
        f" rows are dimension 1 (rows_dim=1): {LAYOUTS}"
    )


def test_a_wrapper_says_where_the_rows_of_its_tensor_are():
    batch = [torch.zeros(5, 4), Rows(torch.zeros(4), 0), Rows(torch.zeros(2, 3, 4), -1), Replicated(torch.zeros(7, 7))]
    assert count_rows(batch, rows_dim=1) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rows(torch.zeros(3, 4), 2), "Rows(tensor, 2): a tensor of shape (3, 4) does not have that dimension"),
        (lambda: Rows([1], 0), "Rows takes a tensor, not a list: wrap the tensors inside"),
        (lambda: Replicated(None), "Replicated takes a tensor, not a NoneType: wrap the tensors inside"),
    ],
)
def test_what_a_wrapper_cannot_take_is_refused(make, message):
    with pytest.raises(MismatchError) as caught:
        make()
    assert str(caught.value) == message


# ---- split and join


def test_pieces_are_views_in_order():
    batch = torch.arange(10).view(5, 2)
    first, second = split(batch, [3, 2])
    assert first.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second.tolist() == [[6, 7], [8, 9]]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_what_has_no_rows_belongs_to_every_piece():
    scale = torch.tensor(2.0)
    pieces = split({"x": torch.arange(3), "scale": scale, "mode": "train", "mask": None}, [2, 1])
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2]]
    for piece in pieces:
        assert piece["scale"] is scale
        assert (piece["mode"], piece["mask"]) == ("train", None)


def test_rows_in_another_dimension_are_cut_and_joined_there_in_pieces_that_are_contiguous():
    batch = {"frames": torch.randn(3, 7, 2), "labels": Rows(torch.arange(7), 0), "table": Replicated(torch.randn(1, 3))}
    pieces = split(batch, [3, 2, 2], rows_dim=1)
    expected = batch["frames"].split([3, 2, 2], 1)
    assert all(torch.equal(piece["frames"], frames) for piece, frames in zip(pieces, expected, strict=True))
    assert all(piece["frames"].is_contiguous() for piece in pieces)
    assert [piece["labels"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4], [5, 6]]
    assert all(piece["table"] is batch["table"].tensor for piece in pieces)
    assert torch.equal(join([piece["frames"] for piece in pieces], 1), batch["frames"])


def test_an_output_that_does_not_have_the_rows_where_outputs_are_joined_is_refused():
    check_output_rows({"logits": torch.zeros(4, 3), "flat": torch.zeros(8, 3), "loss": torch.tensor(1.0)}, 4, 0)
    check_output_rows(torch.zeros(5, 4, 3), 4, 1)
    for output, rows_dim, where in (
        ((torch.zeros(4), torch.zeros(6, 4)), 0, "the first dimension, but output[1] of shape (6, 4)"),
        (torch.zeros(4, 8), 1, "dimension 1 (rows_dim=1), but output of shape (4, 8)"),
        (torch.zeros(4), 1, "dimension 1 (rows_dim=1), but output of shape (4,)"),
    ):
        with pytest.raises(MismatchError) as caught:
            check_output_rows(output, 4, rows_dim)
        assert str(caught.value) == (
            f"outputs are joined along {where} does not have the microbatch's 4 rows there: give Pipeline(.., rows_dim=) the "
            "dimension that has them, or do not return it"
        )


def test_the_signature_of_a_batch_tells_how_its_tensors_are_cut():
    one, two = torch.zeros(4, 4), torch.zeros(4, 4)
    found = {batch_signature([one, value]) for value in (two, Rows(two, 0), Rows(two, 1), Replicated(two))}
    assert len(found) == 4


def test_a_piece_may_have_no_rows():
    assert [piece.shape for piece in split(torch.zeros(1, 4), [1, 0, 0])] == [(1, 4), (0, 4), (0, 4)]


TREES = [
    torch.arange(7.0),
    (torch.arange(7), torch.randn(7, 2)),
    {"a": torch.randn(7, 3), "b": [torch.arange(7), {"c": torch.zeros(7, 1, 1, dtype=torch.bool)}], "n": None, "k": 3},
    Pair(torch.randn(7), (torch.randn(7, 2).to(torch.bfloat16), "text")),
    torch.randn(3, 7).t(),
]


@pytest.mark.parametrize("batch", TREES)
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_what_is_split_is_joined_again(batch, pieces):
    assert equal(join(split(batch, split_sizes(7, pieces))), batch)


def test_zero_dimensional_outputs_are_stacked():
    assert join([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]


def test_outputs_join_in_the_order_of_their_pieces():
    joined = join([{"y": torch.tensor([0, 1]), "n": "a"}, {"y": torch.tensor([2]), "n": "b"}])
    assert joined["y"].tolist() == [0, 1, 2]
    assert joined["n"] == "a"


# ---- weights


def test_pieces_weigh_their_share_of_the_rows():
    assert loss_shares([3, 2], 5) == [3 / 5, 2 / 5]
    assert loss_shares([1, 1, 1, 0], 3) == [1 / 3, 1 / 3, 1 / 3, 0]
    assert loss_shares([3, 2], 10) == [3 / 10, 2 / 10]  # other replicas have the rest


def test_weighted_means_of_uneven_pieces_are_the_mean_of_the_batch():
    batch = torch.randn(11, dtype=torch.float64)
    pieces = split_sizes(11, 4)
    means = [piece.mean() for piece in split(batch, pieces)]
    total = sum(weight * mean for weight, mean in zip(loss_shares(pieces, 11), means, strict=True))
    assert math.isclose(total, batch.mean(), rel_tol=1e-12)


def test_weights_count_the_tokens_that_are_not_ignored():
    target = torch.tensor([[1, 2, -100], [-100, -100, -100], [3, -100, -100]])
    pieces = split(target, [1, 1, 1])
    assert microbatch_weights(pieces, lambda piece: (piece != -100).sum()) == [2, 0, 1]


def test_a_loss_weight_sees_each_piece_of_the_target_in_turn():
    seen = []
    microbatch_weights(["a", "b"], lambda target: seen.append(target) or 1)
    assert seen == ["a", "b"]


def test_when_nothing_counts_every_weight_is_zero():
    assert loss_shares([0, 0, 0], 0) == [0, 0, 0]


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), torch.tensor(-0.5)])
def test_a_weight_that_is_no_share_is_refused_with_its_piece(count):
    result = iter([1, 1, count])
    with pytest.raises(MismatchError) as caught:
        microbatch_weights([None] * 3, lambda target: next(result))
    assert str(caught.value) == f"loss_weight is {float(count)} for microbatch 2: it must be a finite number, 0 or more"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
@settings(deadline=None)
def test_weights_sum_to_one_unless_nothing_counts(counted):
    found = loss_shares(counted, sum(counted))
    assert math.isclose(sum(found), 1 if any(counted) else 0, rel_tol=1e-12)
    assert [weight == 0 for weight in found] == [count == 0 for count in counted]


def test_an_output_that_may_have_its_rows_first_is_warned_about():
    with pytest.warns(UserWarning, match=r"output\['classes'\] of shape \(4, 4\) is joined along dimension 1"):
        check_output_rows({"classes": torch.zeros(4, 4), "hidden": torch.zeros(5, 4, 3)}, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_output_rows(torch.zeros(4, 4), 4, 0)
