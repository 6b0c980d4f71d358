"""The inputs of a model that was cut along its graph: the arguments of its forward, and whether the graph holds for them."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.torch_private import TreeSpec, compile_guard, tree_flatten


class InputTensorSpec(NamedTuple):
    """The dtype and sizes of a tensor that the graph accepts.

    A size of None stands for any size. Only rows may then be 1, because `torch.export` specialises sizes of 1.
    """

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    rows_dim: int | None = 0

    def __str__(self) -> str:
        return f"{self.dtype} of shape ({', '.join(map(self._describe_size, range(len(self.sizes))))})"

    def _describe_size(self, dim: int) -> str:
        size = self.sizes[dim]
        return str(size) if size is not None else "any" if dim == self.rows_dim else "2 or more"


class InputParameter(NamedTuple):
    """A parameter of the model's forward that the graph has an input for; with an example, its structure and leaves."""

    name: str
    structure: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()  # InputTensorSpec, or the value itself, which is a constant of the graph


class Missing:
    """Stands for an item or attribute that a value has not."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


class ValueCheck(Protocol):
    """Raises MismatchError unless the graph holds for what values are, see `traced_values.py`."""

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of the model's forward, by name."""

    def check_values(self, is_training: bool, values: Sequence[tuple[Any, Any]]) -> None:
        """Check other values, with their keys; those that are not given are tensors."""


class GraphInputs(NamedTuple):
    """The inputs of a graph, and what it assumes of their sizes."""

    signature: inspect.Signature  # of the model's forward
    parameters: Sequence[InputParameter]
    guards: Sequence[str] = ()  # Python expressions of the dict `values` of the arguments
    value_check: ValueCheck | None = None  # of a graph that was traced without data

    def flatten_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], cast: torch.dtype | None = None) -> list[Any]:
        """Return the graph's inputs for a call of the model's forward. Raises MismatchError if the graph does not hold for it.

        `cast`: the dtype that floating-point tensors have been cast to, whatever the example's were.
        """
        arguments = arguments_by_parameter_name(self.signature, args, kwargs)
        self._check_no_other_arguments(arguments)

        leaves: list[Any] = []
        for parameter in self.parameters:
            if parameter.name not in arguments:
                raise MismatchError(f"the model was cut for a forward with {parameter.name}=, which is missing")
            value = arguments[parameter.name]
            leaves += [value] if parameter.structure is None else _flatten_and_check(parameter, value, cast)

        if self.value_check is not None:
            self.value_check.check_arguments({parameter.name: arguments[parameter.name] for parameter in self.parameters})
        for guard in self.guards:
            if not compile_guard(guard, "values")(arguments):
                condition = re.sub(r"values\['(\w+)'\]", r"\1", guard)
                raise MismatchError(
                    f"the model was cut for {condition}, which does not hold here: give an example like this batch"
                )
        return leaves

    def _check_no_other_arguments(self, arguments: Mapping[str, Any]) -> None:
        names = {parameter.name for parameter in self.parameters}
        for name, value in arguments.items():
            default = self.signature.parameters[name].default if name in self.signature.parameters else None
            if name not in names and not _matches(value, default):
                raise MismatchError(f"the model was cut without {name}=: where it is cut, give it in example_args or _kwargs")


def _flatten_and_check(parameter: InputParameter, value: Any, cast: torch.dtype | None) -> list[Any]:
    """Return the leaves of `value`. Raises MismatchError unless they match the example's."""
    leaves, structure = tree_flatten(value)
    if structure != parameter.structure:
        raise MismatchError(
            f"the model was cut for another structure of {parameter.name}: {parameter.structure}, not {structure}"
        )
    for leaf, spec in zip(leaves, parameter.leaves, strict=True):
        if cast is not None and isinstance(spec, InputTensorSpec) and spec.dtype.is_floating_point:
            spec = spec._replace(dtype=cast)
        if not _matches(leaf, spec):
            actual = str(InputTensorSpec(leaf.dtype, tuple(leaf.shape))) if isinstance(leaf, Tensor) else repr(leaf)
            hint = "give an example like this batch" + ", with a size of 1 where this has one" * _has_unexpected_size_1(
                leaf, spec
            )
            if isinstance(leaf, int | float) and isinstance(spec, int | float):
                hint += ", or a 0-dimensional tensor in both if the number only scales values and changes from step to step"
            raise MismatchError(f"the model was cut for {parameter.name} = {spec}, not {actual}: {hint}")
    return list(map(contiguous_if_integers, leaves))


def _has_unexpected_size_1(leaf: Any, spec: Any) -> bool:
    """Return whether the leaf has a size of 1, other than its rows, where the example had another."""
    if not isinstance(leaf, Tensor) or not isinstance(spec, InputTensorSpec):
        return False
    sizes = enumerate(zip(spec.sizes, leaf.shape, strict=False))
    return any(dim != spec.rows_dim and expected_size != 1 == size for dim, (expected_size, size) in sizes)


def _matches(leaf: Any, spec: Any) -> bool:
    if not isinstance(spec, InputTensorSpec):
        return type(leaf) is type(spec) and bool(leaf == spec)
    if not isinstance(leaf, Tensor) or leaf.dtype != spec.dtype or leaf.dim() != len(spec.sizes):
        return False
    return all(
        size == expected_size or (expected_size is None and (size > 1 or dim == spec.rows_dim))
        for dim, (expected_size, size) in enumerate(zip(spec.sizes, leaf.shape, strict=True))
    )


def contiguous_if_integers(leaf: Any) -> Any:
    """Return a tensor of integers contiguous, as `tokens[:, :-1]` is not: a graph may hold for one layout.

    Floating-point tensors stay as they are, since kernels choose by layout in which order they sum.
    """
    return leaf.contiguous() if isinstance(leaf, Tensor) and not leaf.dtype.is_floating_point else leaf


def varargs_error(name: str) -> MismatchError:
    """Return the error for a forward that takes *name."""
    return MismatchError(f"a forward that takes *{name} cannot be cut along its graph: give its parameters names")


def arguments_by_parameter_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by the names of the forward's parameters. Raises MismatchError if they do not fit it."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise MismatchError(f"the model's forward{signature} cannot be called so: {error}") from error
    arguments: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise varargs_error(name)
        else:
            arguments[name] = value
    return arguments
