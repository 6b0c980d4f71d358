"""Units as single operations: while a model's forward is exported, `torch.export` does not look into them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_private import TreeSpec, tree_flatten, tree_unflatten, without_shape_guards

_LEAF = tree_flatten(None)[1]


@dataclass
class UnitCall:
    """One call of a unit during the export: how its arguments are put together, and what it gives."""

    name: str
    forward: Callable[..., Any]
    leaves: Sequence[Any]  # of (args, kwargs)
    spec: TreeSpec
    made: list[Any] = field(default_factory=list)  # of what it gives, once it has run
    made_spec: TreeSpec = _LEAF

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """(args, kwargs) with these in their places."""
        rest = {Tensor: iter(tensors), torch.SymInt: iter(numbers)}
        leaves = [next(rest[kind]) if kind in rest else leaf for leaf in self.leaves for kind in [_kind(leaf)]]
        return tree_unflatten(leaves, self.spec)

    def run(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Run the unit on tensors without values; its tensors."""
        args, kwargs = self.arguments(tensors, numbers)
        self.made, self.made_spec = tree_flatten(self.forward(*args, **kwargs))
        self.made = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.made]  # it may be an input
        return [leaf for leaf in self.made if isinstance(leaf, Tensor)]


def _kind(leaf: Any) -> Any:
    return Tensor if isinstance(leaf, Tensor) else torch.SymInt if isinstance(leaf, torch.SymInt) else None


_calls: list[list[UnitCall]] = []  # of the export that goes on


@torch.library.custom_op("penstock::unit", mutates_args=())
def _unit(call: int, tensors: list[Tensor], numbers: list[int]) -> list[Tensor]:
    raise AssertionError("a unit is called in an export only")


UNIT = torch.ops.penstock.unit.default  # what a node of the exported program calls


@_unit.register_fake
def _(call: int, tensors: list[Tensor], numbers: list[int]) -> list[Tensor]:
    with without_shape_guards(tensors):  # what sizes a unit looks at is its own
        return _calls[-1][call].run(tensors, numbers)


@contextmanager
def opaque_units(units: Mapping[str, nn.Module]) -> Iterator[list[UnitCall]]:
    """Every unit's forward replaced by one operation that `torch.export` does not look into."""
    calls: list[UnitCall] = []
    _calls.append(calls)
    for name, unit in units.items():
        unit.forward = _stub(name, unit.forward, calls)
    try:
        yield calls
    finally:
        _calls.pop()
        for unit in units.values():
            del unit.forward


def _stub(name: str, forward: Callable[..., Any], calls: list[UnitCall]) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        """The unit, as one operation."""
        leaves, spec = tree_flatten((args, kwargs))
        call = UnitCall(name, forward, leaves, spec)
        calls.append(call)
        given = {kind: [leaf for leaf in leaves if _kind(leaf) is kind] for kind in (Tensor, torch.SymInt)}
        made = iter(torch.ops.penstock.unit(len(calls) - 1, given[Tensor], given[torch.SymInt]))
        return tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in call.made], call.made_spec)

    return stub
