"""Units as single operations: while a model's forward is exported, `torch.export` does not look into them.

So are functions whose graphs would say less than they do (`runtime_functions.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch_private import TreeSpec, suppress_shape_guards, tree_flatten, tree_unflatten

_LEAF = tree_flatten(None)[1]


@dataclass
class RecordedUnitCall:
    """One call of a unit, or of a function, during the export: its arguments, and once it has run its output."""

    name: str
    forward: Callable[..., Any]
    leaves: Sequence[Any]  # of (args, kwargs)
    structure: TreeSpec
    is_unit: bool = True
    output_leaves: list[Any] = field(default_factory=list)
    output_structure: TreeSpec = _LEAF

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """Return (args, kwargs) with these in the places of the tensors and of the symbolic sizes."""
        replacements = {Tensor: iter(tensors), torch.SymInt: iter(sizes)}
        leaves = [next(replacements[_kind(leaf)]) if _kind(leaf) is not None else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def run_without_values(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Run the unit on tensors without values; return its output's tensors."""
        args, kwargs = self.arguments(tensors, sizes)
        output_leaves, self.output_structure = tree_flatten(self.forward(*args, **kwargs))
        # An operation must not return an input, a unit may.
        self.output_leaves = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in output_leaves]
        return [leaf for leaf in self.output_leaves if isinstance(leaf, Tensor)]


def _kind(leaf: Any) -> Any:
    return Tensor if isinstance(leaf, Tensor) else torch.SymInt if isinstance(leaf, torch.SymInt) else None


_exports: list[list[RecordedUnitCall]] = []  # the calls of the export that is running, last
_running: list[RecordedUnitCall] = []  # the calls inside of which this code runs


def inside_operation() -> bool:
    """Return whether this code runs inside a unit or a function that is one operation."""
    return bool(_running)


@torch.library.custom_op("penstock::unit", mutates_args=())
def _unit(call: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    raise AssertionError("a unit is called in an export only")


UNIT_OPERATION = torch.ops.penstock.unit.default  # the target of a unit's node in the exported program


@_unit.register_fake
def _(call: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    with suppress_shape_guards(tensors):  # decisions by sizes inside a unit do not restrict the graph
        return _exports[-1][call].run_without_values(tensors, sizes)


@contextmanager
def units_as_custom_ops(units: Mapping[str, nn.Module]) -> Iterator[list[RecordedUnitCall]]:
    """Replace the forward of every unit by one operation; yield a list that gets the units' calls."""
    calls: list[RecordedUnitCall] = []
    _exports.append(calls)
    for name, unit in units.items():
        unit.forward = as_custom_op(name, unit.forward, calls)
    try:
        yield calls
    finally:
        _exports.pop()
        for unit in units.values():
            del unit.forward


def as_custom_op(
    name: str, forward: Callable[..., Any], calls: list[RecordedUnitCall], is_unit: bool = True
) -> Callable[..., Any]:
    """Return `forward` as one operation, whose calls are appended to `calls`."""

    def opaque_forward(*args: Any, **kwargs: Any) -> Any:
        if _running and not _running[-1].is_unit:
            raise MismatchError(f"the forward calls the layer {name} inside {_running[-1].name}: call it outside")
        leaves, structure = tree_flatten((args, kwargs))
        call = RecordedUnitCall(name, forward, leaves, structure, is_unit)
        calls.append(call)

        tensors = [leaf for leaf in leaves if _kind(leaf) is Tensor]
        sizes = [leaf for leaf in leaves if _kind(leaf) is torch.SymInt]
        _running.append(call)
        try:
            outputs = iter(torch.ops.penstock.unit(len(calls) - 1, tensors, sizes))
        finally:
            _running.pop()
        output_leaves = [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in call.output_leaves]
        return tree_unflatten(output_leaves, call.output_structure)

    return opaque_forward
