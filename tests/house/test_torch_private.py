"""The door to torch's private parts: what each function needs of torch is there, and does what it is used for."""

import torch
from torch import nn

from penstock import torch_private

# ---- trees of values


def test_trees_are_taken_apart_and_put_together():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves == torch_private.tree_leaves(tree)
    assert torch_private.tree_unflatten(leaves, spec) == tree
    assert torch_private.tree_map(str, [1, 2]) == ["1", "2"]
    assert torch_private.tree_map_only(int, lambda leaf: leaf + 1, {"a": [1, "x"]}) == {"a": [2, "x"]}
    assert not spec.is_leaf()


# ---- modules and tensors


def test_a_tensor_slot_is_every_place_of_a_parameter_or_buffer():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert [slot.name for slot in torch_private.parameter_slots(model)] == ["0.weight", "2.weight", "2.bias"]
    slots = torch_private.tensor_slots(model)
    assert [slot.name for slot in slots[3:]] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert all(getattr(slot.owner, slot.key) is slot.tensor for slot in slots)
    assert [slot.name for slot in torch_private.tensor_slots(model[2])] == ["weight", "bias"]


def test_any_tensor_can_be_put_in_a_parameters_place_and_the_parameter_back():
    model = nn.Linear(2, 2)
    weight, instead = model.weight, torch.ones(2, 2)
    slot = torch_private.parameter_slots(model)[0]
    slot.put(instead)
    assert model.weight is instead
    slot.put(slot.tensor)
    assert model.weight is weight


def test_layers_have_all_their_names():
    layer = nn.Linear(2, 2)
    assert list(torch_private.layers_of(nn.Sequential(layer, nn.ReLU(), layer))) == ["0", "1", "2"]


def test_which_buffers_are_saved():
    module = nn.Module()
    module.register_buffer("a", torch.ones(1))
    module.register_buffer("b", torch.ones(1), persistent=False)
    assert torch_private.is_saved(module, "a")
    assert not torch_private.is_saved(module, "b")


def test_memory_is_swapped_under_tensors_that_others_know():
    parameter, other = nn.Parameter(torch.empty(2, device="meta")), torch.ones(2, requires_grad=True)
    end = torch.autograd.graph.get_gradient_edge(parameter)
    torch_private.swap_memory(parameter, other)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.tolist() == [1, 1]
    assert other.is_meta
    assert end is not None


def test_views_of_one_memory_have_its_key():
    tensor, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert torch_private.storage_key(tensor) == torch_private.storage_key(tensor[1:])
    assert torch_private.storage_key(tensor) != torch_private.storage_key(other)
