"""A model's forward exported by `torch.export`, on an example, to a graph of its units; see `trace.py` for the other way.

model + example  ->  ExportedProgram, in which each unit is one operation (`opaque_units.py`), once in training and once in
                     evaluation
                 ->  fx.Graph, in which each unit is a call of the module again (`_Unflattener`)
                 ->  ModelGraph, with the inputs it holds for
"""

import inspect
import io
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.modules.module import register_module_buffer_registration_hook

from penstock.comms.topology import CPU
from penstock.errors import MismatchError, first_line
from penstock.partition.attributes import Attribute, AttributeChange, restore_attributes_afterwards
from penstock.partition.graph_inputs import (
    GraphInputs,
    InputParameter,
    InputTensorSpec,
    arguments_by_parameter_name,
    contiguous_if_integers,
)
from penstock.partition.graph_stage import NO_GRAD
from penstock.partition.materialise import META
from penstock.partition.model_graph import AUTOCAST_IS_LOST, DEVICE_ATTRIBUTE, ModelGraph, train_then_eval
from penstock.partition.opaque_units import UNIT_OPERATION, RecordedUnitCall, units_as_custom_ops
from penstock.partition.runtime_functions import (
    RefuseAutogradQuestions,
    autograd_functions_as_custom_ops,
    mask_functions_as_custom_ops,
    only_units_use_results,
)
from penstock.partition.unit_times import replace_tensors_temporarily
from penstock.rows import rows_dim_of, unwrap_tree
from penstock.torch_private import (
    TreeSpec,
    buffer_slots,
    export_guards,
    is_wrap_with_set_grad_enabled,
    tensor_slots,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

BROADCAST_GUARD = "!= 1"  # ends guards of sizes that are broadcast: a batch of one row is fine too


def export_graph(
    model: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], rows_dim: int = 0
) -> ModelGraph:
    """Return the graph of the forward on an example. Sizes of tensors stay open, those of their rows also for 1.

    Raises MismatchError with the words of `torch.export` for a forward that it cannot export.
    """
    # The example: on one device, with two rows at least.
    signature = inspect.signature(model.forward)
    example = arguments_by_parameter_name(signature, args, kwargs)
    rows_dims = tree_map(lambda leaf: rows_dim_of(leaf, rows_dim), example)
    device = _device_to_export_on(model)
    values = tree_map(contiguous_if_integers, _double_single_row(unwrap_tree(example), rows_dims))
    values = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, values)

    # Two programs, of training and of evaluation, and their graphs.
    with _model_on_device_without_memory(model, device) if device in (CPU, META) else nullcontext():
        exports = [_export_program(model, units, values) for _ in train_then_eval(model)]
    extras: dict[str, Any] = {}
    graphs = [_Unflattener(export, device, extras).make_graph() for export in exports]

    # What they hold for.
    guards = dict.fromkeys(guard for export in exports for guard in _size_guards(export.program))
    inputs = GraphInputs(signature, _input_parameters(exports[0].program, values, rows_dims), list(guards))
    changes = exports[1].result.changes | exports[0].result.changes
    constants = {id(tensor) for export in exports for tensor in export.constants_in_attributes()}
    return ModelGraph.from_train_and_eval_graphs(model, graphs, inputs, list(changes.values()), extras, constants)


# -- the example and the device ----------------------------------------------------------------------------------------


def _device_to_export_on(model: nn.Module) -> torch.device:
    """Return the device on which the forward decides as it will when it runs.

    For a model that is on the meta device, or on several devices: META if there is a GPU, else the CPU.
    """
    devices = {parameter.device for parameter in model.parameters()} or {CPU}
    if len(devices) > 1 or devices == {META}:
        return META if torch.cuda.is_available() else CPU
    return devices.pop()


