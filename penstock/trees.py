"""Trees of tensors: tuples, lists, dicts, classes that torch can take apart. A bare tensor, the common case, is quick."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_BARE_TENSOR = tree_flatten(torch.empty(0))[1]


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of `tree` and its structure.

    Raises MismatchError for an object that torch cannot take apart, with tensors inside that require a gradient.
    """
    if isinstance(tree, Tensor):
        return [tree], _BARE_TENSOR
    flat, structure = tree_flatten(tree)
    for leaf in flat:
        attributes = () if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, Tensor) and value.requires_grad for value in attributes):
            name = type(leaf).__name__
            raise MismatchError(
                f"no gradient would reach the tensors in an object of class {name}, which torch cannot take apart: give a tuple"
                f" or dict, or call torch.export.register_dataclass({name}) on every rank"
            )
    return flat, structure


def unflatten(flat: Sequence[Any], structure: TreeSpec) -> Any:
    """Return a tree of this structure with the leaves `flat`."""
    return flat[0] if structure.is_leaf() else tree_unflatten(flat, structure)


def leaves(tree: Any) -> Sequence[Any]:
    """Return the leaves of `tree`, of any type, in torch's order."""
    if isinstance(tree, Tensor):
        return (tree,)
    if type(tree) in (tuple, list, dict):  # a tenth of the time that `tree_leaves` takes
        return [leaf for part in (tree.values() if type(tree) is dict else tree) for leaf in leaves(part)]
    return tree_leaves(tree)


def tensors(tree: Any) -> list[Tensor]:
    """Return the leaves of `tree` that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function(tensor)` in the place of each tensor."""
    return function(tree) if isinstance(tree, Tensor) else tree_map_only(Tensor, function, tree)
