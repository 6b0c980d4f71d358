"""State as JSON with the tensors aside, and back."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import MismatchError
from penstock.checkpoint.files.packing import pack, unpack

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.costly
@settings(max_examples=200, deadline=None)
@given(values)
def test_whatever_is_packed_comes_back_through_json(value):
    again = unpack(json.loads(json.dumps(pack(value, "it", {}))), {})
    assert again == value
    assert repr(again) == repr(value)  # types too


def test_tensors_among_it_come_back_under_names_of_their_own():
    value = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, "tensor": "a", 3: (torch.ones(()),), "c": Counter({5: 1})}
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(value, "it", tensors)))
    assert sorted(tensors) == ["it.3.0", "it.a.b", "it.a.b+"]
    again = unpack(packed, tensors)
    assert again["a.b"].sum() == 2
    assert again["a"]["b"].sum() == 0
    assert (again["tensor"], type(again["c"])) == ("a", Counter)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", [{"deep": (print,)}]])
def test_what_cannot_be_kept_is_refused_with_its_place(value):
    with pytest.raises(MismatchError, match=r"it(\.0\.deep\.0)? is a builtins\.\w+, which a checkpoint cannot keep"):
        pack(value, "it", {})