@contextmanager
def _model_on_device_without_memory(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace tensors on other devices by ones on `device`, whose memory is never touched and so takes none."""
    if all(slot.tensor.device == device for slot in tensor_slots(model)):
        yield
        return
    deterministic: Any = torch.utils.deterministic
    fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
    try:
        with replace_tensors_temporarily(model, partial(_empty_like_on_device, device)):
            yield
    finally:
        deterministic.fill_uninitialized_memory = fills


def _empty_like_on_device(device: torch.device, tensor: Tensor) -> Tensor:
    if tensor.device == device:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _double_single_row(values: dict[str, Any], rows_dims: dict[str, Any]) -> dict[str, Any]:
    """Return the example, with two rows if it has one: `torch.export` takes a size of 1 to be always 1."""
    pairs = zip(tree_leaves(values), tree_leaves(rows_dims), strict=True)
    if {leaf.shape[dim] for leaf, dim in pairs if dim is not None and dim < leaf.dim()} != {1}:
        return values
    return tree_map(_with_doubled_rows, values, rows_dims)


def _with_doubled_rows(leaf: Any, rows_dim: int | None) -> Any:
    return leaf if rows_dim is None or rows_dim >= leaf.dim() else torch.cat([leaf, leaf], rows_dim)


# -- the export --------------------------------------------------------------------------------------------------------


@dataclass
class _ForwardResult:
    """What the exported forward has returned and set. No attribute of the module: `torch.export` restores those."""

    output_structure: TreeSpec = tree_flatten(None)[1]
    changes: dict[Attribute, AttributeChange] = field(default_factory=dict)  # of modules around the units

    def tensors_in_attributes(self) -> list[Tensor]:
        """Return the tensors in attributes that the forward has set."""
        return [leaf for change in self.changes.values() for leaf in change.leaves() if isinstance(leaf, Tensor)]


class _KeywordModel(nn.Module):
    """A model that takes its arguments as a dict: **keywords are then arguments like all others.

    It returns the leaves of the output, then the tensors in attributes that it has set.
    """

    def __init__(self, model: nn.Module, calls: Sequence[RecordedUnitCall], result: _ForwardResult) -> None:
        super().__init__()
        self.model, self._calls_and_result = model, lambda: (calls, result)

    def forward(self, values: dict[str, Any]) -> list[Any]:
        calls, result = self._calls_and_result()
        with restore_attributes_afterwards(self.model) as changes, _replaced_buffers_are_filled(self.model):
            with RefuseAutogradQuestions(self.model.training):
                output = self.model(**values)
            leaves, result.output_structure = tree_flatten(output)

        units = [self.model.get_submodule(call.name) for call in calls if call.is_unit]
        in_units = {id(module) for unit in units for module in unit.modules()}
        result.changes = {attribute: change for attribute, change in changes.items() if attribute[0] not in in_units}
        return [*leaves, *result.tensors_in_attributes()]


@contextmanager
def _replaced_buffers_are_filled(model: nn.Module) -> Iterator[None]:
    """Copy a tensor that the forward inside puts into a buffer's place (`self.mean = ..`) into the buffer, in the graph too."""
    slots = {(id(slot.owner), slot.key): slot for slot in buffer_slots(model)}

    def fill_buffer(module: nn.Module, name: str, value: Any) -> None:
        slot = slots.get((id(module), name))
        if slot is None or value is slot.tensor or not isinstance(value, Tensor):
            return
        if value.shape != slot.tensor.shape or value.dtype != slot.tensor.dtype:
            raise MismatchError(
                f"the forward of {type(model).__name__} replaces the buffer {slot.name}, {slot.tensor.dtype} of shape "
                f"{tuple(slot.tensor.shape)}, by {value.dtype} of shape {tuple(value.shape)}, which cannot be followed: do it "
                "in a layer"
            )
        with torch.no_grad():
            slot.tensor.copy_(value)

    hook = register_module_buffer_registration_hook(fill_buffer)
    try:
        yield
    finally:
        hook.remove()
        for slot in slots.values():
            slot.replace(slot.tensor)


class _Export(NamedTuple):
    """A model as a program in which units are operations, the calls that these stand for, and what the forward did."""

    program: ExportedProgram
    calls: Sequence[RecordedUnitCall]
    result: _ForwardResult

    def constants_in_attributes(self) -> list[Tensor]:
        """Return the tensors in attributes that depend on sizes alone: tables that the forward fills when it needs them."""
        tensors = self.result.tensors_in_attributes()
        nodes = list(self.program.graph.output_node().args[0])[self.result.output_structure.num_leaves :]
        return [tensor for tensor, node in zip(tensors, nodes, strict=True) if not _depends_on_tensors(node)]


def _depends_on_tensors(node: Any) -> bool:
    """Whether a node of a program depends on the values of an input, a parameter or a buffer."""
    visited, pending = set[fx.Node](), [node]
    while pending:
        node = pending.pop()
        if node in visited or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        visited.add(node)
        if node.op == "placeholder" or node.target is UNIT_OPERATION:
            return True
        pending += node.all_input_nodes
    return False


def _export_program(model: nn.Module, units: Mapping[str, nn.Module], values: dict[str, Any]) -> _Export:
    """Return the model as a program in which units are operations, and so are functions that decide by values."""
    export = _export_once(model, units, values, calls_mask_functions=True)
    if only_units_use_results(list(export.program.graph.nodes), export.calls):
        return export
    return _export_once(model, units, values, calls_mask_functions=False)


def _export_once(
    model: nn.Module, units: Mapping[str, nn.Module], values: dict[str, Any], calls_mask_functions: bool
) -> _Export:
    dynamic_shapes, result = tree_map(_dynamic_sizes, values), _ForwardResult()
    with torch.enable_grad(), units_as_custom_ops(units) as calls, _without_logs():
        functions = mask_functions_as_custom_ops(model, calls) if calls_mask_functions else nullcontext()
        try:
            root = _KeywordModel(model, calls, result)
            with functions, autograd_functions_as_custom_ops(calls):
                program = torch.export.export(root, (values,), dynamic_shapes=(dynamic_shapes,), strict=False)
            return _Export(program, calls, result)
        except MismatchError:
            raise
        except Exception as error:
            reason, advice = first_line(error), "change what it says"
            if "data-dependent" in reason:  # torch's words for a decision by values
                advice = "it decides by the values of a tensor, which differ in the next batch: decide with torch.where"
            if "not a known type" in reason:  # of what the forward returns
                advice = _advice_on_outputs(model)
            raise MismatchError(
                f"cannot export the forward of {type(model).__name__} ({reason}): {advice}, or give a list with one module for "
                "each stage"
            ) from error


def _advice_on_outputs(model: nn.Module) -> str:
    """Return as text what to do about an output of an unknown kind, as the cache of a model of transformers is."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            config = ".".join(["model", *filter(None, [name]), "config"])
            return f"it returns a cache of keys and values: set {config}.use_cache = False before"
    return "return tensors, in tuples, lists and dicts"


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress the graphs and tracebacks that torch prints if an export fails: the error says why."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _dynamic_sizes(leaf: Any) -> dict[int, Any] | None:
    """Return which sizes stay open: all except those of 1, which are taken to be always 1."""
    return {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != 1} if isinstance(leaf, Tensor) else None


def _size_guards(program: ExportedProgram) -> list[str]:
    """Return what the forward between the units assumes of sizes, as Python expressions of `values`."""
    guards = [guard.replace("L['values']", "values") for guard in export_guards(program)]
    return [guard for guard in guards if not guard.endswith(BROADCAST_GUARD)]


def _input_parameters(
    program: ExportedProgram, values: Mapping[str, Any], rows_dims: Mapping[str, Any]
) -> list[InputParameter]:
    """Return the forward's parameters with the structures and leaves that the graph holds for."""
    num_inputs = len(program.graph_signature.user_inputs)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    nodes = iter(placeholders[-num_inputs:] if num_inputs else [])
    inputs = []
    for name, value in values.items():
        leaves, structure = tree_flatten(value)
        specs = [_leaf_spec(leaf, next(nodes), dim) for leaf, dim in zip(leaves, tree_leaves(rows_dims[name]), strict=True)]
        inputs.append(InputParameter(name, structure, tuple(specs)))
    return inputs


def _leaf_spec(leaf: Any, node: fx.Node, rows_dim: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    sizes = tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)
    return InputTensorSpec(leaf.dtype, sizes, rows_dim)


# -- from the program to the graph -------------------------------------------------------------------------------------


class _Unflattener:
    """Copies an exported program to a graph in which its units are called as modules again.

    `extras`: gets what the graph reads that is no part of the model.
    """

    def __init__(self, export: _Export, device: torch.device, extras: dict[str, Any]) -> None:
        self.program, self.calls, self.device, self.extras = export.program, export.calls, device, extras
        self._output_structure = export.result.output_structure
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}  # node of the program -> node of the graph; of a unit, those of its tensors

    def make_graph(self) -> fx.Graph:
        """Return the graph."""
        input_specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.find_nodes(op="placeholder"):
            self.copies[node] = self._copy_input_or_parameter(node, input_specs[node.name])

        leaves = self._copy_body(self.program.graph_module, with_grad=True)
        structure: Any = self._output_structure
        leaves = leaves[: structure.num_leaves]  # without the tensors in attributes
        output = leaves[0] if structure.is_leaf() else self.graph.call_function(tree_unflatten, (leaves, structure))
        self.graph.output(output)
        return self.graph

    def _copy_input_or_parameter(self, node: fx.Node, spec: Any) -> fx.Node:
        if spec.kind is InputKind.USER_INPUT:
            return self.graph.placeholder(node.name)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return self.graph.get_attr(spec.target.removeprefix("model."))
        return self._add_constant_attribute(self.program.constants[spec.target])

    def _copy_body(self, module: fx.GraphModule, with_grad: bool) -> list[Any]:
        """Copy the nodes between placeholders and output; return the output's leaves. `with_grad`: inside autograd's graph."""
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._copied_argument(leaf) for leaf in node.args[0]]
            if node.op == "get_attr":
                self.copies[node] = self._add_constant_attribute(getattr(module, str(node.target)))
            elif node.op != "placeholder":
                self.copies[node] = copied = self._copy_call(module, node, with_grad)
                if isinstance(copied, fx.Node) and not with_grad:
                    copied.meta[NO_GRAD] = True
        raise AssertionError("a graph has an output")

    def _copy_call(self, module: fx.GraphModule, node: fx.Node, with_grad: bool) -> Any:
        arguments: Any = node.args
        # A unit, and the choice of one of its tensors.
        if node.target is UNIT_OPERATION:
            number, tensors, sizes = arguments
            return self._call_unit(number, tensors, sizes, with_grad)
        if node.target is operator.getitem and isinstance(self.copies[arguments[0]], list):
            return self.copies[arguments[0]][arguments[1]]

        # `with torch.no_grad()`: a graph inside this one.
        if is_wrap_with_set_grad_enabled(node.target):
            enabled, inner_graph, *inner_arguments = arguments
            inner = getattr(module, str(inner_graph.target))
            inner_inputs = inner.graph.find_nodes(op="placeholder")
            self.copies |= zip(inner_inputs, map(self._copied_argument, inner_arguments), strict=True)
            return self._copy_body(inner, with_grad and enabled)

        # Anything else.
        if any(inner_node.target is UNIT_OPERATION for inner_node in _subgraph_nodes(module, node)):
            if "autocast" in str(node.target):
                raise MismatchError(f"the forward enters {AUTOCAST_IS_LOST}")
            raise MismatchError(f"the forward has layers inside {node.target}: give a list with one module for each stage")
        args, kwargs = tree_map(self._copied_argument, (node.args, dict(node.kwargs)))
        return self.graph.create_node(node.op, node.target, args, kwargs, node.name)

    def _call_unit(self, number: int, tensors: Sequence[fx.Node], sizes: Sequence[Any], with_grad: bool) -> list[Any]:
        """Add the call of a unit or a function; return the nodes of its output's tensors."""
        call = self.calls[number]
        args, kwargs = call.arguments(list(map(self._copied_argument, tensors)), list(map(self._copied_argument, sizes)))
        if call.is_unit:
            output = self.graph.call_module(call.name, args, kwargs)
        else:
            output = self.graph.create_node("call_function", call.forward, args, kwargs, call.name)
        output.meta |= {} if with_grad else {NO_GRAD: True}
        if call.output_structure.is_leaf():
            return [output]
        leaves = self.graph.call_function(tree_leaves, (output,))
        tensor_indices = [index for index, leaf in enumerate(call.output_leaves) if isinstance(leaf, Tensor)]
        return [self.graph.call_function(operator.getitem, (leaves, index)) for index in tensor_indices]

    def _copied_argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == self.device.type:
            return self.graph.get_attr(DEVICE_ATTRIBUTE)
        return self.copies[argument] if isinstance(argument, fx.Node) else argument

    def _add_constant_attribute(self, value: Any) -> fx.Node:
        name = next((name for name, extra in self.extras.items() if extra is value), f"_penstock_{len(self.extras)}")
        self.extras[name] = value
        return self.graph.get_attr(name)


def _subgraph_nodes(module: nn.Module, node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the graphs that are arguments of `node`."""
    arguments = [
        getattr(module, str(all_input_node.target))
        for all_input_node in node.all_input_nodes
        if all_input_node.op == "get_attr"
    ]
    return [inner for argument in arguments if isinstance(argument, fx.GraphModule) for inner in argument.graph.nodes]
