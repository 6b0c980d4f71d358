"""A model's forward exported by `torch.export`, on an example, to a graph of its units; see `trace.py` for the other way.

Units are not looked into: while the forward is exported each is one operation (`opaque_units.py`), which becomes its call
again.
"""

import inspect
import io
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.comms.topology import CPU
from penstock.errors import MismatchError
from penstock.partition.graph_inputs import GraphInputs, InputParameter, TensorSpec, bind_arguments
from penstock.partition.materialise import META
from penstock.partition.model_graph import DEVICE, NO_GRAD, ModelGraph, first_line, train_then_eval
from penstock.partition.opaque_units import UNIT, UnitCall, opaque_units
from penstock.partition.rows import rows_dim_of, unwrap_tree
from penstock.partition.unit_times import replace_tensors
from penstock.torch_private import (
    export_guards,
    is_set_grad_call,
    tensor_slots,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

NOT_ONE = "!= 1"  # of sizes that are broadcast: a batch of one row is as good as any


def export_graph(
    model: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], rows_dim: int = 0
) -> ModelGraph:
    """Follow the forward on an example, by `torch.export`; sizes of tensors stay open, that of their rows for 1 too.

    Raises MismatchError with what `torch.export` says of a forward it cannot export.
    """
    signature = inspect.signature(model.forward)
    example = bind_arguments(signature, args, kwargs)
    dims = tree_map(lambda leaf: rows_dim_of(leaf, rows_dim), example)
    values = _several_rows(unwrap_tree(example), dims)
    device = _device_of(model)
    values = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, values)
    with _outlines(model, device) if device in (CPU, META) else nullcontext():
        exports = [_exported(model, units, values) for _ in train_then_eval(model)]
    extras: dict[str, Any] = {}
    graphs = [_Unflattener(program, calls, device, extras).graph() for program, calls in exports]
    guards = dict.fromkeys(guard for program, _ in exports for guard in _guards(program))
    return ModelGraph.from_graphs(
        model, graphs, GraphInputs(signature, _inputs(exports[0][0], values, dims), list(guards)), extras
    )


def _device_of(model: nn.Module) -> torch.device:
    """Where the forward decides as it will when it runs: on the CPU for a model on the meta device, unless there is a GPU.

    Likewise for a model of which a part is on another device than the rest.
    """
    devices = {each.device for each in model.parameters()} or {CPU}
    if len(devices) > 1 or devices == {META}:
        return META if torch.cuda.is_available() else CPU
    return devices.pop()


@contextmanager
def _outlines(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In the place of what is on another device the like on `device`, in memory that nothing touches, and so takes none."""
    if all(slot.tensor.device == device for slot in tensor_slots(model)):
        yield
        return
    deterministic: Any = torch.utils.deterministic
    before, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        with replace_tensors(model, partial(_outline, device)):
            yield
    finally:
        deterministic.fill_uninitialized_memory = before


def _outline(device: torch.device, tensor: Tensor) -> Tensor:
    if tensor.device == device:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _ByName(nn.Module):
    """A model that gets its arguments by name: so those it takes as **keywords are like all others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: dict[str, Any]) -> Any:
        return self.model(**values)


def _several_rows(values: dict[str, Any], dims: dict[str, Any]) -> dict[str, Any]:
    """The example, with two rows if it had one: `torch.export` takes a size of 1 to be always 1."""
    pairs = zip(tree_leaves(values), tree_leaves(dims), strict=True)
    if {leaf.shape[dim] for leaf, dim in pairs if dim is not None and dim < leaf.dim()} != {1}:
        return values
    return tree_map(_doubled, values, dims)


def _doubled(leaf: Any, dim: int | None) -> Any:
    return leaf if dim is None or dim >= leaf.dim() else torch.cat([leaf, leaf], dim)


def _inputs(program: ExportedProgram, values: Mapping[str, Any], dims: Mapping[str, Any]) -> list[InputParameter]:
    """What the graph takes for the `values` of the example, whose rows are in `dims`."""
    count = len(program.graph_signature.user_inputs)
    nodes = iter([node for node in program.graph.nodes if node.op == "placeholder"][-count:] if count else [])
    inputs = []
    for name, value in values.items():
        leaves, spec = tree_flatten(value)
        likes = [_like(leaf, next(nodes), dim) for leaf, dim in zip(leaves, tree_leaves(dims[name]), strict=True)]
        inputs.append(InputParameter(name, spec, tuple(likes)))
    return inputs


def _like(leaf: Any, node: fx.Node, rows_dim: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    sizes = tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)
    return TensorSpec(leaf.dtype, sizes, rows_dim)


