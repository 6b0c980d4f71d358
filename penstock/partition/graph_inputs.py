"""What goes into a model that was cut along its graph: the arguments of its forward, and whether the graph holds for them."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.torch_private import TreeSpec, compile_guard, tree_flatten


class TensorSpec(NamedTuple):
    """A tensor of the example. A size of None may be any; except for rows none may be 1, which `torch.export` rules out."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    rows_dim: int | None = 0

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(self._size, range(len(self.sizes))))})"

    def _size(self, place: int) -> str:
        size = self.sizes[place]
        return str(size) if size is not None else "any" if place == self.rows_dim else "2 or more"


class InputParameter(NamedTuple):
    """A parameter of the model's forward that the graph knows; with an example, its structure and leaves."""

    name: str
    spec: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()  # Like, or the value itself, which has gone into the graph


class GraphInputs(NamedTuple):
    """All that the graph takes, and what it assumes of their sizes."""

    signature: inspect.Signature  # of the model's forward
    inputs: Sequence[InputParameter]
    guards: Sequence[str] = ()  # Python, of the dict `values` of the arguments

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any], cast: torch.dtype | None = None) -> list[Any]:
        """The graph's inputs in a call of the model's forward. Raises MismatchError for a call it was not made for.

        `cast`: what floating-point tensors have been cast to, whatever the example's were.
        """
        named_values = bind_arguments(self.signature, args, kwargs)
        self._check_names(named_values)
        leaves: list[Any] = []
        for each in self.inputs:
            if each.name not in named_values:
                raise MismatchError(f"the model was cut for a forward with {each.name}=, which is missing")
            leaves += [named_values[each.name]] if each.spec is None else _leaves(each, named_values[each.name], cast)
        for guard in self.guards:
            if not compile_guard(guard, "values")(named_values):
                told = re.sub(r"values\['(\w+)'\]", r"\1", guard)
                raise MismatchError(f"the model was cut for {told}, which does not hold here: give an example like this batch")
        return leaves

    def _check_names(self, given: Mapping[str, Any]) -> None:
        known = {each.name for each in self.inputs}
        for name, value in given.items():
            default = self.signature.parameters[name].default if name in self.signature.parameters else None
            if name not in known and not _fits(value, default):
                raise MismatchError(f"the model was cut without {name}=: where it is cut, give it in example_args or _kwargs")


def _leaves(expected: InputParameter, value: Any, cast: torch.dtype | None) -> list[Any]:
    leaves, spec = tree_flatten(value)
    if spec != expected.spec:
        raise MismatchError(f"the model was cut for another structure of {expected.name}: {expected.spec}, not {spec}")
    for leaf, like in zip(leaves, expected.leaves, strict=True):
        if cast is not None and isinstance(like, TensorSpec) and like.dtype.is_floating_point:
            like = like._replace(dtype=cast)
        if not _fits(leaf, like):
            got = str(TensorSpec(leaf.dtype, tuple(leaf.shape))) if isinstance(leaf, Tensor) else repr(leaf)
            hint = "give an example like this batch" + ", with a size of 1 where this has one" * _has_one(leaf, like)
            raise MismatchError(f"the model was cut for {expected.name} = {like}, not {got}: {hint}")
    return leaves


def _has_one(leaf: Any, like: Any) -> bool:
    """Whether the leaf has a size of 1, other than its rows, where the example had several."""
    if not isinstance(leaf, Tensor) or not isinstance(like, TensorSpec):
        return False
    sizes = enumerate(zip(like.sizes, leaf.shape, strict=False))
    return any(place != like.rows_dim and expected != 1 == size for place, (expected, size) in sizes)


def _fits(leaf: Any, like: Any) -> bool:
    if not isinstance(like, TensorSpec):
        return type(leaf) is type(like) and bool(leaf == like)
    if not isinstance(leaf, Tensor) or leaf.dtype != like.dtype or leaf.dim() != len(like.sizes):
        return False
    sizes = enumerate(zip(like.sizes, leaf.shape, strict=True))
    return all(mine == size or (size is None and (mine > 1 or place == like.rows_dim)) for place, (size, mine) in sizes)


def varargs_error(name: str) -> MismatchError:
    """For a forward that takes *name."""
    return MismatchError(f"a forward that takes *{name} cannot be cut along its graph: give its parameters names")


def bind_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the forward's parameters. Raises MismatchError if it cannot be called so."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise MismatchError(f"the model's forward{signature} cannot be called so: {error}") from error
    values: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise varargs_error(name)
        else:
            values[name] = value
    return values
