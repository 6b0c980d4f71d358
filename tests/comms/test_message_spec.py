"""What travels between stages arrives as it was: structure, shapes, layout, bits."""

import ctypes
import math
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import penstock as ps
from penstock.comms.transport import message_spec
from penstock.trees import flatten

Pair = namedtuple("Pair", ["left", "right"])


def carried(data: Tensor) -> Tensor:
    """A flat tensor as a network carries it: its bytes, and nothing else of it."""
    arrived = torch.empty(data.shape, dtype=data.dtype)
    ctypes.memmove(arrived.data_ptr(), data.data_ptr(), data.numel() * data.element_size())
    return arrived


def travel(value):
    """`value` sent to another rank, description and data."""
    leaves, tree = flatten(value)
    spec = message_spec.message_spec_of(leaves, tree)
    theirs = message_spec.unpack_spec(message_spec.pack_spec(spec))
    assert theirs == spec
    buffers = [message_spec.empty_tensor(tensor, torch.device("cpu")) for tensor in theirs.parts]
    sent = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.nbytes] or [torch.empty(0, dtype=torch.uint8)]
    for tensor, item, buffer in zip(sent, spec.parts, buffers, strict=True):
        flat, into = message_spec.flat_memory(tensor, item), message_spec.flat_memory(buffer, item)
        assert flat.is_contiguous()
        assert flat.numel() == into.numel() == tensor.numel()
        into.copy_(carried(flat))
    return message_spec.rebuild_message(theirs, buffers, torch.device("cpu"))


def same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad) and torch.equal(
        one, other
    )


TENSORS = {
    "contiguous":      lambda: torch.randn(3, 4),
    "transposed":      lambda: torch.randn(3, 4).t(),
    "permuted":        lambda: torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last":   lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a view inside":   lambda: torch.randn(6, 8)[1:5, 2:7],
    "every other":     lambda: torch.arange(12)[::2],
    "with an offset":  lambda: torch.arange(12)[5:],
    "expanded":        lambda: torch.randn(3, 1).expand(3, 4),
    "expanded number": lambda: torch.tensor(7.0).expand(2, 2),
    "overlapping":     lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "no rows":         lambda: torch.randn(0, 3),
    "no columns":      lambda: torch.randn(3, 0).t(),
    "0-dimensional":   lambda: torch.tensor(3.5),
    "one element":     lambda: torch.randn(1, 1, 1),
    "odd stride of 1": lambda: torch.randn(5, 3)[2:3],
    "bool":            lambda: torch.tensor([True, False, True]),
    "bfloat16":        lambda: torch.randn(5).to(torch.bfloat16),
    "float16":         lambda: torch.randn(5).half(),
    "float64":         lambda: torch.randn(5, dtype=torch.float64),
    "int64":           lambda: torch.tensor([2**62, -1]),
    "uint8":           lambda: torch.tensor([0, 255], dtype=torch.uint8),
    "complex":         lambda: torch.randn(4, dtype=torch.complex64),
    "conjugated":      lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated lazily":  lambda: torch._neg_view(torch.randn(4)),
    "with a gradient": lambda: torch.randn(3, 2, requires_grad=True),
    "of a graph":      lambda: torch.randn(3, 2, requires_grad=True).t() * 2,
}  # fmt: skip


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_arrives_as_it_was(make):
    tensor = make()
    arrived = travel(tensor)
    assert same(arrived, tensor)
    assert arrived.is_leaf


@pytest.mark.parametrize("name", ["contiguous", "transposed", "permuted", "channels last"])
def test_a_dense_layout_is_kept_and_not_copied(name):
    tensor = TENSORS[name]()
    spec = message_spec.message_spec_of(*flatten(tensor))
    assert spec.leaves[0].stride == tensor.stride() == travel(tensor).stride()
    assert message_spec.flat_memory(tensor, spec.leaves[0]).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", ["a view inside", "expanded", "every other"])
def test_memory_that_is_not_dense_is_sent_dense(name):
    tensor = TENSORS[name]()
    spec = message_spec.message_spec_of(*flatten(tensor)).leaves[0]
    assert (
        message_spec.empty_tensor(spec, torch.device("cpu")).untyped_storage().nbytes()
        == tensor.numel() * tensor.element_size()
    )