def _exported(
    model: nn.Module, units: Mapping[str, nn.Module], values: dict[str, Any]
) -> tuple[ExportedProgram, list[UnitCall]]:
    """The model as a program in which units are operations, and what these stand for."""
    sizes = tree_map(_open_sizes, values)
    with torch.enable_grad(), opaque_units(units) as calls, _quiet():
        try:
            return torch.export.export(_ByName(model), (values,), dynamic_shapes=(sizes,), strict=False), calls
        except Exception as error:
            told, change = first_line(error), "change what it says"
            if "data-dependent" in told:  # torch's words for a decision by values
                change = "it decides by the values of a tensor, of which the next batch has others: decide with torch.where"
            told = f"cannot export the forward of {type(model).__name__} ({told}): {change}"
            raise MismatchError(f"{told}, or give a list with one module for each stage") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the graphs and tracebacks that torch prints of an export that fails: the error says why."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _open_sizes(leaf: Any) -> dict[int, Any] | None:
    """Which sizes stay open: all but those of 1, which are taken to be always 1."""
    return {place: Dim.AUTO for place, size in enumerate(leaf.shape) if size != 1} if isinstance(leaf, Tensor) else None


def _guards(program: ExportedProgram) -> list[str]:
    """What the forward between the units assumed of sizes."""
    guards = [guard.replace("L['values']", "values") for guard in export_guards(program)]
    return [guard for guard in guards if not guard.endswith(NOT_ONE)]


@dataclass
class _Unflattener:
    """The graph of an exported program, with its units called as modules again."""

    program: ExportedProgram
    calls: Sequence[UnitCall]
    device: torch.device
    extras: dict[str, Any]
    made: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # node of the program -> what stands for it in the graph

    def graph(self) -> fx.Graph:
        """The graph; what it reads that is no part of the model is among the `extras` then."""
        inputs = {each.arg.name: each for each in self.program.graph_signature.input_specs}
        for node in self.program.graph.find_nodes(op="placeholder"):
            self.values[node] = self._input(node, inputs[node.name])
        leaves = self._copied(self.program.graph_module, gradients=True)
        spec = self.program.call_spec.out_spec
        self.made.output(leaves[0] if spec.is_leaf() else self.made.call_function(tree_unflatten, (leaves, spec)))
        return self.made

    def _copied(self, module: fx.GraphModule, gradients: bool) -> list[Any]:
        """The outputs of a graph whose inputs are known; without `gradients` what it does is outside autograd's."""
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._value(each) for each in node.args[0]]
            if node.op == "get_attr":
                self.values[node] = self._extra(getattr(module, str(node.target)))
            elif node.op != "placeholder":
                self.values[node] = made = self._call(module, node, gradients)
                if isinstance(made, fx.Node) and not gradients:
                    made.meta[NO_GRAD] = True
        raise AssertionError("a graph has an output")

    def _call(self, module: fx.GraphModule, node: fx.Node, gradients: bool) -> Any:
        arguments: Any = node.args
        if node.target is UNIT:
            index, tensors, sizes = arguments
            return self._unit(index, tensors, sizes, gradients)
        if node.target is operator.getitem and isinstance(self.values[arguments[0]], list):
            return self.values[arguments[0]][arguments[1]]
        if is_set_grad_call(node.target):
            enabled, inner, *given = arguments
            inside = getattr(module, str(inner.target))
            self.values |= zip(inside.graph.find_nodes(op="placeholder"), map(self._value, given), strict=True)
            return self._copied(inside, gradients and enabled)
        if any(each.target is UNIT for each in _inside(module, node)):
            raise MismatchError(f"the forward has layers inside {node.target}: give a list with one module for each stage")
        args, kwargs = tree_map(self._value, (node.args, dict(node.kwargs)))
        return self.made.create_node(node.op, node.target, args, kwargs, node.name)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == self.device.type:
            return self.made.get_attr(DEVICE)
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def _input(self, node: fx.Node, spec: Any) -> fx.Node:
        if spec.kind is InputKind.USER_INPUT:
            return self.made.placeholder(node.name)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return self.made.get_attr(spec.target.removeprefix("model."))
        return self._extra(self.program.constants[spec.target])

    def _extra(self, value: Any) -> fx.Node:
        name = next((name for name, extra in self.extras.items() if extra is value), f"_penstock_{len(self.extras)}")
        self.extras[name] = value
        return self.made.get_attr(name)

    def _unit(self, index: int, tensors: Sequence[fx.Node], sizes: Sequence[Any], gradients: bool) -> list[Any]:
        """The nodes of the tensors that the call makes."""
        call = self.calls[index]
        args, kwargs = call.arguments([self._value(each) for each in tensors], [self._value(each) for each in sizes])
        node = self.made.call_module(call.name, args, kwargs)
        node.meta |= {} if gradients else {NO_GRAD: True}
        if call.made_spec.is_leaf():
            return [node]
        leaves = self.made.call_function(tree_leaves, (node,))
        places = [place for place, leaf in enumerate(call.made) if isinstance(leaf, Tensor)]
        return [self.made.call_function(operator.getitem, (leaves, place)) for place in places]


def _inside(module: nn.Module, node: fx.Node) -> list[fx.Node]:
    """The nodes of the graphs that are given to `node`."""
    parts = [getattr(module, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    return [inner for part in parts if isinstance(part, fx.GraphModule) for inner in part.graph.nodes]
