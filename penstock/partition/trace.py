"""A model's forward traced by `torch.fx`, without data, to a graph of its units; see `export.py` for the other way.

The units remain modules that are called. Only what is between them, in the forwards of the modules around them, is traced.
"""

import inspect
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from penstock.errors import MismatchError
from penstock.partition.attributes import Attribute, AttributeChange, restore_attributes_afterwards
from penstock.partition.graph_inputs import GraphInputs, InputParameter, varargs_error
from penstock.partition.model_graph import (
    INPLACE_OPERATORS,
    NO_GRAD,
    ModelGraph,
    eliminate_unused_nodes,
    first_line,
    train_then_eval,
)
from penstock.torch_private import TensorSlot, buffer_slots, tensor_version

ADVICE = "give example_args, so that it can be exported; or a list with one module for each stage"


def trace_graph(model: nn.Module, units: Mapping[str, nn.Module]) -> ModelGraph:
    """Return the graph of the forward. Its parameters with a default keep that.

    Raises MismatchError for a forward that decides by values or shapes.
    """
    changes = dict[Attribute, AttributeChange]()
    graphs = [_trace(model, units, changes) for _ in train_then_eval(model)]
    names = [str(node.target) for node in graphs[0].find_nodes(op="placeholder")]
    parameters = [
        InputParameter(name, takes_none=len(names) == 1 or _is_same_for_none(model, units, graphs, name)) for name in names
    ]
    inputs = GraphInputs(inspect.signature(model.forward), parameters)
    return ModelGraph.from_train_and_eval_graphs(model, graphs, inputs, list(changes.values()))


def _is_same_for_none(model: nn.Module, units: Mapping[str, nn.Module], graphs: Sequence[fx.Graph], name: str) -> bool:
    """Whether the forward does the same if the argument `name` is None: `name is None` is False of a value in the graph."""
    try:
        graphs_for_none = [_trace(model, units, {}, none=name) for _ in train_then_eval(model)]
    except MismatchError:
        return False
    return all(_calls(a, name) == _calls(b, name) for a, b in zip(graphs, graphs_for_none, strict=True))


def _calls(graph: fx.Graph, none: str) -> list[str]:
    """Return what the graph does, with None for the argument `none`."""
    eliminate_unused_nodes(graph)

    def argument(node: fx.Node) -> Any:
        return None if node.op == "placeholder" and node.target == none else node

    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    return [f"{node.op} {node.target} {map_arg((node.args, node.kwargs), argument)}" for node in nodes]


class _Proxy(fx.Proxy):
    """A value in the graph. `value += operand` changes it in place there too, where torch's own proxy would make another."""


def _inplace_method(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, operand: value.tracer.create_proxy("call_function", change, (value, operand), {})


for _name in INPLACE_OPERATORS:
    setattr(_Proxy, f"__{_name}__", _inplace_method(getattr(operator, _name)))


class _UnitTracer(fx.Tracer):
    def __init__(self, units: Mapping[str, nn.Module], none: str | None) -> None:
        super().__init__(param_shapes_constant=True)
        self.units, self._none, self._autocast = units, none, _autocast_modes()
        self.changes: dict[Attribute, AttributeChange] = {}  # attributes that the forward has set

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a node that records whether it is inside a `torch.no_grad()`."""
        if _autocast_modes() != self._autocast:
            raise MismatchError(
                f"the forward of {type(self.root).__name__} enters torch.autocast, which is lost where it is cut: enter it "
                "in the forward of a layer, or call step() under torch.autocast"
            )
        node = super().create_node(*args, **kwargs)
        node.meta |= {} if torch.is_grad_enabled() else {NO_GRAD: True}
        return node

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Return placeholders for the parameters that have no default."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise varargs_error(parameter.name)
        names = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def traced_forward(model: nn.Module, *args: Any) -> Any:
            arguments = {name: None if name == self._none else value for name, value in zip(names, args, strict=True)}
            with restore_attributes_afterwards(model) as self.changes:
                return forward(model, **arguments)

        return traced_forward, [self.root, *values]


def _autocast_modes() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def _trace(
    model: nn.Module, units: Mapping[str, nn.Module], changes: dict[Attribute, AttributeChange], none: str | None = None
) -> fx.Graph:
    """Return the graph; put the attributes that the forward sets into `changes`. `none`: an argument that is None."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    buffers = [(slot, tensor_version(slot.tensor)) for slot in buffer_slots(model)]
    name, tracer = type(model).__name__, _UnitTracer(units, none)
    try:
        with torch.enable_grad():
            graph = tracer.trace(model)
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {name} ({first_line(error)}): {ADVICE}") from error
    finally:
        changed_buffers = [slot for slot, version in buffers if not _is_unchanged(slot, version)]
        for slot in changed_buffers:
            slot.replace(slot.tensor)

    if random.getstate() != python_state or not torch.equal(torch.get_rng_state(), torch_state):
        raise MismatchError(
            f"the forward of {name} draws random numbers between its layers, which would be the same in every step once it is "
            "cut: draw them in a layer"
        )
    constants = [node for node in graph.nodes if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")]
    if constants or changed_buffers:
        raise MismatchError(
            f"the forward of {name} makes or changes a tensor between its layers, which cannot be followed without data: do it "
            "in a layer, or give example_args"
        )
    changes |= {attribute: change for attribute, change in tracer.changes.items() if attribute not in changes}
    return graph


def _is_unchanged(slot: TensorSlot, version: int) -> bool:
    return slot.registry.get(slot.key) is slot.tensor and tensor_version(slot.tensor) == version