@pytest.mark.costly
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_tensor_of_any_shape_order_and_step_arrives(shape, data):
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dimension in range(len(shape)):
        step = data.draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dimension + (slice(data.draw(st.integers(0, 1)), None, step),)]
    assert same(travel(tensor), tensor)


def tree_of_everything():
    return {
        "hidden": torch.randn(2, 3, requires_grad=True),
        "rest": (torch.arange(3), [None, torch.tensor(True), ()], {}),
        "pair": Pair(torch.randn(2, 2).t(), Pair(1, "two")),
        "ordered": OrderedDict(z=torch.zeros(0), a=3.5),
        "dtype": torch.float16,
    }


def test_a_tree_arrives_with_its_structure_and_constants():
    value = tree_of_everything()
    arrived = travel(value)
    assert type(arrived["pair"]) is Pair
    assert list(arrived["ordered"]) == ["z", "a"]
    assert (arrived["rest"][1][0], arrived["rest"][1][2], arrived["rest"][2]) == (None, (), {})
    assert (arrived["pair"].right, arrived["ordered"]["a"], arrived["dtype"]) == (Pair(1, "two"), 3.5, torch.float16)
    for ours, theirs in zip(flatten(value)[0], flatten(arrived)[0], strict=True):
        assert same(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("value", [None, 3, "text", (), [], {}, (None, None), {"a": ()}])
def test_a_message_without_tensors_arrives(value):
    arrived = travel(value)
    assert type(arrived) is type(value)
    assert arrived == value


@pytest.mark.parametrize("kind", [tuple, list])
def test_one_tensor_in_a_container_stays_in_it(kind):
    arrived = travel(kind([torch.ones(2)]))
    assert type(arrived) is kind
    assert arrived[0].tolist() == [1, 1]


DIFFERENT = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(3, 2).t(),
    torch.zeros(2, 3, dtype=torch.float64),
    torch.zeros(2, 3, requires_grad=True),
    (torch.zeros(2, 3),),
    [torch.zeros(2, 3)],
    {"x": torch.zeros(2, 3)},
    {"y": torch.zeros(2, 3)},
    (torch.zeros(2, 3), None),
    (torch.zeros(2, 3), 1),
    None,
]


def test_descriptions_are_equal_exactly_for_messages_that_look_alike():
    specs = [message_spec.message_spec_of(*flatten(value)) for value in DIFFERENT]
    again = [message_spec.message_spec_of(*flatten(value)) for value in DIFFERENT]
    for index, spec in enumerate(specs):
        assert [spec == other for other in again] == [index == place for place in range(len(again))]


def test_only_the_tensors_of_a_message_travel():
    spec = message_spec.message_spec_of(*flatten((1, torch.zeros(2), None, torch.zeros(3))))
    assert [tensor.shape for tensor in spec.parts] == [(2,), (3,)]


REFUSED = {
    "a sparse tensor cannot be sent to another stage: return tensor.to_dense(), and make it sparse in the layer": lambda: (
        torch.eye(3).to_sparse()
    ),
    "a nested tensor cannot be sent to another stage: return its values and offsets, and make it nested in": lambda: (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ),
    "an object of class generator cannot be sent to another rank: give tensors, numbers": lambda: iter(x for x in "ab"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_travel_is_told_with_what_to_send_instead(text):
    leaves, tree = flatten((torch.ones(2), REFUSED[text]()))
    with pytest.raises(ps.MismatchError, match=f"^{re.escape(text)}"):
        message_spec.message_spec_of(leaves, tree)


class Image(Tensor):
    """A tensor of a user's class."""


def test_a_tensor_of_a_users_class_arrives_as_a_plain_one_which_is_told_once():
    with pytest.warns(UserWarning, match=r"^a stage returns a tensor of class Image, and the next stage gets the same values"):
        arrived = travel(torch.ones(2).as_subclass(Image))
    assert type(arrived) is Tensor
    assert torch.equal(travel(torch.ones(2).as_subclass(Image)), arrived)  # without a second warning, which would be an error
